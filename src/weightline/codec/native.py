"""The inner loops in C: built once a machine where a compiler is there, never required, the same bits as the
numba kernels.

The library is compiled at first use into the user's cache folder under a name that holds the source, the
compiler and the CPU, by a
temporary name and a rename, so that several processes may build at once. `WEIGHTLINE_NATIVE=0` turns it off;
`WEIGHTLINE_CACHE` moves
the folder.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy.typing as npt

from weightline.codec.dtypes import address_of as _at

Array = npt.NDArray[Any]
SOURCE = Path(__file__).with_name("native") / "codec.c"
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-w")
_ABI = 4
_BUILD_SECONDS = 120


def _compiler() -> str | None:
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        found = shutil.which(name) if name else None
        if found:
            return found
    return None


def _cpu() -> str:
    """What `-march=native` depends on: a home folder may be shared by machines with different CPUs."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def cache_folder() -> Path:
    """Folder of built libraries, for this user only."""
    named = os.environ.get("WEIGHTLINE_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weightline"


def _build(compiler: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = target.with_name(f"{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        subprocess.run(
            [compiler, *FLAGS, "-o", str(temporary), str(SOURCE)],
            check=True,
            capture_output=True,
            timeout=_BUILD_SECONDS,
        )
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


@functools.cache
def library() -> Any | None:
    """The loaded library; None where it is turned off, cannot be built or cannot be loaded (then numba does
    the work)."""
    if os.environ.get("WEIGHTLINE_NATIVE", "1") == "0":
        return None
    compiler = _compiler()
    try:
        source = SOURCE.read_bytes()
        key = hashlib.sha256(
            b"\0".join(
                (
                    source,
                    " ".join(FLAGS).encode(),
                    str(compiler).encode(),
                    _cpu().encode(),
                    platform.machine().encode(),
                )
            )
        ).hexdigest()[:24]
        target = cache_folder() / f"codec-{key}.so"
        if not target.is_file():
            if compiler is None:
                return None
            _build(compiler, target)
        if target.stat().st_uid not in (os.getuid(), 0):
            return None
        loaded = ctypes.CDLL(str(target))
        return loaded if loaded.wl_abi() == _ABI else None
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError):
        return None


@functools.cache
def _function(name: str, integers: int, arrays: str) -> Any:
    """A C function; `arrays` says per argument whether it is an address (p) or an integer (i)."""
    function = getattr(library(), name)
    function.restype = ctypes.c_int64 if integers else None
    function.argtypes = [ctypes.c_void_p if kind == "p" else ctypes.c_int64 for kind in arrays]
    return function


def digest_range(bits: Array, start: int, lanes: Array) -> None:
    _function(f"wl_digest_range_{bits.itemsize}", 0, "piip")(_at(bits), bits.size, start, _at(lanes))


def digest_at(index: Array, base: int, bits: Array, lanes: Array) -> None:
    _function(f"wl_digest_at_{bits.itemsize}", 0, "pipip")(_at(index), base, _at(bits), bits.size, _at(lanes))


def gather(source: Array, index: Array, out: Array) -> None:
    _function(f"wl_gather_{source.itemsize}", 0, "ppip")(_at(source), _at(index), index.size, _at(out))


def scatter(target: Array, index: Array, values: Array) -> None:
    _function(f"wl_scatter_{target.itemsize}", 0, "pppi")(_at(target), _at(index), _at(values), index.size)


def scan(rows: Array, pos: Array, was: Array, now: Array, lanes: Array) -> int:
    done: int = _function(f"wl_scan_{was.itemsize}", 1, "pipppip")(
        _at(rows), len(rows), _at(pos), _at(was), _at(now), pos.size, _at(lanes)
    )
    return done


def write(rows: Array, pos: Array, values: Array) -> None:
    _function(f"wl_write_{values.itemsize}", 0, "pipp")(_at(rows), len(rows), _at(pos), _at(values))


def cast(rows: Array, pos: Array, was: Array, now: Array, lanes: Array) -> int:
    done: int = _function("wl_cast", 1, "pipppip")(
        _at(rows), len(rows), _at(pos), _at(was), _at(now), pos.size, _at(lanes)
    )
    return done


def encode(
    rows: Array, pos: Array, was: Array, now: Array, kind: tuple[int, int, int], dense: bool,
    chunks: Array, classes: Array, out: Array, sizes: Array,
) -> int:  # fmt: skip
    done: int = _function(f"wl_encode_{was.itemsize}", 1, "pipppiiiippipip")(
        _at(rows), len(rows), _at(pos), _at(was), _at(now), *kind, int(dense),
        _at(chunks), _at(classes), len(classes), _at(out), out.nbytes, _at(sizes),
    )  # fmt: skip
    return done


def decode(
    rows: Array, chunks: Array, classes: Array, kind: tuple[int, int, int], write: bool, longest: int,
    pos: Array, was: Array, now: Array, lanes: Array,
) -> int:  # fmt: skip
    done: int = _function(f"wl_decode_{was.itemsize}", 1, "pippiiiiipppip")(
        _at(rows), len(rows), _at(chunks), _at(classes), *kind, int(write), longest,
        _at(pos), _at(was), _at(now), pos.size, _at(lanes),
    )  # fmt: skip
    return done
