"""Rows and queue under random events: a sequence's row holds its own keys and values, whatever moved."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytestmark = pytest.mark.torch

ROWS = 6


class Rows:
    """A cache whose rows are lists: element i is who computed position i, and None where nothing valid is."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = [[] for _ in range(ROWS)]

    def copy_row(self, source: int, target: int, length: int) -> None:
        self.rows[target][:length] = self.rows[source][:length]

    def clear_row(self, row: int) -> None:
        self.rows[row] = []


def request(prompt: int, n: int) -> Any:
    from weightline.generate import SamplingParams
    from weightline.generate.requests import Request

    params = SamplingParams(n=n, temperature=0.0)
    return Request(
        tuple(range(prompt)), params, lambda _: None, external_id="x", max_tokens=99, stop_ids=frozenset()
    )


def check(scheduler: Any, store: Rows) -> None:
    assert len(scheduler.rows) + scheduler.unforked <= ROWS
    assert len({id(s) for s in scheduler.rows}) == len(scheduler.rows)
    for row, sequence in enumerate(scheduler.rows):
        assert row >= scheduler.ready or (sequence.pending == 1 and sequence.output)
        # Positions that the prompt computed belong to the request, later ones to the sequence itself.
        owners = store.rows[row][: sequence.computed]
        assert len(owners) == sequence.computed
        assert all(owner in (sequence.request, sequence) for owner in owners)


@pytest.mark.parametrize("seed", range(12))
def test_rows_stay_true_through_any_order_of_events(seed: int) -> None:
    from weightline.generate.scheduler import Scheduler

    rng, store = random.Random(seed), Rows()
    scheduler = Scheduler(store, ROWS, 10_000)

    def compute(row: int, count: int) -> None:
        sequence = scheduler.rows[row]
        owner = sequence if sequence.output else sequence.request
        del store.rows[row][sequence.computed :]
        store.rows[row] += [owner] * count
        sequence.cover("v", count)

    for _ in range(400):
        event = rng.choice(
            ("arrive", "prefill", "prefill", "prefill", "decode", "decode", "leave", "abort", "forget")
        )
        if event == "arrive" and len(scheduler.queue) < 4:
            scheduler.queue.append(request(rng.randrange(1, 9), rng.choice((1, 1, 2, 3, ROWS))))
        elif event == "prefill":
            if scheduler.ready < len(scheduler.rows) or scheduler.admit():
                sequence = scheduler.rows[scheduler.ready]
                compute(scheduler.ready, rng.randrange(1, sequence.pending + 1))
                if sequence.pending == 0:
                    for sampled in scheduler.computed_prompt(sequence):
                        sampled.accept(1, "v", None)
        elif event == "decode":
            for row in range(scheduler.ready):
                compute(row, 1)
            for sequence in scheduler.rows[: scheduler.ready]:
                sequence.accept(1, "v", None)
        elif event == "leave" and scheduler.ready:
            leaving = scheduler.rows[rng.randrange(scheduler.ready)]
            leaving.complete("stop")
            scheduler.leave(leaving)
        elif event == "abort" and scheduler.rows:
            victim = rng.choice(scheduler.rows).request
            for sequence in victim.live:
                sequence.complete("abort")
                scheduler.leave(sequence)
        elif event == "forget" and rng.random() < 0.2:
            scheduler.forget_kv()
        check(scheduler, store)


def test_a_group_waits_until_all_its_rows_are_free() -> None:
    from weightline.generate.scheduler import Scheduler

    scheduler = Scheduler(Rows(), ROWS, 10_000)
    scheduler.queue.extend([request(3, 2), request(3, ROWS - 1), request(3, 1)])
    assert scheduler.admit()
    assert scheduler.unforked == 1
    assert not scheduler.admit(), "first come, first served: the small one behind does not overtake"
    first = scheduler.rows[0]
    first.cover("v", 3)
    for sampled in scheduler.computed_prompt(first):
        sampled.accept(1, "v", None)
    assert (scheduler.ready, len(scheduler.rows), scheduler.unforked) == (2, 2, 0)
    scheduler.leave(scheduler.rows[0])
    assert scheduler.admit()


def test_leaving_twice_or_without_a_row_does_nothing() -> None:
    from weightline.generate.scheduler import Scheduler

    scheduler = Scheduler(Rows(), ROWS, 10_000)
    lone = request(2, 1).sequences[0]
    scheduler.leave(lone)
    scheduler.queue.append(lone.request)
    assert scheduler.admit()
    scheduler.leave(lone)
    scheduler.leave(lone)
    assert scheduler.rows == []
