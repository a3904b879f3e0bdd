"""The refit transaction as a pure machine: every way of failing, up to three failures in one refit, against a
small model of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from weightline.rollout.transaction import (
    FORWARD,
    Do,
    Done,
    Effect,
    Event,
    Failed,
    Finish,
    Retry,
    Transaction,
)

RETRY = Retry(forward=(0.0,), exit=(0.0, 0.0))


@dataclass(frozen=True)
class Model:
    """An engine as far as a refit can see it. `wrote`: the bits may have been changed by this session."""

    bits: str = "old"
    label: str = "old"
    paused: bool = False
    session: bool = False
    quarantined: bool = False

    def serving(self) -> bool:
        return not self.paused and not self.quarantined

    def after(self, verb: str) -> Model:
        """The effect of a verb that happens."""
        effects = {
            "prepare": {"session": True},
            "pause": {"paused": True},
            "apply": {"bits": "new"},
            "verify": {},
            "invalidate": {},
            "label": {"label": "new"},
            "resume": {"paused": False},
            "rollback": {"bits": "old", "label": "old"},
            "close": {"session": False},
        }
        return replace(self, **effects[verb])

    def watchdog(self) -> Model:
        """What the engine does when it has not heard of an open session's holder."""
        if not self.session:
            return self
        return replace(self, bits="old", label="old", paused=False, session=False)


def answers(model: Model, verb: str) -> Iterator[tuple[Event, Model, bool]]:
    """Every answer the engine can give to a verb: (event, engine afterwards, is it a failure?)."""
    yield Done(verb), model.after(verb), False
    yield Failed(verb, "lost"), model, True
    yield Failed(verb, "lost"), model.after(verb), True
    if verb != "close":
        yield Failed(verb, "refused"), model, True
    if verb == "rollback":
        # What cannot be put back is quarantined: such an engine takes no step until it has had a full refit.
        yield Failed(verb, "unknown"), replace(model, bits="torn", quarantined=True, paused=True), True
    elif verb == "apply":
        yield Failed(verb, "unknown"), replace(model, bits="torn"), True
    if verb not in ("prepare", "resume"):
        # The engine's watchdog was faster, and nobody tells the follower until it asks for the session again.
        ended = model.watchdog()
        if verb == "pause":
            yield Done(verb), replace(ended, paused=True), True
        else:
            yield Failed(verb, "gone" if verb in ("rollback", "close") else "refused"), ended, True


def walk(
    transaction_events: list[Event], model: Model, failures: int
) -> Iterator[tuple[Finish, Model, list[Event]]]:
    effect = replay(transaction_events)
    if isinstance(effect, Finish):
        yield effect, model, transaction_events
        return
    for event, after, failure in answers(model, effect.verb):
        if failure and not failures:
            continue
        assert not after.serving() or after.bits == after.label, (
            f"{after.bits} bits would carry the {after.label} label after {[*transaction_events, event]}"
        )
        yield from walk([*transaction_events, event], after, failures - failure)


def replay(events: list[Event]) -> Effect:
    transaction = Transaction(retry=RETRY)
    effect = transaction.begin()
    for event in events:
        effect = transaction.advance(event)
    return effect


def test_the_way_forward_is_the_documented_order():
    transaction = Transaction()
    effect, order = transaction.begin(), []
    while isinstance(effect, Do):
        order.append(effect.verb)
        effect = transaction.advance(Done(effect.verb))
    assert tuple(order) == FORWARD
    assert effect == Finish("new", closed=True)


def test_every_combination_of_up_to_three_failures_ends_old_new_or_known_to_be_unknown():
    ends = {"old": 0, "new": 0, "unknown": 0}
    for finish, model, events in walk([], Model(), failures=3):
        ends[finish.state] += 1
        seen = f"{finish} {model} after {events}"
        if finish.state in ("old", "new"):
            assert model.bits == model.label, seen
            assert not model.quarantined, seen
            if finish.state == "new":
                assert model.bits == "new" or not finish.closed or ended_by_watchdog(events), seen
            assert model.serving() or finish.pause_in_doubt, seen
        else:
            # Somebody is left who brings it back: the engine's watchdog, a full refit, or the follower's next
            # look.
            assert model.quarantined or model.session or finish.pause_in_doubt or model.serving(), seen
        settled = model.watchdog()
        assert settled.serving() or settled.quarantined or finish.pause_in_doubt, seen
    assert min(ends.values()) > 100, ends


def ended_by_watchdog(events: list[Event]) -> bool:
    return any(isinstance(event, Failed) and event.how == "gone" for event in events)


@pytest.mark.parametrize("verb", FORWARD[1:-2])
def test_a_refusal_on_the_way_forward_is_rolled_back_and_resumed(verb):
    transaction = Transaction()
    effect, order = transaction.begin(), []
    while isinstance(effect, Do):
        order.append(effect.verb)
        failed = effect.verb == verb and "rollback" not in order
        effect = transaction.advance(Failed(verb, "refused") if failed else Done(effect.verb))
    assert order[-3:] == ["rollback", "resume", "close"]
    assert effect == Finish("old", closed=True)
    assert transaction.first_failure == Failed(verb, "refused")


def test_a_lost_answer_is_asked_for_again_with_growing_delays():
    transaction = Transaction(retry=Retry(forward=(0.1,), exit=(0.1, 0.2, 0.4)))
    effect = transaction.begin()
    while effect != Do("resume"):
        effect = transaction.advance(Done(effect.verb))
    delays = []
    while isinstance(effect, Do):
        effect = transaction.advance(Failed("resume", "lost"))
        delays += [effect.delay] if isinstance(effect, Do) else []
    assert delays == [0.1, 0.2, 0.4]
    assert effect == Finish("unknown", closed=False, pause_in_doubt=True)


def test_a_pause_that_is_not_ours_is_neither_made_nor_ended():
    transaction = Transaction(own_pause=False)
    effect, order = transaction.begin(), []
    while isinstance(effect, Do):
        order.append(effect.verb)
        effect = transaction.advance(
            Failed("verify", "refused") if effect.verb == "verify" else Done(effect.verb)
        )
    assert order == ["prepare", "apply", "verify", "rollback", "close"]
    assert effect == Finish("old", closed=True)


def test_an_event_that_answers_nothing_is_refused():
    transaction = Transaction()
    transaction.begin()
    with pytest.raises(ValueError, match="'apply' while 'prepare' is outstanding"):
        transaction.advance(Done("apply"))
