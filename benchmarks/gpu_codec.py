"""The codec's torch face on a GPU: correctness and time, in a few minutes. usage: python
benchmarks/gpu_codec.py [--device cuda]

Not run on a GPU so far: the project had none at hand. `--device cpu` runs the same steps anywhere (slowly).
Prints one JSON document:
for each density the time of compare + compaction + transfer of the changes, of the digest, and of apply with
undo, beside a
device-to-device copy of the same tensor, and whether every result equals that of the host.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

from weightline import codec
from weightline.codec import device


def timed(work: Any, where: str, rounds: int = 5) -> tuple[float, Any]:
    """Least seconds of several runs, and the last result."""
    least, result = float("inf"), None
    for _ in range(rounds):
        if where.startswith("cuda"):
            torch.cuda.synchronize()
        begin = time.perf_counter()
        result = work()
        if where.startswith("cuda"):
            torch.cuda.synchronize()
        least = min(least, time.perf_counter() - begin)
    return least, result


def step(old: Any, density: float) -> Any:
    """A copy whose bits move by one unit at about `density` of the elements."""
    moved = torch.rand(old.shape, device=old.device) < density
    return (old.view(torch.int16) + moved.to(torch.int16)).view(torch.bfloat16)


def measure(elements: int, density: float, where: str) -> dict[str, Any]:
    """One density."""
    torch.manual_seed(0)
    old = (torch.randn(elements, device=where) * 0.05).to(torch.bfloat16)
    new = step(old, density)
    copy, _ = timed(old.clone, where)
    digest_time, digest = timed(lambda: device.digest_of(old), where, 3)
    base = {"w": digest}
    before = torch.cuda.max_memory_allocated() if where.startswith("cuda") else 0
    diff_time, delta = timed(lambda: device.diff({"w": old}, {"w": new}, old_digests=base), where)
    extra = torch.cuda.max_memory_allocated() - before if where.startswith("cuda") else None
    target = old.clone()
    apply_time, undo = timed(lambda: device.apply_(delta, {"w": target}, digests=base), where, 1)
    host_old, host_new = {"w": old.cpu()}, {"w": new.cpu()}
    host = codec.diff(host_old, host_new)
    exact = (
        torch.equal(target.view(torch.int16), new.view(torch.int16))
        and digest == codec.digest_of(codec.bits_of(host_old["w"]))
        and delta.change("w").digest
        == host.change("w").digest
        == codec.digest_of(codec.bits_of(host_new["w"]))
    )
    undo.restore()
    exact = exact and torch.equal(target.view(torch.int16), old.view(torch.int16))
    gigabytes = elements * 2 / 1e9
    return {
        "density": delta.elements / elements,
        "exact": bool(exact),
        "copy_GBps": gigabytes / copy,
        "diff_GBps": gigabytes / diff_time,
        "digest_GBps": gigabytes / digest_time,
        "apply_ms": apply_time * 1e3,
        "extra_device_bytes": extra,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--elements", type=int, default=1 << 28)
    options = parser.parse_args()
    rows = [measure(options.elements, density, options.device) for density in (1e-6, 0.002, 0.016, 0.1)]
    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu"
    print(json.dumps({"device": name, "elements": options.elements, "steps": rows}, indent=2))


if __name__ == "__main__":
    main()
