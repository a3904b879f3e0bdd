"""Which weights sampled a token: the label at the launch of its batch, not at its landing.

SGLang's overlap scheduler launches batch k+1 before it books the tokens of batch k, and a pause in place
returns with one batch launched and not booked. SGLang 0.5.23 gives that batch's tokens the label of the
moment when they are booked: one token of every request that crosses a swap in place is one label too new.
Here each batch remembers the label at its launch; when the label moves, the requests' own label events are
held open until the batch has landed. Nothing is scheduled or sampled otherwise (docs/design/0017-sglang-
boundaries.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from weightline.plugins.sglang.hooks import Hook

OFF = "WEIGHTLINE_SGLANG_BOUNDARY"
"""`0`: SGLang books as it does without the plugin. For seeing the difference."""
TAG = "_weightline_launch"
"""Where a batch result keeps its `Launch`."""
FLIGHTS = "_weightline_flights"
"""Where a scheduler keeps its `Flights`."""
UNTIL_LANDED = 1 << 62
"""Output length of an event whose tokens are still to land: SGLang cuts events to the output's length."""

MOST = 8
"""Batches in flight at once, at most."""


class Launch:
    """A batch between its launch and the moment when its tokens are booked."""

    def __init__(self, label: str, requests: Iterable[Any]) -> None:
        self.label = label
        self.requests = [(request, len(request.weight_version_events)) for request in requests]
        """Each request of the batch, and how many label events it had."""
        self.held = False
        """The label moved since: the event at each of those places is held open."""

    def forget(self, request: Any, place: int) -> None:
        """The event at `place` of `request` is gone."""
        self.requests = [(r, n - (r is request and n > place)) for r, n in self.requests]


class Flights:
    """The batches of one scheduler that are launched and not booked: one at a pause, two within a step."""

    def __init__(self) -> None:
        self.unseen = False
        """A result landed whose launch was not seen."""
        self._flying: list[Launch] = []

    def launch(self, label: str, requests: Iterable[Any]) -> Launch:
        launched = Launch(label, requests)
        self._flying.append(launched)
        if len(self._flying) > MOST:  # not how SGLang launches: these will not be told apart
            self.unseen = True
            del self._flying[0]
        return launched

    def relabelled(self) -> None:
        """The label has moved, and SGLang has noted it: what is still to land belongs to the label before.

        Done now and not at the landing, because the next batch is launched, under the new label, before that.
        """
        from sglang.srt.utils.weight_versions import WeightVersionEvent

        for launched in self._flying:
            launched.held = True
            for request, before in launched.requests:
                events = request.weight_version_events
                if len(events) < before:
                    continue  # SGLang cut the list itself: the request starts again
                # Not there yet when the request has no token: SGLang notes no change of those.
                events[before : before + 1] = [WeightVersionEvent(launched.label, UNTIL_LANDED)]

    def landed(self, launched: Launch) -> None:
        """Its tokens are booked: every event that was held open ends where the output ends now."""
        from sglang.srt.utils.weight_versions import WeightVersionEvent

        if launched not in self._flying:
            return
        self._flying.remove(launched)
        if not launched.held:
            return
        flying = {id(request) for other in self._flying if other.held for request, _ in other.requests}
        for request, place in launched.requests:
            events, count = request.weight_version_events, len(request.output_ids)
            if id(request) in flying:
                continue  # more of the same label is to land
            if place >= len(events) or events[place].num_output_tokens != UNTIL_LANDED:
                continue  # SGLang cut the list itself: the request starts again
            if count:
                events[place] = WeightVersionEvent(events[place].old_version, count)
                continue
            del events[place]
            for other in self._flying:
                other.forget(request, place)


def flights_of(scheduler: Any) -> Flights:
    """The flights of a scheduler, made on first use."""
    found: Flights = vars(scheduler).setdefault(FLIGHTS, Flights())
    return found


def unsure(scheduler: Any) -> str:
    """Why labels are not exact after a pause in place; empty when they are."""
    if not scheduler.enable_overlap:
        return ""
    if os.environ.get(OFF) == "0":
        return f"the overlap scheduler has a token in flight when it pauses in place, and {OFF}=0"
    if getattr(scheduler, "enable_pdmux", False) or getattr(scheduler, "enable_overlap_mlx", False):
        return "batches are launched by an event loop that the plugin does not know"
    if flights_of(scheduler).unseen:
        return "tokens landed of a batch whose launch was not seen"
    return _broken()


def _broken() -> str:
    """The self-test: SGLang's own functions, on made-up requests, book what is expected of them."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    absent = {hook.target for hook in HOOKS} - getattr(HookRegistry, "_patched", set())
    if absent:
        return f"the plugin could not step into {', '.join(sorted(absent))}"
    try:
        for landed_before in (0, 1):
            for lands in (0, 1):
                _try(landed_before, lands)
    except (AttributeError, TypeError, ValueError) as error:
        return f"this SGLang books labels otherwise than the plugin expects: {error}"
    return ""


class _Request:
    """As much of SGLang's `Req` as labels are booked on."""

    def __init__(self, tokens: int) -> None:
        self.output_ids = [0] * tokens
        self.weight_version_events: list[Any] = []


def _try(landed_before: int, lands: int) -> None:
    """A batch is launched under "a", the label becomes "b", a second batch is launched, `lands` tokens of the
    first land, then one of the second."""
    from sglang.srt.utils.weight_versions import compute_weight_version_spans, record_weight_version_events

    def spans() -> list[tuple[str, int, int]]:
        found = compute_weight_version_spans(
            request.weight_version_events, current_version="b", num_output_tokens=len(request.output_ids)
        )
        return [(span.version, span.start, span.end) for span in found if span.end > span.start]

    request, flights = _Request(landed_before), Flights()
    first = flights.launch("a", [request])
    record_weight_version_events([request], old_version="a")
    flights.relabelled()
    second = flights.launch("b", [request])
    request.output_ids += [0] * lands
    while_booked = spans()
    flights.landed(first)
    request.output_ids.append(0)
    flights.landed(second)
    at = landed_before + lands
    old = [("a", 0, at)] if at else []
    if (while_booked, spans()) != (old, [*old, ("b", at, at + 1)]):
        raise ValueError(f"{landed_before} + {lands} tokens give {while_booked}, then {spans()}")


def _launched(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    from weightline.plugins.sglang.engine import serving_label

    seen = flights_of(scheduler).launch(serving_label(), batch.reqs)
    result = None
    try:
        result = original(scheduler, batch, *args, **kwargs)
    finally:
        if result is None:
            flights_of(scheduler).landed(seen)
    setattr(result, TAG, seen)
    return result


def _landed(
    original: Callable[..., Any], scheduler: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
) -> Any:
    launched: Launch | None = getattr(result, TAG, None)
    try:
        return original(scheduler, batch, result, *args, **kwargs)
    finally:
        if launched is None:
            flights_of(scheduler).unseen = True
        else:
            flights_of(scheduler).landed(launched)


def _relabelled(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    from weightline.plugins.sglang.engine import serving_label
    from weightline.plugins.sglang.namespaces import renew

    before = serving_label()
    try:
        return original(scheduler, *args, **kwargs)
    finally:
        if serving_label() != before:
            if os.environ.get(OFF) != "0":
                flights_of(scheduler).relabelled()
            renew(scheduler)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = (
    Hook(f"{_SCHEDULER}.run_batch", _launched),
    Hook(f"{_SCHEDULER}.process_batch_result", _landed),
    Hook(f"{_SCHEDULER}.record_weight_version_change", _relabelled),
)
