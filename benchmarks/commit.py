"""What a commit costs a trainer: how long it is blocked, beside a memcpy of the same weights in the same run.

    python benchmarks/commit.py [--model smollm2|tiny|FOLDER] [--repeats 7] [--lr 2e-6] [--dir DIR]

fp32 masters of a real model are committed as bf16 through `Committer` to an embedded store on disk, again and
again after an update as a real RL step makes it. One JSON document on stdout; times in milliseconds, medians
over the repeats with the smallest and the largest.

The update: each master moves by `lr` times a normal deviate (an Adam step has about the size of its learning
rate, whatever the gradient). Masters start spread evenly over the interval that rounds to their stored value,
as they are after some steps of training; straight from a bf16 file they would all lie in its middle, and the
first steps would change almost nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import weightline
from weightline.demo.models import resolve_model, stored_tensors
from weightline.demo.places import model_cache
from weightline.trainer import Committer


def load_masters(folder: Path, generator: torch.Generator) -> dict[str, torch.Tensor]:
    masters = {}
    for shard in sorted(set(stored_tensors(folder).values())):
        for name, stored in load_file(folder / shard).items():
            wide = stored.float()
            # One unit in the last place of a bf16 value v is 2^(exponent of v) / 128.
            unit = torch.exp2(torch.frexp(wide).exponent.float() - 8)
            masters[name] = wide + (torch.rand(wide.shape, generator=generator) - 0.5) * unit * 0.999
    return masters


def update(masters: dict[str, torch.Tensor], lr: float, generator: torch.Generator) -> None:
    for master in masters.values():
        master.add_(torch.randn(master.shape, generator=generator), alpha=lr)


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def copy_all(to: dict[str, torch.Tensor], of: dict[str, torch.Tensor]) -> None:
    for name, tensor in of.items():
        to[name].copy_(tensor)


def summary(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def measure(folder: Path, store: Path, repeats: int, lr: float) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    masters = load_masters(folder, generator)
    stored = {name: master.to(torch.bfloat16) for name, master in masters.items()}
    stored_copy = {name: torch.zeros_like(tensor) for name, tensor in stored.items()}
    masters_copy = {name: torch.zeros_like(tensor) for name, tensor in masters.items()}
    times: dict[str, list[float]] = {
        key: [] for key in ("blocked", "commit", "memcpy_stored", "memcpy_masters", "save_file")
    }
    with weightline.CheckpointEngine(store) as line:
        with Committer(line, masters, model_files=folder) as committer:
            committer.after_step(0, anchor=True)
            committer.flush()
            first = committer.timings[-1]
            for step in range(1, repeats + 1):
                update(masters, lr, generator)
                times["memcpy_stored"].append(timed(lambda: copy_all(stored_copy, stored)))
                times["memcpy_masters"].append(timed(lambda: copy_all(masters_copy, masters)))
                committer.after_step(step)
                times["blocked"].append(committer.blocked_s * 1e3)
                committer.flush()
                times["commit"].append(committer.timings[-1].commit_s * 1e3)
                copy_all(stored, masters)
                times["save_file"].append(timed(lambda: save_file(stored, store.parent / "full.safetensors")))
            exact = all(
                torch.equal(line.load(repeats + 1, like="torch")[name].view(torch.int16), t.view(torch.int16))
                for name, t in stored.items()
            )
        records = line.versions()
    deltas = records[1:]
    blocked, memcpy = statistics.median(times["blocked"]), statistics.median(times["memcpy_masters"])
    return {
        "model": folder.name,
        "tensors": len(masters),
        "elements": records[0].elements,
        "repeats": repeats,
        "lr": lr,
        "threads": torch.get_num_threads(),
        "exact": exact,
        "masters_nbytes": sum(t.nbytes for t in masters.values()),
        "stored_nbytes": records[0].raw_nbytes,
        "blocked_ms": summary(times["blocked"]),
        "commit_ms": summary(times["commit"]),
        "anchor": {
            "blocked_ms": round(first.blocked_s * 1e3, 3),
            "commit_ms": round(first.commit_s * 1e3, 3),
        },
        "baselines": {
            "memcpy_masters_ms": summary(times["memcpy_masters"]),
            "memcpy_stored_ms": summary(times["memcpy_stored"]),
            "save_file_ms": summary(times["save_file"]),
        },
        "blocked_x_memcpy_masters": round(blocked / memcpy, 3),
        "blocked_x_memcpy_stored": round(blocked / statistics.median(times["memcpy_stored"]), 3),
        "changed_fraction": [round(r.changed / r.elements, 5) for r in deltas],
        "delta_nbytes": [r.nbytes for r in deltas],
        "ratio": round(sum(r.raw_nbytes for r in deltas) / sum(r.nbytes for r in deltas), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--lr", type=float, default=2e-6)
    parser.add_argument("--dir", type=Path, help="where the store is made (default: a temporary folder)")
    options = parser.parse_args()
    folder = resolve_model(options.model, model_cache())
    with tempfile.TemporaryDirectory(dir=options.dir) as scratch:
        print(json.dumps(measure(folder, Path(scratch) / "store", options.repeats, options.lr), indent=2))


if __name__ == "__main__":
    main()
