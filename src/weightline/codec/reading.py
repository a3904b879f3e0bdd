"""Delta files of every level: writing and reading."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weightline.codec.coded import open_coded
from weightline.codec.container import Mapped
from weightline.codec.delta import LEVELS, Delta
from weightline.codec.layout import open_absolute, write_absolute
from weightline.codec.recoding import write_coded
from weightline.errors import FormatError, InvalidInput


def write_delta(
    delta: Delta, path: str | Path, *, level: str = "absolute", base: Mapping[str, Any] | None = None
) -> int:
    """Write a delta as one safetensors file (temporary name, fsync, rename); returns its bytes.

    "absolute": index and value, idempotent, what an engine takes. "fast" and "dense": several times smaller,
    told relative to the
    base; for these the delta was made by `diff(…, level=…)`, or `base` (the weights it is against) is
    passed. "fast" needs no base
    where the old bits are known (`diff`, `decoded`, an undo's inverse).

    Raises `InvalidInput` for a change that does not fit its tensor; nothing is left behind then.
    """
    if level not in LEVELS:
        raise InvalidInput(f"unknown level {level!r}", hint=f"use one of {', '.join(LEVELS)}")
    if level == "absolute":
        return write_absolute(delta, Path(path))
    return write_coded(delta, Path(path), level, base)


def read_delta(path: str | Path, *, verify: bool = True) -> Delta:
    """Map a delta file of any level. `verify` checks every byte of it; the structure is checked in any case.

    A "fast" or "dense" delta can be applied as it is; its changes are seen after `decoded(base)`.
    Raises `FormatError` (not a delta, cut short, inconsistent, from a newer format) or `IntegrityError`
    (bytes differ from their check).
    """
    mapped = Mapped(Path(path), verify=verify)
    if mapped.level == "absolute":
        return open_absolute(mapped, verify=verify)
    if mapped.level in LEVELS:
        return open_coded(mapped)
    raise FormatError(
        f"delta file {path}: unknown level {mapped.level!r}", hint="upgrade weightline to read newer files"
    )
