"""Which weights sampled a token: the label at the launch of its batch, not at its landing.

SGLang's overlap scheduler launches batch k+1 before it books the tokens of batch k, and a pause in place
returns with one batch launched and not booked. SGLang 0.5.23 gives that batch's tokens the label of the
moment when they are booked: one token of every request that crosses a swap in place is one label too new.
Here each result remembers the label at its launch; while it is booked, the requests' own label events say
so, and afterwards they are cut to what has landed. Nothing is scheduled or sampled otherwise
(docs/design/0017-sglang-boundaries.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from weightline.plugins.sglang.hooks import Hook

OFF = "WEIGHTLINE_SGLANG_BOUNDARY"
"""`0`: SGLang books as it does without the plugin. For seeing the difference."""
TAG = "_weightline_launch"
"""Where a batch result keeps its `Launch`."""
UNSEEN = "_weightline_unseen"
"""Set on a scheduler when a result lands whose launch was not seen."""
UNTIL_LANDED = 1 << 62
"""Output length of an event whose tokens are still to land: SGLang cuts events to the output's length."""


class Launch(NamedTuple):
    """What was true when a batch was launched."""

    label: str
    requests: list[tuple[Any, int]]
    """Each request of the batch, and how many label events it had."""


def launch(label: str, requests: list[Any]) -> Launch:
    return Launch(label, [(request, len(request.weight_version_events)) for request in requests])


def hold(launched: Launch, label: str) -> list[tuple[Any, int]]:
    """Before the tokens of `launched` are booked, while the engine says `label`: they get the launch's label.

    Returns the requests whose events were touched, each with the place of the event, for `settle`.
    """
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    touched = []
    for request, before in launched.requests:
        events = request.weight_version_events
        event = WeightVersionEvent(old_version=launched.label, num_output_tokens=UNTIL_LANDED)
        if len(events) > before:
            # The first change since the launch. It left the launch's label; what lands now is from before it.
            events[before] = event
        elif len(events) == before and label != launched.label:
            # SGLang notes no change for a request that has no token yet.
            events.append(event)
        else:
            continue
        touched.append((request, before))
    return touched


def settle(touched: list[tuple[Any, int]]) -> None:
    """After the tokens are booked: every event that `hold` opened ends where the output ends now."""
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    for request, place in touched:
        events, count = request.weight_version_events, len(request.output_ids)
        if place >= len(events) or events[place].num_output_tokens != UNTIL_LANDED:
            continue  # SGLang cut the list itself: the request starts again
        if count:
            events[place] = WeightVersionEvent(events[place].old_version, count)
        else:
            del events[place]


def unsure(scheduler: Any) -> str:
    """Why labels are not exact after a pause in place; empty when they are."""
    if not scheduler.enable_overlap:
        return ""
    if os.environ.get(OFF) == "0":
        return f"the overlap scheduler has a token in flight when it pauses in place, and {OFF}=0"
    if getattr(scheduler, "enable_pdmux", False) or getattr(scheduler, "enable_overlap_mlx", False):
        return "batches are launched by an event loop that the plugin does not know"
    if getattr(scheduler, UNSEEN, False):
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
    """A batch is launched under "a", the label becomes "b", `lands` tokens land; "b" samples one more."""
    from sglang.srt.utils.weight_versions import compute_weight_version_spans, record_weight_version_events

    def spans(current: str) -> list[tuple[str, int, int]]:
        found = compute_weight_version_spans(
            request.weight_version_events,
            current_version=current,
            num_output_tokens=len(request.output_ids),
        )
        return [(span.version, span.start, span.end) for span in found if span.end > span.start]

    request = _Request(landed_before)
    launched = launch("a", [request])
    record_weight_version_events([request], old_version="a")
    touched = hold(launched, "b")
    request.output_ids += [0] * lands
    old = [("a", 0, landed_before + lands)] if landed_before + lands else []
    while_booked = spans("b")
    settle(touched)
    request.output_ids.append(0)
    new = [("b", landed_before + lands, landed_before + lands + 1)]
    if (while_booked, spans("b")) != (old, old + new):
        raise ValueError(f"{landed_before} + {lands} tokens give {while_booked}, then {spans('b')}")


def _launched(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    from weightline.plugins.sglang.engine import serving_label

    seen = launch(serving_label(), list(batch.reqs))
    result = original(scheduler, batch, *args, **kwargs)
    if result is not None:
        setattr(result, TAG, seen)
    return result


def _landed(
    original: Callable[..., Any], scheduler: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
) -> Any:
    from weightline.plugins.sglang.engine import serving_label

    if os.environ.get(OFF) == "0":
        return original(scheduler, batch, result, *args, **kwargs)
    launched: Launch | None = getattr(result, TAG, None)
    if launched is None:
        setattr(scheduler, UNSEEN, True)
        return original(scheduler, batch, result, *args, **kwargs)
    touched = hold(launched, serving_label())
    try:
        return original(scheduler, batch, result, *args, **kwargs)
    finally:
        settle(touched)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = (Hook(f"{_SCHEDULER}.run_batch", _launched), Hook(f"{_SCHEDULER}.process_batch_result", _landed))
