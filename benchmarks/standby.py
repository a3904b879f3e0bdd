"""How long the engine stands still for a refit, in place and by a standby set of tensors, by the number of
changed elements: where the two cross.

    python benchmarks/standby.py [MODEL] [--requests 16] [-n 3] [--shares 0.001 0.01 …] [--threads N]

MODEL is "tiny", "smollm2" (default) or a model folder. 16 requests decode all the time. Each round changes a
share of all elements (chosen at random, lowest bit), prepares the refit while serving, and switches between
two steps. `still_ms` is the time between the end of the step before the switch and the start of the one
after; `step_ms` the median step with no refit about; `slowest_step_ms` the longest step while the refit was
prepared, `prepare_ms` how long that took. One JSON document: the minimum over the rounds, and the crossover,
which is the number of changed elements at which the in-place way stands still for one step (through the two
neighbouring measurements, by a straight line).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "generate"))

from generate_world import Versions, Weights

from weightline import codec
from weightline.demo.models import resolve_model
from weightline.demo.places import model_cache
from weightline.errors import Unavailable
from weightline.generate import Engine, EngineOptions, SamplingParams, load_model

SHARES = (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 1.0)
WAYS = {"in_place": 10**15, "standby": 0}


def moved(weights: Weights, share: float, seed: int) -> Weights:
    """The lowest bit of `share` of all elements flipped."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, array in weights.items():
        bits = codec.bits_of(array).copy()
        if share == 1.0:
            bits ^= 1
        else:
            bits[np.unique(rng.integers(0, bits.size, max(1, round(bits.size * share))))] ^= 1
        out[name] = codec.from_bits(bits, codec.spec_of(name, array))
    return out


class Traffic:
    """Requests without end, and when each step began and ended."""

    def __init__(self, engine: Engine, requests: int, length: int) -> None:
        self.engine = engine
        self.length = length
        self.steps: list[tuple[float, float]] = []
        self.over = threading.Event()
        step = engine.stepper.step

        def timed(*args: Any, **kwargs: Any) -> None:
            began = time.perf_counter()
            step(*args, **kwargs)
            self.steps.append((began, time.perf_counter()))

        engine.stepper.step = timed  # type: ignore[method-assign]
        self.threads = [threading.Thread(target=self._keep_asking, args=(i,)) for i in range(requests)]
        for thread in self.threads:
            thread.start()

    def _keep_asking(self, seed: int) -> None:
        while not self.over.is_set():
            ended = threading.Event()

            def sink(chunk: Any, ended: threading.Event = ended) -> None:
                if chunk.final is not None:
                    ended.set()

            params = SamplingParams(temperature=1.0, seed=seed, ignore_eos=True, max_tokens=self.length)
            try:
                self.engine.submit(list(range(8)), params, sink)
            except Unavailable:  # the engine stops, perhaps because the measurement failed
                return
            ended.wait()

    def more_steps(self, count: int) -> None:
        """Wait for so many."""
        wanted = len(self.steps) + count
        while len(self.steps) < wanted:
            time.sleep(0.001)

    def stop(self) -> None:
        self.over.set()
        self.engine.abort(None)
        for thread in self.threads:
            thread.join()


def refit(engine: Engine, traffic: Traffic, order: Any) -> dict[str, float]:
    """One refit under traffic, times in milliseconds."""
    began = time.perf_counter()
    session, elements = engine.prepare(order)
    prepared = time.perf_counter()
    traffic.more_steps(2)
    at: list[float] = []

    def switch() -> None:
        at.append(time.perf_counter())
        engine.refits.switch(session)

    engine.call(switch)
    traffic.more_steps(2)
    facts = engine.call(lambda: engine.refits.facts(session))
    engine.call(lambda: engine.refits.close(session))
    steps = list(traffic.steps)
    before = max(end for _, end in steps if end <= at[0])
    after = min(start for start, _ in steps if start > at[0])
    during = [e - b for b, e in steps if b < prepared and e > began]
    return {
        "elements": elements,
        "still_ms": (after - before) * 1e3,
        "prepare_ms": (prepared - began) * 1e3,
        "slowest_step_ms": max(during, default=0.0) * 1e3,
        "standby_bytes": float(str(facts["standby_bytes"])),
    }


def crossover(rows: list[dict[str, Any]], step_ms: float) -> float | None:
    """Elements at which the in-place way stands still for `step_ms`; None where it never does."""
    points = sorted((r["elements"], r["still_ms"]) for r in rows if r["way"] == "in_place")
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 <= step_ms <= y1:
            return float(round(x0 + (x1 - x0) * (step_ms - y0) / max(y1 - y0, 1e-9)))
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("-n", type=int, default=3, help="rounds a share and way; the minimum counts")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of all elements")
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    codec.warm()
    folder = resolve_model(args.model, model_cache())
    options = EngineOptions(max_num_seqs=args.requests, max_model_len=256, session_timeout=3600.0)
    rows = []
    with (
        tempfile.TemporaryDirectory() as files,
        Engine(load_model(folder, max_model_len=256), options) as engine,
    ):
        versions = Versions(folder, Path(files))
        label, weights, version = "default", versions.weights["default"], 0
        traffic = Traffic(engine, args.requests, 200)
        traffic.more_steps(args.requests + 10)
        alone = [e - b for b, e in traffic.steps[-10:]]
        for share in args.shares:
            for way, standby_from in WAYS.items():
                engine.refits.standby_from = standby_from
                found = []
                for _ in range(args.n):
                    version += 1
                    base = None if version == 1 else (version - 1, label)
                    weights = moved(weights, share if base else 1.0, version)
                    order = versions.order(weights, label=f"v{version}", version=version, base=base)
                    versions.weights.pop(label)
                    label = f"v{version}"
                    if base is None:  # the first is always full: it counts for no share
                        refit(engine, traffic, order)
                        continue
                    found.append(refit(engine, traffic, order))
                    traffic.more_steps(3)
                    alone += [e - b for b, e in traffic.steps[-2:]]
                    Path(order.file).unlink()
                best = {k: round(min(f[k] for f in found), 3) for k in found[0]}
                rows.append({"share": share, "way": way, **best})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        traffic.stop()
    step_ms = statistics.median(alone) * 1e3
    report = {
        "model": args.model,
        "threads": torch.get_num_threads(),
        "requests": args.requests,
        "step_ms": round(step_ms, 2),
        "rows": rows,
        "crossover_elements": crossover(rows, step_ms),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
