"""A mirror out of a store that is there, and CE17 end to end: two disks, of which one dies or is replaced."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import weightline as wl
from weightline.errors import ConflictError, IntegrityError, InvalidInput, Unavailable
from weightline.store import Store
from weightline.store import mirror_repair as repairs
from weightline.store.mirror_make import make_mirror

Run = Callable[..., Any]


def policy(version: int) -> dict[str, Any]:
    embed = np.random.default_rng(0).standard_normal((16, 8)).astype(ml_dtypes.bfloat16)
    embed.reshape(-1).view(np.uint16)[version] ^= version
    return {"embed.weight": embed}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[n].tobytes() == b[n].tobytes() for n in a)


def truth(folder: Path) -> dict[str, bytes]:
    """What lies in a half, but for what means something to a plain folder only."""
    skip = ("mirror.json", "catalog.sqlite", "server.", "cleaner.", ".")
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(skip)
    }


@pytest.fixture
def disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A plain store of three versions with acks, and where its mirror will be."""
    monkeypatch.setenv("WEIGHTLINE_CACHE", str(tmp_path / "cache"))
    one, other = tmp_path / "one" / "ckpt", tmp_path / "other" / "ckpt"
    other.parent.mkdir()
    with wl.CheckpointEngine(one) as engine:
        for version in (1, 2, 3):
            engine.commit(policy(version), step=version, attachments={"opt": b"adam"})
        engine.ack(3, "engine-0")
    return one, other


def test_a_plain_store_becomes_a_mirror_with_all_it_knows(
    disks: tuple[Path, Path], run_weightline: Run
) -> None:
    one, other = disks
    made = run_weightline("mirror", one, other, "--json")
    assert made.code == 0, made.err
    said = made.json()
    assert (said["ok"], said["arbiter"]) == (True, str(one))
    assert truth(one) == truth(other)
    with wl.CheckpointEngine(said["store"]) as engine:
        assert [record.step for record in engine.versions()] == [1, 2, 3]
        assert [ack.subscriber for ack in engine.record(3).acks] == ["engine-0"]
        assert engine.commit(policy(4)) == 4
    assert truth(one) == truth(other)
    assert run_weightline("verify", said["store"], "--deep", "--json").json()["ok"]
    assert run_weightline("mirror", one, other, "--json").json()["done"] == []
    assert "Example" in run_weightline("mirror", "--help").out


def test_a_handle_that_was_left_open_on_the_folder_alone_is_refused(disks: tuple[Path, Path]) -> None:
    one, other = disks
    left = Store.open(one)
    writer = left.writer()
    make_mirror(one, other)
    for act in (lambda: writer.commit(policy(4)), lambda: left.yank(1), lambda: Store.open(one).writer()):
        with pytest.raises(ConflictError, match="half of a mirror"):
            act()
    assert same(Store.open(one).load(3), policy(3))
    assert truth(one) == truth(other)


def test_cut_short_at_any_file_the_same_call_goes_on(
    disks: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = disks
    real, left = repairs._copy, [0]

    def copy(*arguments: Any) -> None:
        if left[0] == 0:
            raise Unavailable("the disk went away", hint="")
        left[0] -= 1
        real(*arguments)

    monkeypatch.setattr(repairs, "_copy", copy)
    for number in range(100):
        left[0] = number
        try:
            url, _ = make_mirror(one, other)
            break
        except Unavailable:
            assert same(Store.open(one).load(3), policy(3))
    assert number > 3
    assert truth(one) == truth(other)
    assert Store.open(url).writer().commit(policy(4)).version == 4


@pytest.mark.parametrize("case", ["full", "inside", "no disk", "url", "served", "nothing", "itself"])
def test_what_cannot_be_a_mirror_is_refused_and_left_alone(
    disks: tuple[Path, Path], tmp_path: Path, run_weightline: Run, case: str
) -> None:
    one, other = disks
    before, store, target, said = truth(one), str(one), other, ""
    match case:
        case "full":
            (tmp_path / "full").mkdir()
            (tmp_path / "full" / "thesis.tex").write_text("mine")
            target, said = tmp_path / "full", "holds something else"
        case "inside":
            target, said = one / "copy", "lies in the store"
        case "itself":
            target, said = one, "lies in the store"
        case "no disk":
            target, said = tmp_path / "unmounted" / "ckpt", "mount the disk"
        case "url":
            store, said = f"mirror:{one},{other}", "not a folder"
        case "nothing":
            store, said = str(tmp_path / "nothing"), "no store"
        case "served":
            from weightline.service.presence import ServerLock

            lock = ServerLock.take(one)
            said = "on this store"
    result = run_weightline("mirror", store, target)
    assert result.code != 0
    assert said in result.err
    assert "hint" in result.err
    assert truth(one) == before
    assert not (tmp_path / "nothing").exists()
    if case == "served":
        lock.release()
    if case == "full":
        assert [path.name for path in target.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("dead", [0, 1])
def test_the_loss_of_one_disk_under_a_running_trainer_loses_nothing_is_noticed_and_healed(
    disks: tuple[Path, Path], run_weightline: Run, caplog: pytest.LogCaptureFixture, dead: int
) -> None:
    url, _ = make_mirror(*disks)
    with wl.CheckpointEngine(url) as trainer, wl.connect(url) as engine:  # type: ignore[attr-defined]
        assert trainer.commit(policy(4), step=4, attachments={"opt": b"adam 4"}) == 4
        shutil.rmtree(disks[dead])
        disks[dead].mkdir()
        for version in (1, 2, 3, 4):
            assert same(engine.load(version), policy(version))
        assert engine.recover().attachments["opt"].read_bytes() == b"adam 4"
        with pytest.raises(Unavailable) as caught:
            trainer.commit(policy(5), commit_id="five")
        assert "verify --repair" in caught.value.hint
        found = run_weightline("verify", url, "--json")
        assert found.code != 0
        assert {p["kind"] for p in json.loads(found.out)["problems"]} == {"mirror"}
        healed = run_weightline("verify", url, "--repair", "--json")
        assert healed.code == 0, healed.err
        assert truth(disks[0]) == truth(disks[1])
        if dead == 1:
            # The arbiter lived on, so the trainer that waited goes on by itself.
            assert trainer.commit(policy(5), commit_id="five") == 5
    with wl.CheckpointEngine(url) as trainer:
        assert trainer.commit(policy(5), commit_id="five") == 5
        assert same(trainer.load(5), policy(5))
    shutil.rmtree(disks[1 - dead])
    assert same(Store.open(url).load(5), policy(5))


def test_a_version_that_is_lost_all_the_same_keeps_engines_on_the_last_good_one(
    disks: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    url, _ = make_mirror(*disks)
    with wl.CheckpointEngine(url) as trainer:
        trainer.commit(policy(4), step=4)
        lost = trainer.record(4).folder
    for disk in disks:
        shutil.rmtree(disk / lost)
    with wl.connect(url) as engine:  # type: ignore[attr-defined]
        assert engine.wait_for_update(timeout=0, after=3) == 4
        with pytest.raises(IntegrityError, match="version 4"):
            engine.fetch_delta(4)
        assert same(engine.load(3), policy(3))
        with caplog.at_level(logging.WARNING), wl.CheckpointEngine(url) as trainer:
            assert trainer.commit(policy(5), step=5) == 5
            assert "stands on its own" in caplog.text
            assert trainer.record(5).kind == "anchor"
        assert engine.wait_for_update(timeout=30) == 5
        delta = engine.fetch_delta(5, have=3)
        held = policy(3)
        delta.apply_(held)
        assert same(held, policy(5))


def test_a_mirror_whose_arbiter_is_away_is_served_for_reading(
    disks: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, _ = make_mirror(*disks)
    disks[0].rename(tmp_path / "unplugged")
    with caplog.at_level(logging.WARNING), wl.CheckpointEngine(url) as engine:
        assert "degraded" in caplog.text
        assert "read only" in caplog.text
        assert same(engine.load(3), policy(3))
        with pytest.raises(Unavailable, match="decides about the log is away"):
            engine.commit(policy(4))
        (tmp_path / "unplugged").rename(disks[0])
        with pytest.raises(InvalidInput, match="both halves are there"):
            Store.open(url).place.promote()  # type: ignore[attr-defined]
    with wl.CheckpointEngine(url) as engine:
        assert engine.commit(policy(4)) == 4


def test_an_unchanged_attachment_takes_its_room_once_in_each_half(disks: tuple[Path, Path]) -> None:
    url, _ = make_mirror(*disks)
    with wl.CheckpointEngine(url) as trainer:
        trainer.commit(policy(4), attachments={"opt": b"adam 4", "data": b"position"})
        trainer.commit(policy(5), attachments={"opt": b"adam 5", "data": b"position"})
        folders = [trainer.record(version).folder for version in (4, 5)]
        for disk in disks:
            first, second = ((disk / f / "attachments" / "data").stat() for f in folders)
            assert (first.st_ino, first.st_nlink) == (second.st_ino, 2)
        for disk in disks:
            shutil.rmtree(disk / folders[0])
        assert trainer.recover().attachments["data"].read_bytes() == b"position"
