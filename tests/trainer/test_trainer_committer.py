"""One call after a step: a snapshot, then everything behind it, on a real store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import weightline
from weightline.errors import InvalidInput, StorageFull, Unavailable
from weightline.trainer import Committer

pytestmark = pytest.mark.torch


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(64, 32)
        self.norm = torch.nn.LayerNorm(32)
        self.head = torch.nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight

    def step(self) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.add_(torch.randn_like(p) * 0.01)

    def stored(self) -> dict[str, torch.Tensor]:
        names = {"embed.weight", "norm.weight", "norm.bias"}
        return {k: v.detach().to(torch.bfloat16) for k, v in self.state_dict().items() if k in names}


class Door:
    """A real line whose `commit` can be held up or made to fail; everything else goes straight through."""

    def __init__(self, line: Any) -> None:
        self._line = line
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.before: list[BaseException] = []
        """Raised, one a call, before the commit reaches the line."""
        self.after: list[BaseException] = []
        """Raised, one a call, after the line has committed: a lost answer."""
        self.commit_ids: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._line, name)

    def commit(self, weights: Any, **options: Any) -> int:
        self.commit_ids.append(options["commit_id"])
        self.entered.release()
        assert self.gate.wait(60)
        if self.before:
            raise self.before.pop(0)
        version: int = self._line.commit(weights, **options)
        if self.after:
            raise self.after.pop(0)
        return version


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    with weightline.CheckpointEngine(tmp_path / "store") as line:
        yield Door(line)


def bits(tensors: dict[str, Any]) -> dict[str, bytes]:
    return {
        k: torch.as_tensor(v).contiguous().view(torch.uint8).numpy().tobytes() for k, v in tensors.items()
    }


def test_versions_hold_the_weights_of_their_step_bit_for_bit(door: Door) -> None:
    net = Net()
    expected = {}
    with Committer(door, net) as committer:
        for step in range(5):
            future = committer.after_step(step, metadata={"loss": 1.5})
            expected[step] = net.stored()
            net.step()
            assert future is not None
        assert committer.flush() == 5
        assert [t.version for t in committer.timings] == [1, 2, 3, 4, 5]
        assert all(t.blocked_s >= t.snapshot_s > 0 and t.commit_s > 0 for t in committer.timings)
    for version in range(1, 6):
        record = door.record(version)
        assert (record.step, record.parent) == (version - 1, version - 1 or None)
        assert bits(door.load(version, like="torch")) == bits(expected[version - 1])
    assert "head.weight" not in door.load(1)


def test_what_is_written_to_the_weights_after_the_call_reaches_no_version(door: Door) -> None:
    net = Net()
    with Committer(door, net) as committer:
        committer.after_step(0)
        committer.flush()
        door.gate.clear()
        expected = net.stored()
        future = committer.after_step(1)
        for _ in range(50):
            net.step()  # the commit is under way all the time
        door.gate.set()
        assert future is not None
        assert bits(door.load(future.result(60), like="torch")) == bits(expected)


def test_the_training_thread_waits_for_the_snapshot_only(door: Door) -> None:
    with Committer(door, Net()) as committer:
        committer.after_step(0)
        committer.flush()
        door.gate.clear()
        future = committer.after_step(1)  # returns although the commit cannot finish
        assert future is not None
        assert not future.done()
        door.gate.set()


@pytest.mark.parametrize("buffers", [1, 2])
def test_in_flight_is_bounded(door: Door, buffers: int) -> None:
    net = Net()
    with Committer(door, net, max_in_flight=buffers) as committer:
        door.gate.clear()
        for step in range(buffers):
            committer.after_step(step)
        door.entered.acquire()
        done = threading.Event()

        def one_more() -> None:
            committer.after_step(buffers)
            done.set()

        thread = threading.Thread(target=one_more)
        thread.start()
        assert not done.wait(0.2)  # no buffer is free
        door.gate.set()
        assert done.wait(60)
        thread.join()
        assert committer.flush() == buffers + 1


def test_every_nth_call_commits_and_force_anchor_and_attachments_do_too(door: Door) -> None:
    with Committer(door, Net(), every=3) as committer:
        turns = [committer.after_step(step) is not None for step in range(1, 7)]
        assert turns == [False, False, True, False, False, True]
        assert committer.after_step(7, force=True) is not None
        assert committer.after_step(8, attachments={"trainer": b"x"}) is not None
        assert committer.after_step(9) is not None
    assert [r.step for r in door.versions()] == [3, 6, 7, 8, 9]
    assert door.record(4).attachments == ("trainer",)


def test_an_error_surfaces_at_the_next_call_once_and_the_one_after_commits(door: Door) -> None:
    net = Net()
    committer = Committer(door, net)
    committer.after_step(0)
    committer.flush()
    door.before.append(StorageFull("disk full"))
    net.step()
    failed = committer.after_step(1)
    assert failed is not None
    with pytest.raises(StorageFull):
        failed.result(60)
    with pytest.raises(StorageFull):
        committer.after_step(2)
    committer.after_step(3)
    committer.close()
    assert [r.step for r in door.versions()] == [0, 3]
    assert bits(door.load(2, like="torch")) == bits(net.stored())


@pytest.mark.parametrize("leave", [Committer.flush, Committer.close])
def test_an_error_surfaces_at_the_end(door: Door, leave: Callable[[Committer], object]) -> None:
    committer = Committer(door, Net())
    door.before.append(StorageFull("disk full"))
    committer.after_step(0)
    with pytest.raises(StorageFull):
        leave(committer)
    committer.close()
    assert door.latest() is None


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_server_that_was_away_gets_the_commit_again_and_publishes_it_once(door: Door, where: str) -> None:
    net = Net()
    with Committer(door, net) as committer:
        committer.after_step(0)
        committer.flush()
        net.step()
        getattr(door, where).extend([Unavailable("away"), Unavailable("away")])
        future = committer.after_step(1)
        assert future is not None
        assert future.result(60) == 2
        assert committer.timings[-1].attempts == 3
    assert len(set(door.commit_ids)) == 2
    assert [r.version for r in door.versions()] == [1, 2]


def test_patience_with_a_server_ends(door: Door) -> None:
    committer = Committer(door, Net(), retry_for=0.0)
    door.before.append(Unavailable("away"))
    committer.after_step(0)
    with pytest.raises(Unavailable):
        committer.close()


def test_an_exception_in_the_loop_does_not_wait_for_a_server_that_is_away(door: Door) -> None:
    door.before.extend([Unavailable("away")] * 1000)

    def loop() -> None:
        with Committer(door, Net(), retry_for=1e6) as committer:
            committer.after_step(0)
            door.entered.acquire()
            raise KeyError("in the loop")

    with pytest.raises(KeyError):
        loop()
    assert door.latest() is None


def test_weights_that_cannot_be_stored_commit_nothing_and_the_next_step_goes_on(door: Door) -> None:
    net = Net()
    with Committer(door, net, dtype="F16") as committer:
        committer.after_step(0)
        with torch.no_grad():
            net.norm.bias[3] = 1e9
        with pytest.raises(InvalidInput, match=r"norm\.bias.*element 3 overflows F16"):
            committer.after_step(1)
        with torch.no_grad():
            net.norm.bias[3] = 1.0
        committer.after_step(2)
    assert [r.step for r in door.versions()] == [0, 2]


def test_non_finite_weights_are_refused_when_asked_for(door: Door) -> None:
    net = Net()
    committer = Committer(door, net, check_finite=True)
    with torch.no_grad():
        net.norm.bias[0] = float("nan")
    committer.after_step(0)
    with pytest.raises(InvalidInput, match=r"norm\.bias"):
        committer.close()


def test_dtypes_follow_the_policy(door: Door) -> None:
    with Committer(door, Net(), dtype_exceptions={"norm.*": "F32"}) as committer:
        committer.after_step(0)
    assert {t.spec.name: t.spec.dtype for t in door.manifest(1).tensors} == {
        "embed.weight": "BF16",
        "norm.weight": "F32",
        "norm.bias": "F32",
    }


def test_a_hundred_commits_without_a_step_change_nothing(door: Door) -> None:
    net = Net()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with Committer(door, net) as committer:
        for step in range(100):
            committer.after_step(step)
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert [r.changed for r in door.versions()[1:]] == [0] * 99


@pytest.mark.parametrize("fields", [{"every": 0}, {"max_in_flight": 0}, {"dtype": "BF8"}])
def test_settings_that_mean_nothing_are_refused(door: Door, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        Committer(door, Net(), **fields)


def test_a_closed_committer_says_so(door: Door) -> None:
    committer = Committer(door, Net())
    committer.close()
    committer.close()
    with pytest.raises(InvalidInput, match="closed"):
        committer.after_step(0)


def test_a_mapping_or_a_callable_is_a_source_too(door: Door) -> None:
    weights = {"module.w": torch.ones(4)}
    with Committer(door, lambda: weights, dtype=None) as committer:
        committer.after_step(0)
        weights["module.w"] = torch.full((4,), 2.0)
        committer.after_step(1)
    assert door.load(2)["w"].tolist() == [2, 2, 2, 2]


def test_attachments_ride_on_every_nth_commit_that_offers_some_if_asked(door: Door) -> None:
    net, asked = Net(), []

    def state() -> dict[str, bytes]:
        asked.append(True)
        return {"opt": b"%d" % len(asked)}

    with Committer(door, net, every=2, attachments_every=3) as committer:
        for step in range(8):
            committer.after_step(step, attachments=state)
            net.step()
    # Calls 0, 3 and 6 carry them and commit whatever the turn of the weights; 1, 5 and 7 are its turn.
    assert [(r.step, r.attachments) for r in door.versions()] == [
        (0, ("opt",)),
        (1, ()),
        (3, ("opt",)),
        (5, ()),
        (6, ("opt",)),
        (7, ()),
    ]
    assert len(asked) == 3
    assert door.recover().attachments["opt"].read_bytes() == b"3"
