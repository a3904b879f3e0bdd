"""The way of a version from its commit to each subscriber, at every door, and `weightline trace`."""

from __future__ import annotations

import time

import pytest
from service_world import model, moved

import weightline as wl
from weightline.errors import InvalidInput, Unavailable
from weightline.store import Store

TRAINER = ["commit", "staged", "published"]


def test_every_step_of_a_version_is_kept_for_each_subscriber(tmp_path, run_weightline):
    root, began = tmp_path / "ckpt", time.time()
    with wl.CheckpointEngine(root) as trainer:
        trainer.commit(model(), step=1)
        trainer.commit(moved(model()), step=2)
        with wl.connect(root) as one, wl.connect(root) as other:
            assert one.wait_for_update(timeout=5) == 2
            one.fetch_delta(2)
            now = time.time()
            one.ack(2, "engine-0", trace={"verified": now, "applied": now})
            other.load(2)
            other.ack(2, "engine-1")
    store = Store.open(root)
    events = store.events(2)
    store.close()
    assert [e.stage for e in events if e.subscriber == ""] == TRAINER
    first = [e for e in events if e.subscriber == "engine-0"]
    assert [e.stage for e in first] == ["notified", "fetched", "verified", "applied", "acknowledged"]
    assert [e.stage for e in events if e.subscriber == "engine-1"] == ["notified", "fetched", "acknowledged"]
    assert all(began <= e.at <= time.time() for e in events)
    assert [e.at for e in events] == sorted(e.at for e in events)
    told = run_weightline("trace", root, "2", "--json").json()
    assert told["version"] == 2
    assert [(s["subscriber"], s["stage"]) for s in told["steps"][:5]] == [
        *(("", stage) for stage in TRAINER),
        ("engine-0", "notified"),
        ("engine-0", "fetched"),
    ]
    assert told["steps"][0]["total_ms"] == 0
    assert all(step["ms"] >= 0 for step in told["steps"])
    assert told["slowest"]["ms"] == max(step["ms"] for step in told["steps"])
    said = run_weightline("trace", root, "2").out
    assert "engine-1" in said
    assert "slowest: " in said


def test_a_version_without_a_trace_says_so(tmp_path, run_weightline):
    root = tmp_path / "ckpt"
    with wl.CheckpointEngine(root) as engine:
        engine.commit(model())
    for path in root.glob("catalog.sqlite*"):
        path.unlink()
    assert run_weightline("trace", root, "1", "--json").json()["steps"] == []
    assert "no trace is kept" in run_weightline("trace", root, "1").out
    assert run_weightline("trace", root, "7").code == 7


@pytest.mark.parametrize(
    "trace", [{"applied": float("nan")}, {"applied": "now"}, {"painted": 1.0}, {3: 1.0}], ids=str
)
def test_a_trace_that_cannot_be_kept_is_refused(tmp_path, trace):
    with wl.CheckpointEngine(tmp_path / "ckpt") as engine:
        engine.commit(model())
        with pytest.raises(InvalidInput, match="trace"):
            engine.ack(1, "engine-0", trace=trace)
        assert engine.record(1).acks == ()


@pytest.mark.parametrize("made", ["nothing", "socket without a server"])
def test_an_absent_server_is_told_in_less_than_two_seconds(tmp_path, made):
    import socket

    path = tmp_path / "wl.sock"
    if made != "nothing":
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
    # The best of three: the first one imports gRPC, and a busy machine stops any of them for a while.
    spent = []
    for _ in range(3):
        began = time.monotonic()
        with pytest.raises(Unavailable, match="no server answers"):
            wl.connect(f"unix://{path}")
        spent.append(time.monotonic() - began)
        if spent[-1] < 2:
            break
    assert min(spent) < 2
