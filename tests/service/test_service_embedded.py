"""What only the embedded engine does: its settings, its cleaner, many processes on one folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from service_world import bits, model, moved, until

import weightline as wl
from weightline.errors import FormatError, InvalidInput, StoreNotFound, Unavailable, VersionGone
from weightline.service.cleaner import LOCK_NAME, Cleaner
from weightline.service.presence import OwnerLock


def test_it_is_used_as_the_report_says(tmp_path):
    engine = wl.CheckpointEngine(
        storage_path=str(tmp_path / "ckpt"), max_versions=20, sync_timeout=30.0, cleanup_interval=60.0
    )
    assert engine.start() is engine
    first, second = model(), moved(model())
    v = engine.commit(first, step=120)
    assert engine.wait_for_update(timeout=1) == v == 1
    engine.commit(wl.compute_delta(second, first, threshold=1e-6))
    assert engine.wait_for_update(timeout=1) == 2
    held = {name: value.copy() for name, value in first.items()}
    engine.fetch_delta(2).apply_(held)
    assert bits(held) == bits(second)
    engine.ack(2, "engine-0")
    assert engine.record(2).acks[0].subscriber == "engine-0"
    engine.close()
    engine.close()
    with pytest.raises(InvalidInput, match="closed"):
        engine.start()


def test_the_verbs_work_before_start_and_it_is_a_context_manager(tmp_path):
    with wl.CheckpointEngine(tmp_path / "ckpt") as engine:
        assert engine.commit(model()) == 1
    with wl.CheckpointEngine(tmp_path / "ckpt") as engine:
        assert engine.latest() == 1
    loose = wl.CheckpointEngine(tmp_path / "ckpt")
    assert loose.latest() == 1
    loose.close()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_versions", 0),
        ("max_versions", 2.5),
        ("max_versions", True),
        ("sync_timeout", 0),
        ("sync_timeout", float("nan")),
        ("cleanup_interval", -1),
        ("cleanup_interval", float("inf")),
        ("disk_budget", 0),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name_and_nothing_is_made(tmp_path, setting, value):
    with pytest.raises(InvalidInput, match=setting) as caught:
        wl.CheckpointEngine(tmp_path / "ckpt", **{setting: value})
    assert caught.value.hint
    assert not (tmp_path / "ckpt").exists()


def test_connect_does_not_create_a_store(tmp_path):
    for url in (str(tmp_path / "missing"), f"file://{tmp_path}/missing"):
        with pytest.raises(StoreNotFound, match="missing"):
            wl.connect(url)
    assert not (tmp_path / "missing").exists()
    with pytest.raises(InvalidInput, match="s3"):
        wl.connect("s3://container/prefix?endpoint=nonsense")


def test_a_store_of_another_format_is_refused(tmp_path):
    wl.CheckpointEngine(tmp_path).close()
    run = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**run, "format": 99}))
    with pytest.raises(FormatError, match="99"):
        wl.CheckpointEngine(tmp_path)


def test_the_cleaner_retires_in_the_background_and_the_newest_stays(tmp_path):
    with wl.CheckpointEngine(tmp_path / "ckpt", disk_budget=1, cleanup_interval=0.02) as engine:
        weights = model()
        for _ in range(5):
            weights = moved(weights)
            engine.commit(weights, anchor=True)
        until(lambda: _left(engine) == [5], "retention")
        with pytest.raises(VersionGone, match="1"):
            engine.load(1)
        assert bits(engine.load(5)) == bits(weights)
        assert engine.commit(moved(weights)) == 6


def _left(engine):
    return [record.version for record in engine.versions() if not record.retired]


def test_the_cleaner_leaves_what_a_live_subscriber_serves(tmp_path):
    engine = wl.CheckpointEngine(tmp_path)
    weights = model()
    for _ in range(4):
        weights = moved(weights)
        engine.commit(weights, anchor=True)
    cleaner = Cleaner(
        tmp_path, max_versions=1, disk_budget=None, interval=60, name="test", live=lambda: {"engine-0": 2}
    )
    assert cleaner.clean()
    assert [record.version for record in engine.versions() if not record.retired] == [2, 4]
    assert Cleaner(tmp_path, max_versions=1, disk_budget=None, interval=60, name="test").clean()
    assert [record.version for record in engine.versions() if not record.retired] == [4]
    engine.close()


def test_one_process_at_a_time_cleans(tmp_path):
    wl.CheckpointEngine(tmp_path).close()
    cleaner = Cleaner(tmp_path, max_versions=1, disk_budget=None, interval=60, name="test")
    held = OwnerLock.take(tmp_path / LOCK_NAME)
    assert held is not None
    assert not cleaner.clean()
    held.release()
    assert cleaner.clean()


def test_a_cleaner_that_fails_warns_and_tries_again(tmp_path, caplog):
    wl.CheckpointEngine(tmp_path / "ckpt").close()
    cleaner = Cleaner(tmp_path / "ckpt", max_versions=1, disk_budget=1 << 30, interval=0.01, name="test")
    shutil.move(tmp_path / "ckpt", tmp_path / "away")
    cleaner.start()
    until(lambda: "cleaning" in caplog.text, "the warning")
    shutil.move(tmp_path / "away", tmp_path / "ckpt")
    until(lambda: cleaner.passes, "a pass")
    cleaner.close()


TRAINER = """
import sys, numpy as np, weightline as wl
with wl.CheckpointEngine(sys.argv[1]) as engine:
    weights = {"w": np.arange(64, dtype=np.float32)}
    for step in range(1000):
        weights["w"][step % 64] += 1
        print(engine.commit(weights, step=step), flush=True)
"""


def test_a_trainer_that_is_killed_goes_on_under_the_next_number(tmp_path):
    root = tmp_path / "ckpt"
    said: list[int] = []
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(root)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        said += [int(process.stdout.readline()) for _ in range(4)]
        process.kill()
        rest, _ = process.communicate(timeout=30)
        said += [int(line) for line in rest.split()]
    with wl.CheckpointEngine(root) as engine:
        records = engine.versions()
        assert [record.version for record in records] == list(range(1, len(records) + 1))
        # Every number that was said is there; one that was committed and not said may be too.
        assert set(said) <= {record.version for record in records}
        assert len(said) == len(set(said))
        assert sorted(said) == said
        assert len({record.epoch for record in records}) == 3
        for record in records:
            assert isinstance(engine.load(record.version)["w"], np.ndarray)
        assert engine.commit({"w": np.zeros(64, np.float32)}) == len(records) + 1


def test_readers_in_other_processes_see_what_is_committed_here(tmp_path):
    root = tmp_path / "ckpt"
    with wl.CheckpointEngine(root) as engine:
        engine.commit(model())
        code = (
            "import sys, weightline as wl\n"
            "with wl.connect(sys.argv[1]) as line: print(line.wait_for_update(timeout=30, after=1))"
        )
        reader = subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, text=True)
        engine.commit(moved(model()))
        assert reader.communicate(timeout=30)[0] == "2\n"


def test_nothing_of_a_store_lies_outside_its_folder(tmp_path):
    root = tmp_path / "ckpt"
    with wl.CheckpointEngine(root) as engine:
        engine.commit(model())
    assert {path.name for path in tmp_path.iterdir()} == {"ckpt"}
    assert Path(root / "run.json").is_file()


def test_an_embedded_cleaner_keeps_what_was_acked_lately(tmp_path):
    with wl.CheckpointEngine(tmp_path / "ckpt", disk_budget=1, cleanup_interval=0.02) as engine:
        weights = model()
        engine.commit(weights)
        engine.ack(1, "engine-0")
        for _ in range(3):
            weights = moved(weights)
            engine.commit(weights, anchor=True)
        until(lambda: engine.record(3).retired, "retention")
        assert not engine.record(1).retired
        assert bits(engine.load(1)) == bits(model())


def test_the_storage_path_is_a_folder(tmp_path):
    wl.CheckpointEngine(f"file://{tmp_path}/ckpt").close()
    assert (tmp_path / "ckpt" / "run.json").is_file()
    with pytest.raises(InvalidInput, match="not a folder"):
        wl.CheckpointEngine(f"unix://{tmp_path}/wl.sock")
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidInput, match="file is not a folder"):
        wl.CheckpointEngine(tmp_path / "file")


def test_a_catalogue_that_cannot_be_written_is_a_typed_error_and_loses_no_version(tmp_path):
    with wl.CheckpointEngine(tmp_path / "ckpt") as engine:
        engine.commit(model())
    catalogue = tmp_path / "ckpt" / "catalog.sqlite"
    for path in catalogue.parent.glob("catalog.sqlite*"):
        path.unlink()
    catalogue.mkdir()
    with wl.CheckpointEngine(tmp_path / "ckpt") as engine:
        with pytest.raises(Unavailable, match=r"catalog\.sqlite"):
            engine.ack(1, "engine-0")
        assert engine.record(1).acks == ()
        assert engine.subscribers() == ()
        assert engine.commit(moved(model())) == 2


def test_attachments_are_kept_on_every_nth_version_only_if_asked(tmp_path):
    weights = model()
    with wl.CheckpointEngine(tmp_path / "ckpt", attachments_every=3) as engine:
        for step in range(1, 6):
            weights = moved(weights)
            engine.commit(weights, step=step, attachments={"opt": b"%d" % step}, commit_id=str(step))
    # A restart does not begin to count anew, and a repeated commit stays what it was.
    with wl.CheckpointEngine(tmp_path / "ckpt", attachments_every=3) as engine:
        assert engine.commit(weights, step=5, attachments={"opt": b"5"}, commit_id="5") == 5
        for step in (6, 7):
            weights = moved(weights)
            engine.commit(weights, step=step, attachments={"opt": b"%d" % step})
        assert [r.version for r in engine.versions() if r.attachments] == [1, 4, 7]
        found = engine.recover()
        assert (found.step, found.attachments["opt"].read_bytes()) == (7, b"7")
    with wl.CheckpointEngine(tmp_path / "all") as engine:
        for _ in range(2):
            engine.commit(weights, attachments={"opt": b"x"})
        assert all(r.attachments for r in engine.versions())
    with pytest.raises(InvalidInput, match="attachments_every"):
        wl.CheckpointEngine(tmp_path / "none", attachments_every=0)
    assert not (tmp_path / "none").exists()
