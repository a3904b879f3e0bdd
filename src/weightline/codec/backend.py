"""The inner loops behind one door: cuts work into chunks and runs them on threads, whatever does the
arithmetic.

Temporary memory is bounded: CHUNK elements of scratch a thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from weightline.codec.dtypes import Bits

CHUNK = 1 << 20
"""Elements that one thread works on at a time."""
T = TypeVar("T")
R = TypeVar("R")
_local = threading.local()
_pool_lock = threading.Lock()
_pool: tuple[int, int, ThreadPoolExecutor] | None = None
_threads: int | None = None


def threads() -> int:
    """Threads the codec uses: `set_threads`, else WEIGHTLINE_CODEC_THREADS, else the CPUs this process may
    run on."""
    if _threads is not None:
        return _threads
    named = os.environ.get("WEIGHTLINE_CODEC_THREADS", "")
    if named.isdigit() and int(named) > 0:
        return int(named)
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1))


def set_threads(count: int | None) -> None:
    """Set how many threads the codec uses in this process; None: the default."""
    global _threads
    _threads = None if count is None else max(1, count)


def _executor(count: int) -> ThreadPoolExecutor:
    """The pool of this process (a forked child gets its own), rebuilt when the thread count changes."""
    global _pool
    with _pool_lock:
        if _pool is None or _pool[:2] != (os.getpid(), count):
            old, _pool = _pool, (os.getpid(), count, ThreadPoolExecutor(count, "weightline-codec"))
            if old is not None and old[0] == os.getpid():
                old[2].shutdown(wait=False)
        return _pool[2]


def map_ordered(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """`map` on the codec's threads, in order, with a bounded number of results in flight."""
    items = list(items)
    count = threads()
    if count == 1 or len(items) < 2 or getattr(_local, "inside", False):
        yield from map(work, items)
        return

    def run(item: T) -> R:
        _local.inside = True
        return work(item)

    pool = _executor(count)
    ahead = 2 * count
    pending = [pool.submit(run, item) for item in items[:ahead]]
    try:
        for position in range(len(items)):
            future = pending[position]
            yield future.result()
            pending[position] = None  # type: ignore[call-overload]
            if position + ahead < len(items):
                pending.append(pool.submit(run, items[position + ahead]))
    finally:
        for future in pending:
            if future is not None:
                future.cancel()
        # What still runs works on memory that the caller may touch or free next.
        wait([future for future in pending if future is not None])


def ranges(count: int, chunk: int = CHUNK) -> list[tuple[int, int]]:
    """`count` elements as [start, stop) chunks."""
    return [(start, min(start + chunk, count)) for start in range(0, count, chunk)]


def scratch(name: str, count: int, dtype: Any) -> npt.NDArray[Any]:
    """An array of this thread, grown when needed and used again; its content is what was left in it."""
    arrays = _local.__dict__.setdefault("arrays", {})
    held = arrays.get(name)
    if held is None or held.size < count or held.dtype != dtype:
        held = arrays[name] = np.empty(count, dtype)
    return np.asarray(held[:count])


def engine() -> Any:
    """What does the arithmetic: the C library where it could be built, else the numba kernels. They give the
    same bits."""
    from weightline.codec import native

    if native.library() is not None:
        return native
    from weightline.codec import kernels

    return kernels


def digest_range(bits: Bits, start: int) -> npt.NDArray[np.uint64]:
    """Lanes of the digest of contiguous elements from index `start` on."""
    kernels = engine()

    def part(piece: tuple[int, int]) -> npt.NDArray[np.uint64]:
        lanes = np.zeros(2, np.uint64)
        kernels.digest_range(bits[piece[0] : piece[1]], start + piece[0], lanes)
        return lanes

    if bits.size <= CHUNK:
        return part((0, bits.size))
    total = np.zeros(2, np.uint64)
    for lanes in map_ordered(part, ranges(bits.size)):
        total += lanes
    return total


def digest_at(index: npt.NDArray[np.int64], base: int, bits: Bits) -> npt.NDArray[np.uint64]:
    """Lanes of the digest of elements at base + index."""
    lanes = np.zeros(2, np.uint64)
    engine().digest_at(index, base, np.ascontiguousarray(bits), lanes)
    return lanes


def gather(source: Bits, index: npt.NDArray[np.int64]) -> Bits:
    """source[index]; the indexes must be in range."""
    out = np.empty(index.size, source.dtype)
    engine().gather(source, index, out)
    return out


def scatter(target: Bits, index: npt.NDArray[np.int64], values: Bits) -> None:
    """target[index] = values; the indexes must be in range."""
    engine().scatter(target, index, values)


def ascending(index: npt.NDArray[np.int64], size: int) -> bool:
    """Whether `index` is strictly ascending within [0, size)."""
    if index.size == 0:
        return True
    return bool(index[0] >= 0 and index[-1] < size and (index[1:] > index[:-1]).all())


def warm() -> float:
    """Build (or load) the C library and, where there is none, compile every numba kernel; returns the
    seconds it took."""
    import time

    from weightline.codec import native
    from weightline.codec.warming import exercise

    begin = time.perf_counter()
    if native.library() is None:
        exercise()
    return time.perf_counter() - begin
