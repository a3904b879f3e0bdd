"""`weightline.spans` over one ragged batch, beside the plain loop over its tokens.

usage: spans.py [--tokens 1000000] [--outputs 1000] [--spans 4] [--repeats 20]

Prints one JSON object: milliseconds (the least of the repeats) for each verb, batch included, and for the
loop.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import weightline as wl
from weightline.core import staleness as lines


def make(tokens: int, outputs: int, spans: int) -> tuple[list[list[dict[str, Any]]], wl.spans.Lineage]:
    """Outputs of equal length, each of `spans` consecutive versions."""
    rng = np.random.default_rng(0)
    labels = {f"{v}@{v:08x}": v for v in range(1, 101)}
    names = list(labels)
    size, found = tokens // outputs, []
    for _ in range(outputs):
        first = int(rng.integers(0, len(names) - spans + 1))
        cuts = [0, *sorted(int(c) for c in rng.choice(np.arange(1, size), spans - 1, replace=False)), size]
        found.append(
            [{"version": names[first + i], "start": cuts[i], "end": cuts[i + 1]} for i in range(spans)]
        )
    return found, wl.spans.Lineage(labels, {v: v - 1 or None for v in range(1, 101)})


def loop(outputs: list[list[dict[str, Any]]], lineage: wl.spans.Lineage, now: int) -> list[int]:
    """Staleness of every token, as one writes it first."""
    assert lineage.parents is not None
    found = []
    for spans in outputs:
        for span in spans:
            version = lineage.labels[span["version"]]
            for _ in range(span["start"], span["end"]):
                found.append(lines.distance(lineage.parents, version, now))
    return found


def least(call: Callable[[], object], repeats: int) -> float:
    """Milliseconds of the fastest of `repeats` calls."""
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return round(best * 1e3, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("tokens", 1_000_000), ("outputs", 1000), ("spans", 4), ("repeats", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    outputs, lineage = make(args.tokens, args.outputs, args.spans)
    made = wl.spans.batch(outputs)
    logprobs = np.zeros(made.tokens, np.float32)
    assert wl.spans.staleness(made, 100, lineage).tolist() == loop(outputs, lineage, 100)
    verbs: dict[str, Callable[[wl.spans.SpanBatch], object]] = {
        "batch": lambda made: made,
        "batch + per_token": lambda made: wl.spans.per_token(made, lineage),
        "batch + staleness": lambda made: wl.spans.staleness(made, 100, lineage),
        "batch + mask": lambda made: wl.spans.mask(made, lineage, now=100, at_most=4),
        "batch + ages": lambda made: wl.spans.ages(made, 100, lineage),
        "batch + split": lambda made: wl.spans.split(made, lineage, outputs={"logprobs": logprobs}),
    }
    figures = {
        name: least(lambda verb=verb: verb(wl.spans.batch(outputs)), args.repeats)  # type: ignore[misc]
        for name, verb in verbs.items()
    }
    figures["loop over tokens: staleness"] = least(lambda: loop(outputs, lineage, 100), 1)
    print(json.dumps({"tokens": made.tokens, "outputs": len(made), "spans": len(made.code), "ms": figures}))


if __name__ == "__main__":
    main()
