"""The trainer's fp32 -> bf16 cast fused with compare, emit and refresh of the shadow, beside the cast alone.

    python benchmarks/fused_cast.py [--elements 67108864] [--rounds 9]

Prints JSON: seconds of torch's cast into a buffer that is there (one thread), and, for several shares of
changed elements, of `Shadow.refresh` (the delta included) and of its kernel alone (digests included), as
ratios to
that cast. Thread CPU time, least of all rounds, taken in turn.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch

from weightline.codec import backend
from weightline.codec.coding import BATCH, CHUNK_LOG2, Piece, batches, rows_of
from weightline.codec.shadow import Shadow


def seconds(work: Callable[[], object]) -> float:
    """Thread CPU seconds of one run."""
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 26)
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    backend.warm()
    backend.set_threads(1)
    rng = np.random.default_rng(0)
    one = (rng.standard_normal(asked.elements, np.float32) * 0.05).astype(np.float32)
    buffer = torch.empty(asked.elements, dtype=torch.bfloat16)
    chunk = 1 << CHUNK_LOG2["fast"]
    room = np.empty(BATCH, np.uint32), *(np.empty(BATCH, np.uint16) for _ in range(2))
    shadow = Shadow({"w": one})
    bits = shadow.weights["w"].view(np.uint16).reshape(-1)

    def kernel(masters: np.ndarray) -> None:
        """What `refresh` runs, batch by batch."""
        pieces = [
            Piece(0, a, min(chunk, bits.size - a), bits.ctypes.data + 2 * a, masters.ctypes.data + 4 * a)
            for a in range(0, bits.size, chunk)
        ]
        for batch in batches(pieces):
            rows = rows_of(batch)
            backend.engine().cast(rows, *room, np.zeros((len(rows), 2), np.uint64))

    found: dict[str, object] = {"elements": asked.elements, "backend": backend.engine().__name__}
    for share in (0.0, 0.0018, 0.016):
        other = one.copy()
        at = rng.choice(asked.elements, int(share * asked.elements), replace=False)
        other.view(np.uint32)[at] ^= 1 << 16  # one unit in the last place of the bf16
        least = {"cast": 9e9, "refresh": 9e9, "kernel": 9e9}
        for k in range(2 * asked.rounds):
            masters = other if k % 2 == 0 else one
            source = torch.from_numpy(masters)
            least["cast"] = min(least["cast"], seconds(lambda source=source: buffer.copy_(source)))
            least["refresh"] = min(
                least["refresh"], seconds(lambda masters=masters: shadow.refresh({"w": masters}))
            )
            back = (one if k % 2 == 0 else other).view(np.uint32)
            least["kernel"] = min(least["kernel"], seconds(lambda back=back: kernel(back)))
            kernel(masters)
        shadow.refresh({"w": one})
        found[f"changed {share:.2%}"] = {
            "cast_s": least["cast"],
            "refresh_x_cast": least["refresh"] / least["cast"],
            "kernel_x_cast": least["kernel"] / least["cast"],
        }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
