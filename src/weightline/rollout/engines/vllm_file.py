"""Turns a refit of the follower into the plain file that the plugin maps (`plugins/exchange.py`)."""

from __future__ import annotations

from pathlib import Path

from weightline.errors import RefitError, StorageFull
from weightline.plugins.exchange import Change, write_refit
from weightline.rollout.engines.base import Refit


def worker_file(refit: Refit, path: Path) -> str:
    """Decode `refit.file` to absolute values and write them to `path`; returns the SHA-256 of the file.

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
    changes = []
    whole = {tensor.name for tensor in refit.whole}
    for change in delta.changes():
        spec = change.spec
        if spec.name in whole:
            continue
        digest = refit.digests.get(spec.name, change.digest)
        changes.append(Change(spec.name, spec.dtype, spec.shape, digest, change.index, change.bits))
    try:
        _, sha256 = write_refit(path, changes)
    except OSError as error:
        raise StorageFull(
            f"{path}: {error.strerror or error}", hint="free space in the runtime folder"
        ) from None
    return sha256
