"""A trainer for the fault tests: commits, and on request kills itself at the n-th durable step.

python store_child.py ROOT COMMITS KILL_AT SEED
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

from weightline.store import Store


def weights(k: int) -> dict[str, np.ndarray]:
    array = np.zeros((64, 64), np.uint16)
    array[0, :8] = k
    return {"w": array, "v": np.full(3, k, np.uint8)}


def main() -> None:
    root, commits, kill_at, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    seen = 0

    def on_step(step: str) -> None:
        nonlocal seen
        seen += 1
        if seen == kill_at:
            print("killed at", step, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    store = Store.open(root, create=True, on_step=on_step)
    writer = store.writer()
    for k in range(first, first + commits):
        record = writer.commit(weights(k), step=k, attachments={"opt": bytes([k])}, anchor=k % 3 == 0)
        print("committed", record.version, k, flush=True)
    print("steps", seen, flush=True)


if __name__ == "__main__":
    main()
