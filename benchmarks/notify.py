"""How long until another process knows of a commit? Through a server's socket, and by polling.

    python benchmarks/notify.py [--n 200] [--json]

A real server process, a watcher process that prints the monotonic clock as soon as `wait_for_update` returns,
and this process, which commits a 64 KiB model. Clocks are CLOCK_MONOTONIC, which all processes of one host
share. Two latencies in microseconds: `commit_us` from the call of commit() to the watcher's return, and
`notify_us` from the moment the server's log entry was visible (commit() returned here) to the watcher's
return; the second may be negative, since the server rings before it answers the trainer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import weightline as wl

SERVER = """
import json, sys
from weightline.service import serve
serve(sys.argv[1], runtime_dir=sys.argv[2], ready=lambda facts: print(json.dumps(facts), flush=True))
"""

WATCHER = """
import sys, time, weightline as wl
with wl.connect(sys.argv[1]) as line:
    line.wait_for_update(timeout=0)
    while not line.connected if hasattr(line, "connected") else False:
        time.sleep(0.001)
    print("up", flush=True)
    for _ in range(int(sys.argv[2])):
        version = line.wait_for_update(timeout=60)
        print(version, time.monotonic_ns(), flush=True)
"""


def measure(url: str, watch_url: str, n: int) -> dict[str, object]:
    """`n` commits through `url`, watched at `watch_url` by another process."""
    watcher = subprocess.Popen(
        [sys.executable, "-c", WATCHER, watch_url, str(n)], stdout=subprocess.PIPE, text=True
    )
    assert watcher.stdout is not None
    assert watcher.stdout.readline() == "up\n"
    weights = {"w": np.zeros(16 << 10, np.float32)}
    commit_us, notify_us = [], []
    with wl.connect(url) as line:
        for step in range(n):
            weights["w"][step % 1000] += 1
            begin = time.monotonic_ns()
            version = line.commit(weights)
            end = time.monotonic_ns()
            seen, at = map(int, watcher.stdout.readline().split())
            assert seen == version
            commit_us.append((at - begin) / 1e3)
            notify_us.append((at - end) / 1e3)
    watcher.wait(60)
    # The first commits pay for imports and the epoch.
    return {"n": n - 5, "commit_us": spread(commit_us[5:]), "notify_us": spread(notify_us[5:])}


def spread(values: list[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    return {
        "p50": round(float(np.percentile(values, 50)), 1),
        "p99": round(float(np.percentile(values, 99)), 1),
    }


def main() -> None:
    """Prints the figures, the polling baseline from the same run beside them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wl-") as folder:
        root, runtime = Path(folder) / "store", Path(folder) / "run"
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(root), str(runtime)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["listen"]
            figures = {
                "socket": measure(url, url, options.n),
                "baselines": {"poll_20ms": measure(url, str(root), options.n)},
            }
        finally:
            server.terminate()
            server.wait(30)
    if options.json:
        print(json.dumps(figures))
        return
    for name, row in {"socket": figures["socket"], **figures["baselines"]}.items():
        print(f"{name:10} from the call: {row['commit_us']} us; from its return: {row['notify_us']} us")


if __name__ == "__main__":
    main()
