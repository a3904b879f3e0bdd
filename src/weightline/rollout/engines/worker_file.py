"""Turns changes into the plain file that the plugin maps (`plugins/exchange.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from weightline.errors import RefitError, StorageFull
from weightline.plugins.exchange import Change, write_refit
from weightline.rollout.engines.base import Refit

if TYPE_CHECKING:
    from weightline.codec import Delta


def write_changes(delta: Delta, path: Path, digests: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Write the changes of `delta` as absolute values; returns size in bytes and SHA-256 of the file.

    `digests`: what the tensors must have afterwards; default: what `delta` says. Raises `OSError`.
    """
    changes = []
    for change in delta.changes():
        spec = change.spec
        index = None if change.index is None else np.asarray(change.index, np.int64)
        digest = (digests or {}).get(spec.name, change.digest)
        changes.append(Change(spec.name, spec.dtype, spec.shape, digest, index, change.bits))
    return write_refit(path, changes)


def worker_file(refit: Refit, path: Path) -> str:
    """Decode the delta file `refit.file` and write it to `path`; returns the SHA-256 of what was written.

    Raises `RefitError("old")` for a delta that needs its base, `StorageFull`, and what reading the delta
    raises.
    """
    from weightline.codec import read_delta

    delta = read_delta(refit.file, verify=False)  # the follower compared its bytes with the manifest
    if delta.level != "absolute":
        raise RefitError(
            f"{refit.file}: level {delta.level} needs its base",
            engine_state="old",
            hint="hand over absolute values",
        )
    try:
        return write_changes(delta, path, refit.digests)[1]
    except OSError as error:
        raise StorageFull(
            f"{path}: {error.strerror or error}", hint="free space in the runtime folder"
        ) from None
