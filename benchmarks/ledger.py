"""What the ledger costs beside codec and disk: a commit's overhead and fsyncs, manifests of many tensors.

    python benchmarks/ledger.py [--dir DIR] [--tensors 100000] [--repeats 15]

One JSON document on stdout; times in milliseconds, medians with the smallest and the largest. `overhead` is
the time of a whole commit less the time in the codec (diff, encode, digest, apply) and in calls of the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from weightline import codec
from weightline.store import Store
from weightline.store import manifest as manifests
from weightline.store.manifest import Manifest, TensorEntry
from weightline.types import TensorSpec


class Meter:
    """Seconds spent in some functions, and how often they were called."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0
        self._depth = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self._depth += 1
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.perf_counter() - began

        return timed


@contextmanager
def metered(meter: Meter, *targets: tuple[Any, str]) -> Iterator[None]:
    kept = [(owner, name, getattr(owner, name)) for owner, name in targets]
    for owner, name, function in kept:
        setattr(owner, name, meter.around(function))
    try:
        yield
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


def summary(values: list[float]) -> dict[str, float]:
    ms = [1e3 * value for value in values]
    return {"median": round(statistics.median(ms), 3), "min": round(min(ms), 3), "max": round(max(ms), 3)}


def commits(root: Path, repeats: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    weights = {f"layers.{k}.weight": rng.integers(0, 1 << 16, 1 << 16, np.uint16) for k in range(272)}
    store = Store.open(root, create=True)
    writer = store.writer()
    writer.commit(weights)
    total, overhead, fsyncs = [], [], 0
    for k in range(repeats + 2):
        for array in weights.values():
            array[rng.integers(0, array.size, 64)] ^= np.uint16(1)
        beside, sync = Meter(), Meter()
        codecs = [(codec, name) for name in ("diff", "write_delta", "digest_of")]
        codecs += [(codec.Delta, "apply_")]
        disks = [(os, name) for name in ("link", "open")] + [
            (Path, "open"),
            (Path, "unlink"),
            (Path, "replace"),
        ]
        disks += [(Path, "rename"), (Path, "mkdir")]
        # One meter for codec and disk: what lies within another (the fsync in write_delta) counts once.
        with metered(sync, (os, "fsync")), metered(beside, *codecs, *disks, (os, "fsync")):
            began = time.perf_counter()
            writer.commit(weights, step=k)
            whole = time.perf_counter() - began
        fsyncs = sync.calls
        if k >= 2:
            total.append(whole)
            overhead.append(whole - beside.seconds)
    store.close()
    return {"commit_ms": summary(total), "overhead_ms": summary(overhead), "fsyncs_per_delta_commit": fsyncs}


def manifest_work(count: int, repeats: int) -> dict[str, Any]:
    specs = [TensorSpec(f"model.layers.{k}.weight", "BF16", (8, 8)) for k in range(count)]
    table = {spec.name: TensorEntry(spec, f"{k:032x}") for k, spec in enumerate(specs)}
    times: dict[str, list[float]] = {
        "weights_digest": [],
        "encode_all": [],
        "encode_changed": [],
        "decode_all": [],
    }
    for _ in range(repeats):
        began = time.perf_counter()
        digest = manifests.weights_digest_of(table)
        times["weights_digest"].append(time.perf_counter() - began)
        for name, entries in (
            ("encode_all", list(table.values())),
            ("encode_changed", list(table.values())[:1000]),
        ):
            began = time.perf_counter()
            data = manifests.encode(
                Manifest(
                    run="r", base=None, step=None, complete=True, tensors=tuple(entries), blobs=(),
                    weights_digest=digest, raw_nbytes=0, elements=0, changed=0, created_at=0.0,
                )
            )  # fmt: skip
            times[name].append(time.perf_counter() - began)
            if name == "encode_all":
                whole = data
        began = time.perf_counter()
        manifests.decode(whole, where="bench")
        times["decode_all"].append(time.perf_counter() - began)
    return {"tensors": count} | {f"{name}_ms": summary(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        out = {"commit": commits(Path(folder) / "s", given.repeats)}
    out["manifest"] = manifest_work(given.tensors, max(3, given.repeats // 3))
    print(json.dumps(out, indent=2))


if __name__ == "__main__":
    main()
