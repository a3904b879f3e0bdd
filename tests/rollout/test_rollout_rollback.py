"""A rollback and the hold after it, on the engine double: who sees it, and what ends it."""

from __future__ import annotations

import pytest
from rollout_double import Fault, Port, random_weights, stepped

from weightline.errors import InvalidInput, RefitError, Unavailable, VersionNotFound
from weightline.rollout import rollback
from weightline.rollout.engines.base import Hold
from weightline.store import Store


def _back(rig, holder="rollback", **options):
    return rollback(rig.line, Port(rig.engine, holder), runtime_dir=rig.folder, clock=rig.clock, **options)


def test_a_rollback_steps_back_and_a_running_follower_stays_there(rig):
    rig.put_at(4)
    follower = rig.follower()
    follower.step()
    report = _back(rig)
    assert (report.before, report.version, report.held) == (4, 3, True)
    for _ in range(3):
        follower.step()
    rig.settle(follower, 3)
    rig.engine.hold = None
    rig.settle(follower, 4)


def test_a_running_follower_takes_a_held_engine_back_by_itself(rig):
    """As when the process that asked for the rollback died right after it had set the hold."""
    rig.put_at(4)
    rig.engine.hold = Hold(rig.line.run, 2)
    rig.settle(rig.follower(), 2)
    rig.settle(rig.follower("pinned", at=3), 2)


def test_a_hold_outlives_a_restart_of_the_engine_while_its_follower_lives(rig):
    rig.put_at(4)
    follower = rig.follower()
    follower.step()
    _back(rig, to=2)
    follower.step()
    rig.engine.restart()
    rig.settle(follower, 2)
    assert rig.engine.hold == Hold(rig.line.run, 2)


def test_a_hold_of_another_run_is_none_of_ours(rig):
    rig.put_at(3)
    rig.engine.hold = Hold("another", 1)
    rig.settle(rig.follower(), 4)


def test_a_held_version_that_is_yanked_is_left(own_rig):
    weights = random_weights(1)
    for step in range(1, 4):
        own_rig.commit(weights, step=step)
        weights = stepped(weights, step)
    own_rig.put_at(2)
    own_rig.engine.hold = Hold(own_rig.line.run, 2)
    follower = own_rig.follower()
    follower.step()
    assert own_rig.engine.version == 2
    store = Store.open(own_rig.line.root)
    store.yank(2)
    store.close()
    own_rig.settle(follower, 3)


def test_a_rollback_that_cannot_be_is_refused_before_anything_is_held(rig):
    with pytest.raises(VersionNotFound, match="nothing to step back from"):
        _back(rig)
    rig.put_at(1)
    with pytest.raises(VersionNotFound, match="no version below 1"):
        _back(rig)
    with pytest.raises(VersionNotFound, match="version 9 was never committed"):
        _back(rig, to=9)
    assert rig.engine.hold is None


def test_a_rollback_that_does_not_get_through_puts_the_hold_back_that_was_there(rig):
    rig.put_at(4)
    rig.engine.hold = Hold(rig.line.run, 4)
    rig.engine.faults = [Fault("apply", "before", RefitError("disk on fire", engine_state="old"), times=99)]
    with pytest.raises(RefitError, match=r"did not come back to version 3: .*disk on fire"):
        _back(rig, timeout=-1.0)
    assert rig.engine.hold == Hold(rig.line.run, 4)
    assert rig.engine.version == 4


def test_an_engine_that_is_away_raises_and_one_without_memory_is_refused(rig):
    class Forgetful:
        pass

    with pytest.raises(InvalidInput, match="cannot remember a hold"):
        rollback(rig.line, Forgetful(), runtime_dir=rig.folder)
    rig.engine.down = True
    with pytest.raises(Unavailable):
        _back(rig)
