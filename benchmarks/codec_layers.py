"""Bytes of both levels beside the bounds, part by part. usage: codec_layers.py OLD NEW [--layers 2]

Cuts a step (two safetensors files or Hugging Face folders, as `codec_steps.py` makes them) into groups of
layers and the rest, and prints JSON: for each group its density, and the file of each level, whole and less
the 4 KB that a file is allowed for header, names and digests, as multiples of the order-0 bound (fast) and of
the exponent bound (dense). Every file is applied and compared first. Exits 1 when one is above 1.03 or 1.06.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from weightline import codec
from weightline.codec import bench
from weightline.codec.entropy import Meter
from weightline.codec.weightfiles import locate

ALLOWANCE = 4096
"""Bytes of a file that the bounds do not count."""
GOALS = {"fast": 1.03, "dense": 1.06}


def group_of(name: str, layers: int) -> str:
    """The group that a tensor belongs to."""
    found = re.search(r"layers\.(\d+)\.", name)
    if found is None:
        return "rest"
    first = int(found[1]) // layers * layers
    return f"layers {first}-{first + layers - 1}"


def measure(old: dict[str, Any], new: dict[str, Any], specs: dict[str, Any], path: Path) -> dict[str, Any]:
    """One group of tensors, given their bits. Raises `SystemExit` when a file does not make the new bits."""
    meter = Meter()
    for name, spec in specs.items():
        meter.add(spec.dtype, old[name], new[name])
    bounds = meter.bounds()
    before = {name: codec.from_bits(old[name], spec) for name, spec in specs.items()}
    after = {name: codec.from_bits(new[name], spec) for name, spec in specs.items()}
    row: dict[str, Any] = {"elements": bounds.elements, "density": bounds.changed / bounds.elements}
    for level, bound in (("fast", bounds.order0_bytes), ("dense", bounds.exponent_bytes)):
        nbytes = codec.write_delta(codec.diff(before, after, level=level), path, level=level)
        target = {name: array.copy() for name, array in before.items()}
        codec.read_delta(path).apply_(target)
        if not all(np.array_equal(codec.bits_of(target[name]), new[name]) for name in new):
            raise SystemExit(f"level {level} does not make the new bits")
        row[level] = {
            "bytes": nbytes,
            "whole": nbytes / bound,
            "less_allowance": (nbytes - ALLOWANCE) / bound,
        }
    return row


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    asked = parser.parse_args()
    found = locate(asked.old)
    old, new = bench.load(found), bench.load(locate(asked.new))
    groups: dict[str, list[str]] = {}
    for name in found:
        groups.setdefault(group_of(name, asked.layers), []).append(name)
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for group, names in groups.items():
            specs = {name: found[name].spec for name in names}
            parts = ({name: bits[name] for name in names} for bits in (old, new))
            rows[group] = measure(*parts, specs, Path(folder) / "delta")
    worst = {level: max(row[level]["less_allowance"] for row in rows.values()) for level in GOALS}
    print(json.dumps({"worst": worst, "groups": rows}, indent=2))
    return int(any(worst[level] > goal for level, goal in GOALS.items()))


if __name__ == "__main__":
    sys.exit(main())
