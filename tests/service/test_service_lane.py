"""The commit lane and the snapshot: order, isolation, back-pressure, failures that nobody can miss."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from weightline.errors import InvalidInput, StorageFull
from weightline.service.lane import MAX_PENDING, CommitLane
from weightline.service.snapshot import snapshot


class Recorder:
    """A commit that can be held up, and that remembers what it was given."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.fail: BaseException | None = None

    def __call__(self, weights, options) -> int:
        self.entered.set()
        assert self.gate.wait(30)
        if self.fail is not None:
            failure, self.fail = self.fail, None
            raise failure
        self.seen.append(options.get("step"))
        return len(self.seen)


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def lane(recorder):
    lane = CommitLane(recorder, name="test-lane")
    yield lane
    recorder.gate.set()
    lane.close()


def weights():
    return {"w": np.arange(4, dtype=np.float32)}


def test_commits_happen_in_the_order_of_the_calls(lane, recorder):
    recorder.gate.clear()
    first = lane.submit(weights(), {"step": 1})
    second = lane.submit(weights(), {"step": 2})
    assert recorder.entered.wait(10)
    threading.Timer(0.05, recorder.gate.set).start()
    assert lane.run(weights(), {"step": 3}) == 3
    assert (first.result(10), second.result(10)) == (1, 2)
    assert recorder.seen == [1, 2, 3]


def test_a_failure_in_the_background_is_raised_by_the_future_and_by_the_next_commit_once(lane, recorder):
    recorder.fail = StorageFull("no room")
    future = lane.submit(weights(), {"step": 1})
    with pytest.raises(StorageFull, match="no room"):
        future.result(10)
    with pytest.raises(StorageFull, match="no room"):
        lane.run(weights(), {"step": 2})
    assert recorder.seen == []
    assert lane.run(weights(), {"step": 3}) == 1


def test_the_next_background_commit_raises_an_earlier_failure_too(lane, recorder):
    recorder.fail = StorageFull("no room")
    assert lane.submit(weights(), {"step": 1}).exception(10) is not None
    with pytest.raises(StorageFull):
        lane.submit(weights(), {"step": 2})
    assert lane.submit(weights(), {"step": 3}).result(10) == 1


def test_a_failed_commit_in_the_caller_is_raised_once(lane, recorder):
    recorder.fail = InvalidInput("tensor w")
    with pytest.raises(InvalidInput):
        lane.run(weights(), {})
    assert lane.run(weights(), {"step": 2}) == 1


def test_a_trainer_faster_than_its_disk_waits_instead_of_filling_memory(lane, recorder):
    recorder.gate.clear()
    for step in range(MAX_PENDING):
        lane.submit(weights(), {"step": step})
    blocked = threading.Event()
    passed = threading.Event()

    def one_more():
        blocked.set()
        lane.submit(weights(), {"step": MAX_PENDING})
        passed.set()

    thread = threading.Thread(target=one_more)
    thread.start()
    assert blocked.wait(10)
    assert not passed.wait(0.1)
    recorder.gate.set()
    assert passed.wait(10)
    thread.join()


def test_close_finishes_what_was_taken_and_refuses_more(lane, recorder):
    recorder.gate.clear()
    future = lane.submit(weights(), {"step": 1})
    assert recorder.entered.wait(10)
    threading.Timer(0.05, recorder.gate.set).start()
    lane.close()
    assert future.result(0) == 1
    with pytest.raises(InvalidInput, match="closed"):
        lane.run(weights(), {})
    with pytest.raises(InvalidInput, match="closed"):
        lane.submit(weights(), {})
    assert not [t for t in threading.enumerate() if t.name == "test-lane"]


def test_a_cancelled_commit_is_skipped_and_the_ones_behind_it_go_on(lane, recorder):
    recorder.gate.clear()
    first = lane.submit(weights(), {"step": 1})
    assert recorder.entered.wait(10)
    second = lane.submit(weights(), {"step": 2})
    assert second.cancel()
    recorder.gate.set()
    assert first.result(10) == 1
    assert lane.run(weights(), {"step": 3}) == 2
    assert recorder.seen == [1, 3]


def test_a_snapshot_is_not_reached_by_later_writes():
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    live = {
        "c": base,
        "f": np.asfortranarray(base + 100),
        "strided": (base + 200)[:, ::2],
        "s": np.float32(7),
    }
    live["s"] = np.array(7.0, dtype=np.float32)
    expected = {name: value.tobytes() for name, value in live.items()}
    taken = snapshot(live)
    for value in live.values():
        value[...] = -1
    assert {name: value.tobytes() for name, value in taken.items()} == expected
    assert {name: value.shape for name, value in taken.items()} == {n: v.shape for n, v in live.items()}


def test_a_snapshot_keeps_ties_and_does_not_tie_views_that_differ():
    embed = np.arange(8, dtype=np.float32).reshape(4, 2)
    taken = snapshot({"embed": embed, "head": embed[:], "turned": embed.reshape(2, 4), "part": embed[:2]})
    assert taken["embed"] is taken["head"]
    assert taken["turned"].shape == (2, 4)
    assert taken["part"].shape == (2, 2)


class Fresh(dict):
    """A mapping that makes its arrays on access, as a lazy state dict does."""

    def items(self):
        for index in range(50):
            yield f"t{index}", np.full(1000, index, dtype=np.float32)


def test_a_snapshot_of_arrays_that_are_made_on_access_does_not_mix_them_up():
    taken = snapshot(Fresh())
    assert all((taken[f"t{index}"] == index).all() for index in range(50))
