"""Threads over chunks: wall time of encode and decode against the number of threads. usage: codec_scaling.py
OLD NEW

Prints JSON. Wall time, best of five; on a machine that others use, trust it little.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from weightline import codec
from weightline.codec import bench
from weightline.codec.weightfiles import locate


def best(work: Any) -> float:
    """Least wall seconds of five runs."""
    least = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - begin)
    return least


def main() -> None:
    """Measure and print."""
    before, after = locate(Path(sys.argv[1])), locate(Path(sys.argv[2]))
    specs = {name: located.spec for name, located in before.items()}
    a, b = bench.load(before), bench.load(after)
    times = max(1, bench.TILED_BYTES // sum(bits.nbytes for bits in a.values()))
    old, new = bench.tile(a, specs, times), bench.tile(b, specs, times)
    digests = {name: codec.digest_of(codec.bits_of(array)) for name, array in old.items()}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "delta"
        for threads in range(1, codec.threads() + 1):
            codec.set_threads(threads)
            for level in ("fast", "dense"):
                delta = codec.diff(old, new, old_digests=digests, level=level)
                encode = best(lambda level=level: codec.diff(old, new, old_digests=digests, level=level))
                codec.write_delta(delta, path, level=level)
                decode = best(lambda: codec.read_delta(path).decoded(old, digests=digests))
                rows.append({"threads": threads, "level": level, "encode_s": encode, "decode_s": decode})
    print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
