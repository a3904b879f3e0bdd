"""Labels by launch, on SGLang's own bookkeeping functions, without a server: any order of launches, landings
and label changes that an overlap scheduler can make, against the truth."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightline.plugins.sglang.boundary import Flights

pytestmark = pytest.mark.sglang


class Request:
    """As much of SGLang's `Req` as labels are booked on, and the truth."""

    def __init__(self) -> None:
        self.output_ids: list[int] = []
        self.weight_version_events: list[Any] = []
        self.truth: list[str] = []


STEPS = st.lists(
    st.tuples(st.sampled_from(["step", "swap", "middle-chunk", "drain"]), st.sampled_from("abc")), max_size=40
)


@settings(deadline=None, max_examples=500)
@given(STEPS)
def test_every_token_has_the_label_at_its_launch(steps: list[tuple[str, str]]) -> None:
    from sglang.srt.utils.weight_versions import compute_weight_version_spans, record_weight_version_events

    flights, request, serving = Flights(), Request(), "a"
    flying: list[tuple[Any, bool]] = []

    def spans() -> list[str]:
        found = compute_weight_version_spans(
            request.weight_version_events, current_version=serving, num_output_tokens=len(request.output_ids)
        )
        return [span.version for span in found for _ in range(span.start, span.end)]

    def land() -> None:
        launched, samples = flying.pop(0)
        if samples:
            request.output_ids.append(0)
            request.truth.append(launched.label)
        assert spans() == request.truth  # a request that ends with this token is told so while it is booked
        flights.landed(launched)

    for what, label in steps:
        if what == "swap":
            if label != serving:
                old, serving = serving, label
                record_weight_version_events([request], old_version=old)
                flights.relabelled()
        elif what == "drain":
            while flying:
                land()
        else:
            flying.append((flights.launch(serving, [request]), what == "step"))
            if len(flying) > 1:
                land()
    while flying:
        land()
    assert spans() == request.truth
    assert not flights.unseen


def test_without_it_the_token_in_flight_is_mislabelled() -> None:
    """What SGLang itself books: the reason for all of this. When this fails, SGLang has changed."""
    from sglang.srt.utils.weight_versions import compute_weight_version_spans, record_weight_version_events

    request = Request()
    request.output_ids = [0]
    record_weight_version_events([request], old_version="a")
    request.output_ids.append(0)  # launched under a
    found = compute_weight_version_spans(
        request.weight_version_events, current_version="b", num_output_tokens=2
    )
    assert [(span.version, span.start, span.end) for span in found] == [("a", 0, 1), ("b", 1, 2)]
