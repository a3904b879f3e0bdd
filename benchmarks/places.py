"""Commit and fetch in a folder, on a mirror of two folders and on S3, in one run, as ratios to the folder.

S3 is a real server process on loopback (moto's): what is compared is the number of requests and what each
costs here, not what a network adds. Give another with `--endpoint` (and AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY); it needs a container `wl-test`. Figures are the least of `--repeats`, in milliseconds.

    python benchmarks/places.py --megabytes 8 --repeats 10
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import uuid
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from s3_world import CONTAINER, FaultProxy, moto
from weightline.store import Store


def policy(nbytes: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {f"layer.{n}": rng.integers(0, 1 << 16, nbytes // 16, np.uint16) for n in range(8)}


def moved(weights: dict[str, np.ndarray], version: int) -> None:
    """A hundredth of the elements changes by one unit."""
    rng = np.random.default_rng(version)
    for array in weights.values():
        array[rng.integers(0, array.size, array.size // 100)] ^= 1


def measured(url: str, other: str, nbytes: int, repeats: int, proxy: FaultProxy | None) -> dict[str, Any]:
    """Seconds of a commit and of a fetch by another host, and the requests of the last of each."""
    weights = policy(nbytes)
    store = Store.open(url, create=True)
    writer = store.writer()
    writer.commit(weights)
    reader = Store.open(other)
    reader.load(1)
    commits, fetches, requests = [], [], {}
    for version in range(2, repeats + 2):
        moved(weights, version)
        if proxy is not None:
            proxy.calm()
        begin = time.perf_counter()
        writer.commit(weights)
        commits.append(time.perf_counter() - begin)
        if proxy is not None:
            requests["commit_requests"] = len(proxy.seen)
            proxy.calm()
        begin = time.perf_counter()
        reader.refresh()
        reader.fetch_delta(version)
        fetches.append(time.perf_counter() - begin)
        if proxy is not None:
            requests["fetch_requests"] = len(proxy.seen)
    assert all(np.array_equal(a, weights[n]) for n, a in Store.open(other).load(repeats + 1).items())
    return {"commit_ms": min(commits) * 1e3, "fetch_ms": min(fetches) * 1e3, **requests}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=8, help="of weights (bf16)")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--endpoint", help="of an S3 server; default: moto's, started here")
    options = parser.parse_args()
    if options.endpoint is None:
        os.environ["AWS_ACCESS_KEY_ID"] = os.environ["AWS_SECRET_ACCESS_KEY"] = "test"
    nbytes = options.megabytes << 20
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        server = nullcontext(options.endpoint) if options.endpoint else moto(root / "moto.log")
        with server as endpoint:
            proxy = FaultProxy(endpoint)
            s3 = f"s3://{CONTAINER}/{uuid.uuid4().hex}?endpoint={proxy.endpoint}&cache={root}"
            mirror = f"mirror:{root / 'a'},{root / 'b'}?cache={root / 'host'}"
            try:
                figures = {
                    "folder": measured(
                        str(root / "plain"), str(root / "plain"), nbytes, options.repeats, None
                    ),
                    "mirror": measured(mirror, mirror, nbytes, options.repeats, None),
                    "s3": measured(f"{s3}/one", f"{s3}/two", nbytes, options.repeats, proxy),
                }
            finally:
                proxy.close()
    for name in ("mirror", "s3"):
        for what in ("commit", "fetch"):
            figures[name][f"{what}_x_folder"] = figures[name][f"{what}_ms"] / figures["folder"][f"{what}_ms"]
    rounded = {
        place: {key: round(value, 2) for key, value in found.items()} for place, found in figures.items()
    }
    print(json.dumps({"megabytes": options.megabytes, "repeats": options.repeats, **rounded}, indent=2))


if __name__ == "__main__":
    main()
