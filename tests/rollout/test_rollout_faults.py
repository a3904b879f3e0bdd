"""Every verb of a refit fails, before and after its effect, once and for long, and followers die at every
point.

Whatever happens, the engine ends at old bits with the old label or new bits with the new label, serving; or
it is quarantined and a full refit heals it. No token ever carries the label of weights that did not make it.
"""

from __future__ import annotations

import copy
import itertools

import pytest
from rollout_double import ERRORS, VERBS, Fault, Killed, bit_equal, true_labels

pytestmark = pytest.mark.faults

FORWARD = ("describe", "prepare", "pause", "apply", "verify", "invalidate", "label", "resume", "close")
MOMENTS = [(verb, when) for verb in FORWARD for when in ("before", "after")] + [("apply", "middle")]


def one_look_is_consistent(rig):
    """After a look the engine is at one of the two versions with its own label, or known to need help."""
    engine = rig.engine
    if engine.quarantined:
        return True
    versions = {rig.line.record(v).label: v for v in (1, 2)}
    session = engine.session
    if session is not None and session.applied != session.labelled:
        return engine.paused  # frozen between the write and the label, for the watchdog to undo
    return bit_equal(engine, rig.versions[versions[engine.label]])


@pytest.mark.parametrize("times", [1, 3, 20])
@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize(("verb", "when"), MOMENTS)
def test_a_failing_verb_leaves_the_engine_whole_and_is_healed(rig, verb, when, kind, times):
    rig.put_at(1)
    rig.engine.faults = [Fault(verb, when, ERRORS[kind], times)]
    follower = rig.follower(at=2)
    with_errors = {"invalid": 0}
    for _ in range(3):
        try:
            rig.clock.now += max(follower.step(), 0.01)
        except type(ERRORS[kind]):
            # A description that fails with anything but "no answer" is not for the follower to wait out.
            assert verb == "describe"
            with_errors["invalid"] += 1
        assert one_look_is_consistent(rig), rig.events
    rig.engine.faults = []
    rig.settle(follower, 2, looks=60)
    assert true_labels(rig.engine)
    assert rig.line.record(2).acks


@pytest.mark.parametrize(
    ("kind", "back_kind"), list(itertools.product(("lost", "old", "unknown", "conflict"), repeat=2))
)
@pytest.mark.parametrize("back", ["rollback", "resume", "close"])
@pytest.mark.parametrize("verb", ["pause", "apply", "verify", "label"])
def test_a_failure_on_the_way_back_too(rig, verb, back, kind, back_kind):
    for when, back_when in itertools.product(("before", "after"), repeat=2):
        engine = rig.engine
        engine.restart()
        rig.put_at(1)
        engine.faults = [
            Fault(verb, when, copy.copy(ERRORS[kind]), 2),
            Fault(back, back_when, copy.copy(ERRORS[back_kind]), 8),
        ]
        follower = rig.follower(at=2)
        for _ in range(2):
            rig.clock.now += max(follower.step(), 0.01)
            assert one_look_is_consistent(rig), rig.events
        engine.faults = []
        rig.settle(follower, 2, looks=60)
        assert true_labels(engine)


@pytest.mark.parametrize("restart", ["soon", "late"])
@pytest.mark.parametrize(("verb", "when"), MOMENTS)
def test_a_follower_killed_at_any_point_leaves_a_serving_engine_and_the_next_one_heals_it(
    rig, verb, when, restart
):
    rig.put_at(1)
    engine = rig.engine
    engine.faults = [Fault(verb, when, Killed())]
    with pytest.raises(Killed):
        rig.follower("first", at=2).step()
    if restart == "late":
        rig.clock.now += engine.timeout + 1
        engine.tick()
        assert engine.serving
        assert engine.session is None
        assert bit_equal(engine, rig.versions[1 if engine.version == 1 else 2])
    follower = rig.follower("second", at=2)
    rig.settle(follower, 2, looks=40)
    assert true_labels(engine)


@pytest.mark.parametrize(("verb", "when"), MOMENTS[2:])
def test_an_engine_killed_at_any_point_is_brought_back_in_full(rig, verb, when):
    rig.put_at(1)
    engine = rig.engine

    class Crash(Fault):
        @property
        def error(self):
            engine.restart()
            return ERRORS["lost"]

        @error.setter
        def error(self, value):
            pass

    engine.faults = [Crash(verb, when, ERRORS["lost"])]
    follower = rig.follower(at=2)
    rig.settle(follower, 2)
    assert true_labels(engine)
    assert {e["have"] for e in rig.named("refit")} <= {None, 1}
    assert rig.named("refit")[-1]["have"] is None


def test_an_engine_whose_undo_log_is_lost_is_quarantined_and_healed_by_a_full_refit(rig):
    rig.put_at(1)
    engine = rig.engine
    engine.undo_broken = True
    engine.faults = [Fault("apply", "middle", ERRORS["unknown"])]
    follower = rig.follower(at=2)
    follower.step()
    assert engine.quarantined
    assert not engine.serving
    refused = rig.named("refused")[-1]
    assert (refused["engine_state"], refused["error"]["kind"]) == ("unknown", "refit")
    engine.undo_broken = False
    rig.settle(follower, 2)
    assert rig.named("refit")[-1]["have"] is None
    assert true_labels(engine)


def test_the_double_knows_every_verb():
    assert set(FORWARD) < set(VERBS)
