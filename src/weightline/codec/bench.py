"""`bench codec`: bytes and speed of both levels on two versions, beside a memcpy, the bounds and what others
ship, in one run.

Times are thread CPU time of one thread, best of several, so that a busy machine and slow fsyncs distort them
least.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from weightline.codec import backend, digest
from weightline.codec.diffing import diff, require_same
from weightline.codec.dtypes import Bits, count_of, from_bits
from weightline.codec.entropy import Meter
from weightline.codec.reading import read_delta, write_delta
from weightline.codec.weightfiles import Located, Reader, locate
from weightline.types import TensorSpec

TILED_BYTES = 256 << 20
"""Smaller inputs are repeated up to this size for timing: a memcpy of 14 MB and one of 256 MB differ by
half."""
_ROUNDS = 5


def _best(work: Callable[[], Any], rounds: int = _ROUNDS) -> float:
    """Least thread CPU seconds of several runs."""
    least = float("inf")
    for _ in range(rounds):
        gc.collect()
        begin = time.thread_time()
        work()
        least = min(least, time.thread_time() - begin)
    return least


def load(tensors: dict[str, Located]) -> dict[str, Bits]:
    with Reader(tensors) as reader:
        return {name: reader.read(name, 0, count_of(located.spec)) for name, located in tensors.items()}


def tile(bits: dict[str, Bits], specs: dict[str, TensorSpec], times: int) -> dict[str, Any]:
    """The same tensors under several names, each with memory of its own."""
    return {
        f"{copy}.{name}": from_bits(b.copy(), specs[name])
        for copy in range(times)
        for name, b in bits.items()
    }


def _memcpy(weights: dict[str, Any]) -> float:
    """Seconds to copy all weights in one piece."""
    source = np.concatenate([np.asarray(array).reshape(-1).view(np.uint8) for array in weights.values()])
    target = np.empty_like(source)
    target[:] = 0
    return _best(lambda: np.copyto(target, source), 2 * _ROUNDS)


def _level(
    level: str, small: tuple[dict[str, Any], dict[str, Any]], large: tuple[dict[str, Any], dict[str, Any]],
    folder: Path, memcpy: float, raw: int, large_raw: int,
) -> tuple[dict[str, Any], bool]:  # fmt: skip
    path = folder / level
    nbytes = write_delta(diff(*small, level=level), path, level=level)
    exact = _exact(path, *small)
    digests = {name: digest.digest_of(_bits(array)) for name, array in large[0].items()}
    encode = _best(lambda: write_delta(diff(*large, old_digests=digests, level=level), path, level=level))
    exact = exact and _exact(path, *large)
    target = {name: array.copy() for name, array in large[0].items()}
    least = float("inf")
    for _ in range(_ROUNDS):
        gc.collect()
        begin = time.thread_time()
        undo = read_delta(path).apply_(target, digests=digests)
        least = min(least, time.thread_time() - begin)
        undo.restore()
        del undo  # or the next round pays for its memory
    return {
        "bytes": nbytes,
        "ratio": raw / nbytes,
        "encode_x_memcpy": memcpy / encode,
        "decode_x_memcpy": memcpy / least,
        "encode_GBps": large_raw / encode / 1e9,
        "decode_GBps": large_raw / least / 1e9,
    }, exact


def _bits(array: Any) -> Bits:
    flat = np.asarray(array).reshape(-1)
    out: Bits = flat.view(np.dtype(f"u{flat.dtype.itemsize}"))
    return out


def _exact(path: Path, old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether the file makes the new bits of the old ones, and its undo the old ones again."""
    target = {name: array.copy() for name, array in old.items()}
    undo = read_delta(path).apply_(target)
    right = all(np.array_equal(_bits(target[name]), _bits(new[name])) for name in new)
    undo.restore()
    return right and all(np.array_equal(_bits(target[name]), _bits(old[name])) for name in old)


def _index_value(old: dict[str, Any], new: dict[str, Any]) -> bytes:
    """int32 index and new value of each change: what most stacks ship."""
    parts = []
    for name in old:
        a, b = _bits(old[name]), _bits(new[name])
        at = np.flatnonzero(a != b)
        parts += [at.astype(np.int32).tobytes(), b[at].tobytes()]
    return b"".join(parts)


def _xor(old: dict[str, Any], new: dict[str, Any]) -> bytes:
    return b"".join((_bits(old[name]) ^ _bits(new[name])).tobytes() for name in old)


def _baselines(
    small: tuple[dict[str, Any], dict[str, Any]], large: tuple[dict[str, Any], dict[str, Any]], memcpy: float
) -> dict[str, Any]:
    plain: dict[str, Callable[[dict[str, Any], dict[str, Any]], bytes]] = {"index+value": _index_value}
    missing = {}
    try:
        import zstandard
    except ImportError:
        why = "zstandard is not installed: pip install zstandard"
        missing = {
            n: {"bytes": None, "encode_x_memcpy": None, "why": why}
            for n in ("index+value+zstd", "XOR+zstd-1")
        }
    else:
        squeeze = zstandard.ZstdCompressor(level=1).compress
        plain["index+value+zstd"] = lambda old, new: squeeze(_index_value(old, new))
        plain["XOR+zstd-1"] = lambda old, new: squeeze(_xor(old, new))
    found: dict[str, Any] = {}
    for name, work in plain.items():
        seconds = _best(lambda work=work: work(*large), 2)  # type: ignore[misc]
        found[name] = {"bytes": len(work(*small)), "encode_x_memcpy": memcpy / seconds}
    return found | missing


def bench_codec(old: str | Path, new: str | Path) -> dict[str, Any]:
    """Measure the codec on two safetensors files or Hugging Face folders with the same tensors; the JSON of
    `weightline bench codec`.

    Loads both (twice, where they are smaller than 256 MB, tiled up to that size for timing). Encode is
    compare, encode, checks and
    file; decode is read, check, decode and apply with undo. Raises `InvalidInput` or `FormatError`.
    """
    before, after = locate(Path(old)), locate(Path(new))
    specs = {name: located.spec for name, located in before.items()}
    require_same(specs, {name: located.spec for name, located in after.items()})
    a, b = load(before), load(after)
    meter = Meter()
    for name, spec in specs.items():
        meter.add(spec.dtype, a[name], b[name])
    bounds = meter.bounds()
    times = max(1, -(-TILED_BYTES // max(1, bounds.raw_bytes)))
    small = tile(a, specs, 1), tile(b, specs, 1)
    large = small if times == 1 else (tile(a, specs, times), tile(b, specs, times))
    first = backend.warm()
    try:
        backend.set_threads(1)
        memcpy = _memcpy(large[0])
        levels, exact = {}, True
        with tempfile.TemporaryDirectory() as folder:
            for level in ("fast", "dense"):
                levels[level], right = _level(
                    level, small, large, Path(folder), memcpy, bounds.raw_bytes, bounds.raw_bytes * times
                )
                exact = exact and right
        flat = {name: _bits(array) for name, array in large[0].items()}
        full_digest = _best(lambda: [digest.digest_of(bits) for bits in flat.values()], 3)
        baselines = _baselines(small, large, memcpy)
    finally:
        backend.set_threads(None)
    return {
        "elements": bounds.elements,
        "changed": bounds.changed,
        "density": bounds.changed / max(1, bounds.elements),
        "raw_bytes": bounds.raw_bytes,
        "order0_bound_bytes": bounds.order0_bytes,
        "exponent_bound_bytes": bounds.exponent_bytes,
        "memcpy_GBps": bounds.raw_bytes * times / memcpy / 1e9,
        "digest_GBps": bounds.raw_bytes * times / full_digest / 1e9,
        "exact": exact,
        "levels": levels,
        "baselines": baselines,
        "engine": backend.engine().__name__.rsplit(".", 1)[-1],
        "warm_seconds": first,
        "tiled": times,
        "threads": 1,
        "clock": "thread CPU, best of several",
    }
