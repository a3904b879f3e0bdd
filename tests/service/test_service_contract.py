"""One contract, every door: embedded, `file:` and a server on a Unix socket behave alike."""

from __future__ import annotations

import os
import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import safetensors.numpy
from service_world import bits, model, moved, until

import weightline as wl
from weightline.errors import ConflictError, InvalidInput, VersionNotFound, WriterFenced


def test_an_empty_store_says_so(line):
    assert line.latest() is None
    assert line.versions() == []
    assert line.wait_for_update(timeout=0) is None
    for ask in (line.record, line.load, line.manifest, line.fetch_delta):
        with pytest.raises(VersionNotFound, match="1"):
            ask(1)
    with pytest.raises(VersionNotFound):
        line.recover()
    with pytest.raises(VersionNotFound):
        line.ack(1, "engine-0")


def test_what_is_committed_is_loaded_bit_for_bit(line):
    first = model()
    second = moved(first, "embed.weight", "steps")
    assert line.commit(first, step=10) == 1
    assert line.commit(second, step=11, metadata={"lr": 1e-6}) == 2
    assert line.latest() == 2
    assert bits(line.load(1)) == bits(first)
    assert bits(line.load(2)) == bits(second)
    record = line.record(2)
    assert (record.version, record.parent, record.base, record.step) == (2, 1, 1, 11)
    assert record.metadata == {"lr": 1e-6}
    assert re.fullmatch(r"2@[0-9a-f]{8}", record.label)
    assert record.label == f"2@{record.digest[:8]}"
    assert [r.version for r in line.versions()] == [1, 2]
    assert {entry.spec.name for entry in line.manifest(2).tensors} == set(first)


def test_a_delta_turns_one_version_into_the_other(line):
    first = model()
    second = moved(first, "layer.weight")
    third = moved(second, "embed.weight", "layer.odd")
    for weights in (first, second, third):
        line.commit(weights)
    delta = line.fetch_delta(2)
    assert (delta.base, delta.version, delta.changed) == (1, 2, ("layer.weight",))
    held = {name: value.copy() for name, value in first.items()}
    delta.apply_(held)
    assert bits(held) == bits(second)
    assert delta.nbytes > 0
    across = line.fetch_delta(3, have=1)
    held = {name: value.copy() for name, value in first.items()}
    across.apply_(held)
    assert bits(held) == bits(third)
    assert set(across.changed) == {"embed.weight", "layer.weight", "layer.odd"}


def test_a_delta_made_by_compute_delta_can_be_committed(line):
    first = model()
    second = moved(first, "steps")
    line.commit(first)
    assert line.commit(wl.compute_delta(second, first, threshold=0)) == 2
    assert bits(line.load(2)) == bits(second)
    with pytest.raises(InvalidInput, match=r"layer\.odd"):
        wl.compute_delta({k: v for k, v in second.items() if k != "layer.odd"}, first)


def test_a_safetensors_file_can_be_committed(line, tmp_path):
    weights = model()
    path = tmp_path / "w.safetensors"
    safetensors.numpy.save_file(weights, path)
    assert line.commit(path) == 1
    assert bits(line.load(1)) == bits(weights)


def test_a_commit_that_cannot_be_changes_nothing_and_names_the_culprit(line):
    first = model()
    line.commit(first)
    missing = {name: value for name, value in first.items() if name != "layer.odd"}
    reshaped = {**first, "layer.weight": first["layer.weight"].reshape(4, 16)}
    for bad, culprit in [
        (missing, r"layer\.odd"),
        (reshaped, r"layer\.weight"),
        ({**first, "stray": np.zeros(2, np.float32)}, "stray"),
        ({**first, "steps": first["steps"].astype(np.int32)}, "steps"),
    ]:
        with pytest.raises(InvalidInput, match=culprit) as caught:
            line.commit(bad)
        assert caught.value.hint
    assert line.latest() == 1
    assert line.commit(missing, partial=True) == 2
    assert bits(line.load(2)) == bits(first)
    assert line.commit(reshaped, anchor=True) == 3
    assert bits(line.load(3)) == bits(reshaped)


def test_labels_are_new_in_the_run(line):
    line.commit(model(), label="warm-up")
    assert line.record(1).label == "warm-up"
    with pytest.raises(InvalidInput, match="warm-up"):
        line.commit(moved(model()), label="warm-up")
    assert line.latest() == 1


def test_a_commit_id_commits_once_however_often_it_is_asked_for(door):
    first, second = model(), moved(model())
    line = door.open()
    assert line.commit(first, commit_id="step-1") == 1
    assert line.commit(first, commit_id="step-1") == 1
    assert line.commit(second, commit_id="step-2") == 2
    assert line.latest() == 2
    with pytest.raises(ConflictError, match="step-2"):
        line.commit(moved(second), commit_id="step-2")
    # From another process of the trainer too, as after a crash whose last answer was lost.
    assert door.open().commit(second, commit_id="step-2") == 2
    assert line.latest() == 2


def test_attachments_come_back_from_recover(line, tmp_path):
    optimizer = tmp_path / "optimizer.bin"
    optimizer.write_bytes(b"\x00moments" * 100)
    first, second = model(), moved(model())
    line.commit(first, step=115, attachments={"trainer": optimizer, "rng": b"\x01\x02"})
    line.commit(second, step=116)
    recovered = line.recover()
    assert (recovered.version, recovered.step) == (1, 115)
    assert bits(recovered.weights()) == bits(first)
    assert recovered.attachments["trainer"].read_bytes() == optimizer.read_bytes()
    assert recovered.attachments["rng"].read_bytes() == b"\x01\x02"


def test_acks_are_kept_and_lag_is_told(line):
    line.commit(model())
    line.commit(moved(model()))
    line.ack(1, "engine-0", verified="live", pause_ms=1.5, detail="first")
    line.ack(2, "engine-1")
    acks = line.record(1).acks
    assert [(a.subscriber, a.version, a.verified, a.pause_ms) for a in acks] == [("engine-0", 1, "live", 1.5)]
    assert [a.subscriber for a in line.versions()[1].acks] == ["engine-1"]
    seen = {s.name: (s.version, s.lag, s.state) for s in line.subscribers()}
    assert seen == {"engine-0": (1, 1, "behind"), "engine-1": (2, 0, "current")}
    with pytest.raises(VersionNotFound, match="9"):
        line.ack(9, "engine-0")
    assert len(line.subscribers()) == 2


def test_waiting_is_woken_by_a_commit_of_another_handle(door):
    trainer, follower = door.open(), door.open()
    assert follower.wait_for_update(timeout=0.05) is None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(follower.wait_for_update, 30)
        trainer.commit(model())
        assert waiting.result(30) == 1
        waiting = pool.submit(follower.wait_for_update, 30)
        trainer.commit(moved(model()))
        assert waiting.result(30) == 2
    assert follower.wait_for_update(timeout=0) is None
    assert follower.wait_for_update(timeout=0, after=1) == 2
    assert follower.wait_for_update(timeout=0, after=0) == 2
    assert follower.wait_for_update(timeout=0, after=2) is None
    with pytest.raises(InvalidInput, match="-1"):
        follower.wait_for_update(timeout=-1)


def test_a_background_commit_is_the_snapshot_of_the_call(line):
    live = model()
    expected = bits(live)
    future = line.commit_async(live, step=7)
    for value in live.values():
        value[...] = 0
    assert future.result(30) == 1
    assert bits(line.load(1)) == expected
    assert line.record(1).step == 7


def test_background_commits_keep_their_order_and_their_failures(line):
    weights = model()
    futures = []
    for step in range(4):
        weights = moved(weights)
        futures.append(line.commit_async(weights, step=step))
    assert [future.result(30) for future in futures] == [1, 2, 3, 4]
    assert [record.step for record in line.versions()] == [0, 1, 2, 3]
    bad = line.commit_async({"layer.weight": weights["layer.weight"]})
    with pytest.raises(InvalidInput, match=r"embed\.weight"):
        bad.result(30)
    with pytest.raises(InvalidInput, match=r"embed\.weight"):
        line.commit(weights)
    assert line.commit(weights) == 5
    with pytest.raises(InvalidInput, match="stp"):
        line.commit_async(weights, stp=1)


def test_a_zombie_trainer_is_fenced_and_publishes_nothing(door):
    zombie, heir = door.open(), door.open()
    weights = model()
    zombie.commit(weights)
    weights = moved(weights)
    assert heir.commit(weights) == 2
    with pytest.raises(WriterFenced) as caught:
        zombie.commit(moved(weights))
    assert caught.value.hint
    assert door.open().latest() == 2
    assert heir.commit(moved(weights, "steps")) == 3
    with pytest.raises(WriterFenced):
        zombie.commit(moved(weights))
    assert heir.record(3).epoch == heir.record(2).epoch > heir.record(1).epoch


def test_opening_and_reading_fences_nobody(door):
    trainer = door.open()
    weights = model()
    trainer.commit(weights)
    reader = door.open()
    reader.load(1)
    reader.wait_for_update(timeout=0)
    reader.ack(1, "engine-0")
    reader.close()
    assert trainer.commit(moved(weights)) == 2


def test_two_trainers_at_once_give_one_number_to_each_commit(door):
    lines = [door.open(), door.open()]
    start = threading.Barrier(2)

    def train(line, seed):
        done = []
        weights = model(seed)
        start.wait(30)
        for _ in range(4):
            weights = moved(weights)
            try:
                done.append((line.commit(weights), bits(weights)))
            except WriterFenced:
                return done, True
            except ConflictError:
                continue
        return done, False

    with ThreadPoolExecutor(2) as pool:
        ends = [future.result(60) for future in [pool.submit(train, ln, n) for n, ln in enumerate(lines)]]
    committed = dict(pair for done, _ in ends for pair in done)
    reader = door.open()
    assert sorted(committed) == list(range(1, (reader.latest() or 0) + 1))
    assert len(committed) == sum(len(done) for done, _ in ends)
    assert sum(fenced for _, fenced in ends) <= 1
    for version, expected in committed.items():
        assert bits(reader.load(version)) == expected


def test_numbers_go_on_after_every_handle_was_closed(door):
    first = door.open()
    first.commit(model())
    first.close()
    first.close()
    second = door.open()
    assert second.commit(moved(model())) == 2
    with pytest.raises(InvalidInput, match="closed"):
        first.commit(model())
    with pytest.raises(InvalidInput, match="closed"):
        first.wait_for_update(timeout=0)


def test_closing_leaves_no_thread_behind(door):
    before = set(threading.enumerate())
    line = door.open()
    line.commit(model())
    line.commit_async(moved(model())).result(30)
    line.wait_for_update(timeout=0)
    line.close()
    until(lambda: not _ours(set(threading.enumerate()) - before), "threads to end", bound=10)


def _ours(threads):
    return [thread.name for thread in threads if thread.name.startswith("weightline")]


def test_a_wait_ends_when_its_handle_is_closed(door):
    line = door.open()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(line.wait_for_update, None)
        line.close()
        with pytest.raises(InvalidInput, match="closed"):
            waiting.result(30)


def test_an_ack_that_means_nothing_is_refused_by_its_field(line):
    line.commit(model())
    for field, bad in [
        ("subscriber", {"subscriber": ""}),
        ("subscriber", {"subscriber": "a\nb"}),
        ("subscriber", {"subscriber": 7}),
        ("verified", {"verified": "perhaps"}),
        ("pause_ms", {"pause_ms": -1.0}),
        ("pause_ms", {"pause_ms": float("nan")}),
        ("detail", {"detail": None}),
    ]:
        with pytest.raises(InvalidInput, match=field) as caught:
            line.ack(1, **{"subscriber": "engine-0", **bad})
        assert caught.value.hint
    assert line.record(1).acks == ()


def test_numbers_may_be_numpy_integers_and_nothing_else_is_taken_for_one(line):
    one = np.int64(1)
    line.commit(model(), step=np.int32(5))
    line.commit(moved(model()))
    line.ack(one, "engine-0")
    assert line.record(one).step == 5
    assert bits(line.load(one)) == bits(model())
    assert line.manifest(one).version == 1
    assert line.fetch_delta(np.int64(2), have=one).base == 1
    assert line.wait_for_update(timeout=0, after=one) == 2
    for ask in (line.record, line.load, line.manifest, line.fetch_delta, lambda v: line.ack(v, "engine-0")):
        for bad in ("1", 1.0, None, True):
            with pytest.raises(InvalidInput, match="version is"):
                ask(bad)
        for absent in (0, -1, 3):
            with pytest.raises(VersionNotFound, match=str(absent)):
                ask(absent)


def test_versions_that_rest_on_each_other_are_leased_only_while_they_are_read(line):
    weights = model()
    line.commit(weights)
    line.commit(moved(weights))
    line.load(2)
    line.fetch_delta(2)
    assert list((line.root / "leases").iterdir()) == []


def test_a_forked_child_may_not_commit_with_its_parents_handle(door):
    line = door.open()
    line.commit(model())
    line.commit_async(moved(model())).result(30)
    assert "fork" in said_by_a_fork(lambda: line.commit(moved(model(), "steps")))
    assert "fork" in said_by_a_fork(lambda: line.commit_async(moved(model(), "steps")))
    assert line.commit(moved(model(), "steps")) == 3


def said_by_a_fork(work):
    read, write = os.pipe()
    with warnings.catch_warnings():
        # From Python 3.12 on a fork beside threads warns; that such a child is safe here is what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        said = "no error"
        try:
            work()
        except InvalidInput as error:
            said = error.message
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as pipe:
        return pipe.read()
