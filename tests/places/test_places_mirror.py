"""A store over two folders: either may die, rot or be replaced by an empty disk."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from weightline.errors import ConflictError, IntegrityError, InvalidInput, Unavailable
from weightline.store import Store
from weightline.store.mirror import MirrorPlace

Weights = dict[str, Any]
Open = Callable[..., Store]


def policy_of(version: int) -> Weights:
    embed = np.random.default_rng(0).standard_normal((16, 8)).astype(ml_dtypes.bfloat16)
    embed.reshape(-1).view(np.uint16)[version] ^= version
    return {"embed.weight": embed}


def same(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(a[n].tobytes() == b[n].tobytes() for n in a)


def content(folder: Path) -> dict[str, bytes]:
    """Everything that carries truth in a half."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "mirror.json" and not path.name.startswith(".")
    }


@pytest.fixture
def halves(tmp_path: Path) -> tuple[Path, Path]:
    """(arbiter, other)."""
    return tmp_path / "a" / "store", tmp_path / "b" / "store"


@pytest.fixture
def opened(halves: tuple[Path, Path], tmp_path: Path) -> Open:
    for half in halves:
        half.parent.mkdir()

    def open_(policy: str = "both", host: str = "host", create: bool = False) -> Store:
        return Store.open(
            f"mirror:{halves[0]},{halves[1]}?policy={policy}&cache={tmp_path / host}", create=create
        )

    committed = open_(create=True)
    writer = committed.writer()
    for version in (1, 2):
        writer.commit(policy_of(version), attachments={"opt": b"adam"})
    return open_


def place_of(store: Store) -> MirrorPlace:
    assert isinstance(store.place, MirrorPlace)
    return store.place


def whole(store: Store, versions: int) -> bool:
    report = store.verify(deep=True)
    assert report.ok, report.problems
    return all(same(store.load(v), policy_of(v)) for v in range(1, versions + 1))


def test_both_halves_hold_everything_before_a_commit_returns(opened: Open, halves: tuple[Path, Path]) -> None:
    assert content(halves[0]) == content(halves[1])
    assert whole(opened(), 2)


@pytest.mark.parametrize("dead", [0, 1])
def test_a_dead_half_is_read_around(opened: Open, halves: tuple[Path, Path], dead: int) -> None:
    shutil.rmtree(halves[dead])
    store = opened()
    assert store.latest() == 2
    assert same(store.load(2), policy_of(2))
    assert store.recover().version == 2


def test_without_the_other_half_a_commit_waits_for_it_and_is_not_made_twice(
    opened: Open, halves: tuple[Path, Path], tmp_path: Path
) -> None:
    writer = opened().writer()
    halves[1].rename(tmp_path / "unplugged")
    with pytest.raises(Unavailable, match=str(halves[1])) as caught:
        writer.commit(policy_of(3), commit_id="three")
    assert "policy=degrade" in caught.value.hint
    assert not halves[1].exists()
    (tmp_path / "unplugged").rename(halves[1])
    assert writer.commit(policy_of(3), commit_id="three").version == 3
    assert whole(opened(), 3)
    assert content(halves[0]) == content(halves[1])


def test_degraded_it_goes_on_loudly_and_a_repair_brings_the_half_back(
    opened: Open, halves: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    halves[1].rename(tmp_path / "unplugged")
    with caplog.at_level(logging.ERROR):
        store = opened("degrade")
        assert store.writer().commit(policy_of(3)).version == 3
    assert "degraded" in caplog.text
    assert place_of(store).degraded
    assert not store.verify().ok
    (tmp_path / "unplugged").rename(halves[1])
    assert not opened().verify().ok
    assert opened().verify(repair=True).ok
    assert content(halves[0]) == content(halves[1])
    shutil.rmtree(halves[0])
    assert same(opened().load(3), policy_of(3))


@pytest.mark.parametrize("dead", [0, 1])
def test_a_replaced_disk_is_healed_and_then_the_other_may_die(
    opened: Open, halves: tuple[Path, Path], dead: int
) -> None:
    shutil.rmtree(halves[dead])
    halves[dead].mkdir()
    store = opened()
    report = store.verify(repair=True)
    assert report.ok, report.problems
    assert content(halves[0]) == content(halves[1])
    assert store.writer().commit(policy_of(3)).version == 3
    shutil.rmtree(halves[1 - dead])
    survivor = opened()
    assert survivor.latest() == 3
    assert same(survivor.load(3), policy_of(3))


def test_without_the_arbiter_nothing_is_written_until_the_other_is_promoted(
    opened: Open, halves: tuple[Path, Path], tmp_path: Path
) -> None:
    zombie = opened().writer()
    halves[0].rename(tmp_path / "unplugged")
    for policy in ("both", "degrade"):
        with pytest.raises(Unavailable, match="decides about the log is away"):
            opened(policy).writer().commit(policy_of(3))
    with pytest.raises(Unavailable):
        zombie.commit(policy_of(3))
    place_of(opened()).promote()
    assert opened("degrade").writer().commit(policy_of(3)).version == 3
    (tmp_path / "unplugged").rename(halves[0])
    with pytest.raises(ConflictError, match="the other half the arbiter"):
        zombie.commit(policy_of(4))
    store = opened()
    assert place_of(store).arbiter is not None
    assert place_of(store).arbiter.root == halves[1]  # type: ignore[union-attr]
    assert store.latest() == 3
    assert store.verify(repair=True).ok
    assert content(halves[0]) == content(halves[1])
    assert whole(opened(), 3)


@pytest.mark.parametrize("half", [0, 1])
def test_any_flipped_byte_in_one_half_is_read_around_found_and_mended(
    opened: Open, halves: tuple[Path, Path], half: int
) -> None:
    before = content(halves[half])
    truth = [k for k in before if k.startswith(("log/", "versions/")) and not k.endswith("owner.json")]
    assert len(truth) >= 6
    for key in [*truth, "run.json"]:
        path = halves[half] / key
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))
        store = opened()
        assert same(store.load(2), policy_of(2)), key
        assert store.attachments(2)["opt"].read_bytes() == b"adam"
        problems = store.verify().problems
        assert str(path) in {problem.path for problem in problems}, key
        assert store.verify(repair=True).ok, key
        assert content(halves[half])[key] == before[key]


def test_what_is_wrong_in_both_halves_is_not_papered_over(opened: Open, halves: tuple[Path, Path]) -> None:
    folder = halves[0] / opened().record(2).folder
    blobs = [path.relative_to(halves[0]) for path in folder.glob("*.safetensors")]
    for path in [half / blob for half in halves for blob in blobs]:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(bytes(data))
    store = opened()
    report = store.verify(repair=True)
    assert {problem.version for problem in report.problems if problem.kind == "blob"} == {2}
    assert same(store.load(1), policy_of(1))
    with pytest.raises(IntegrityError):
        store.load(2)


def test_a_half_that_dies_between_the_two_writes_of_an_entry_fails_the_commit(
    opened: Open, halves: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    writer = store.writer()
    first, _ = place_of(store).halves
    real = first.put_if_absent

    def unplug(key: str, data: bytes) -> Any:
        outcome = real(key, data)
        if key.startswith("log/") and halves[1].exists():
            halves[1].rename(tmp_path / "unplugged")
        return outcome

    monkeypatch.setattr(first, "put_if_absent", unplug)
    with pytest.raises(Unavailable, match=str(halves[1])):
        writer.commit(policy_of(3), commit_id="three")
    monkeypatch.undo()
    with pytest.raises(Unavailable):
        writer.commit(policy_of(3), commit_id="three")
    (tmp_path / "unplugged").rename(halves[1])
    assert writer.commit(policy_of(3), commit_id="three").version == 3
    shutil.rmtree(halves[0])
    assert same(opened().load(3), policy_of(3))


def test_an_entry_that_a_killed_writer_left_in_one_half_is_in_both_once_the_store_is_opened(
    opened: Open, halves: tuple[Path, Path]
) -> None:
    newest = sorted(halves[1].glob("log/*.json"))[-1]
    newest.unlink()
    opened()
    assert newest.exists()
    shutil.rmtree(halves[0])
    assert opened().latest() == 2


def test_a_half_that_was_away_is_behind_until_it_is_repaired(
    opened: Open, halves: tuple[Path, Path], tmp_path: Path
) -> None:
    halves[1].rename(tmp_path / "unplugged")
    writer = opened("degrade").writer()
    assert [writer.commit(policy_of(v)).version for v in (3, 4)] == [3, 4]
    (tmp_path / "unplugged").rename(halves[1])
    with pytest.raises(Unavailable, match="behind"):
        opened("both").writer().commit(policy_of(5))
    assert opened("both").latest() == 4
    assert not opened().verify().ok
    assert opened().verify(repair=True).ok
    assert opened("both").writer().commit(policy_of(5)).version == 5
    shutil.rmtree(halves[0])
    assert same(opened().load(4), policy_of(4))


@pytest.mark.parametrize("wrote", [False, True])
def test_two_halves_that_both_became_the_arbiter_are_not_joined(
    opened: Open, halves: tuple[Path, Path], tmp_path: Path, wrote: bool
) -> None:
    halves[1].rename(tmp_path / "other")
    opened("degrade").writer().commit(policy_of(3))
    halves[0].rename(tmp_path / "first")
    (tmp_path / "other").rename(halves[1])
    place_of(opened()).promote()
    if wrote:
        opened("degrade").writer().commit(policy_of(4))
    (tmp_path / "first").rename(halves[0])
    before = content(halves[0]), content(halves[1])
    if wrote:
        with pytest.raises(IntegrityError, match="written to alone"):
            opened().repair()
    else:
        with pytest.raises(InvalidInput, match="both halves were the arbiter"):
            opened()
    logs = [{k: v for k, v in half.items() if k.startswith("log/")} for half in before]
    now = [{k: v for k, v in content(half).items() if k.startswith("log/")} for half in halves]
    assert now == logs


def test_halves_that_were_written_to_alone_are_not_joined(opened: Open, halves: tuple[Path, Path]) -> None:
    entry = sorted(halves[0].glob("log/*.json"))[-1]
    other = sorted(halves[0].glob("log/*.json"))[0]
    (halves[1] / "log" / entry.name).write_bytes(other.read_bytes())
    with pytest.raises(IntegrityError, match="written to alone"):
        opened().repair()


def test_leases_that_ended_while_a_half_was_away_do_not_come_back(
    opened: Open, halves: tuple[Path, Path], tmp_path: Path
) -> None:
    store = opened("degrade")
    lease = store.lease([1], "engine", 3600)
    halves[1].rename(tmp_path / "unplugged")
    store.release(lease)
    (tmp_path / "unplugged").rename(halves[1])
    opened().repair()
    assert list(opened().place.list("leases")) == []
    assert list(halves[1].glob("leases/*.json")) == []


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mirror:/one", "two folders"),
        ("mirror:/a,/b?policy=maybe", "maybe"),
        ("mirror:/a,/b?colour=red", "colour"),
        ("mirror:/a,/a", "both halves"),
    ],
)
def test_a_url_that_cannot_be_is_refused(url: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        Store.open(url)


def test_folders_that_are_no_mirror_are_left_alone(tmp_path: Path) -> None:
    Store.open(tmp_path / "a", create=True).close()
    before = content(tmp_path / "a")
    with pytest.raises(InvalidInput, match="holds a store already"):
        Store.open(f"mirror:{tmp_path / 'a'},{tmp_path / 'b'}?cache={tmp_path / 'c'}", create=True)
    assert content(tmp_path / "a") == before
