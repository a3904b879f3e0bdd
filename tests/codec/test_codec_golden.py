"""Files of format version 1 that were written once: they must be read for ever, and what is coded must not
drift.

Written by `python tests/codec/test_codec_golden.py`; never write them again for version 1.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from weightline import codec
from weightline.codec import container, tables
from weightline.types import TensorSpec

GOLDEN = Path(__file__).parent / "golden"
LEVELS = ("absolute", "fast", "dense")
PLAN = (
    ("bf16.weight", "BF16", (40, 50)),
    ("f16", "F16", (300,)),
    ("f32", "F32", (17, 3)),
    ("f64", "F64", (9,)),
    ("fp8", "F8_E4M3", (512,)),
    ("fp8.wide", "F8_E5M2", (100,)),
    ("codes", "U8", (64, 4)),
    ("flags", "BOOL", (40,)),
    ("long", "I64", (11,)),
    ("complex", "C64", (6,)),
    ("scalar", "BF16", ()),
    ("empty", "F32", (0,)),
    ("frozen", "I32", (8,)),
)


def stream(name: str, count: int) -> np.ndarray:
    """Bytes that no library version changes: SHA-256 in counter mode."""
    blocks = (hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(count // 32 + 1))
    return np.frombuffer(b"".join(blocks)[:count], np.uint8)


def versions():
    """Two versions: values with a spread of exponents; every 7th to 30th element moved by 1 to 4 units, some
    to random bits."""
    old, new = {}, {}
    for name, dtype, shape in PLAN:
        count, width = int(np.prod(shape, dtype=int)), codec.width_of(dtype)
        bits = stream(name, count * width).view(codec.bits_dtype(dtype)).copy()
        if dtype == "BOOL":
            bits &= 1
        moved = bits.copy()
        if name != "frozen":
            steps = stream(name + " steps", count).astype(np.int64)
            at = np.flatnonzero(steps < (9 if dtype == "BF16" else 40))
            moved[at] = bits[at] ^ 1 if dtype == "BOOL" else bits[at] + (steps[at] % 4 + 1).astype(bits.dtype)
            if dtype == "F16":
                moved[at[:3]] = stream("jump", 6).view(np.uint16)
        old[name] = codec.from_bits(bits, TensorSpec(name, dtype, shape))
        new[name] = codec.from_bits(moved, TensorSpec(name, dtype, shape))
    return old, new


def delta_of(level):
    old, new = versions()
    return codec.diff(old, new, level=level).numbered(41, 42)


def plain(path, level):
    """What a file says, without the deflate around it, whose bytes may differ between zlib versions."""
    mapped = container.Mapped(path, verify=True)
    streams = {name: mapped.stream(name).tobytes() for name in ("whole", "positions", "values", "coded")}
    columns = []
    if level != "absolute":
        columns = [
            c.tolist() for c in tables.bytes_to_columns(mapped.stream("tables").tobytes(), 11, "golden")
        ]
    return streams, mapped.index, columns


@pytest.mark.parametrize("level", LEVELS)
def test_a_file_of_format_1_is_read(level):
    old, new = versions()
    delta = codec.read_delta(GOLDEN / f"{level}.safetensors")
    assert (delta.base, delta.version, delta.level) == (41, 42, level)
    assert "frozen" not in delta.changed
    delta.apply_(old)
    assert all(np.array_equal(codec.bits_of(old[name]), codec.bits_of(new[name])) for name in new)


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_written_has_not_drifted(level, tmp_path):
    codec.write_delta(delta_of(level), tmp_path / "d", level=level)
    assert plain(tmp_path / "d", level) == plain(GOLDEN / f"{level}.safetensors", level)


def test_digests_of_format_1_have_not_drifted():
    _, new = versions()
    found = {name: codec.digest_of(codec.bits_of(array)) for name, array in new.items()}
    expected = dict(line.split() for line in (GOLDEN / "digests.txt").read_text().splitlines())
    assert found == expected


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for level in LEVELS:
        codec.write_delta(delta_of(level), GOLDEN / f"{level}.safetensors", level=level)
    digests = {name: codec.digest_of(codec.bits_of(array)) for name, array in versions()[1].items()}
    (GOLDEN / "digests.txt").write_text("".join(f"{name} {value}\n" for name, value in digests.items()))
