"""Checkout: a version as a plain Hugging Face folder, bit-exact."""

from __future__ import annotations

import uuid
from pathlib import Path

from weightline.codec import bits_of, specs_of
from weightline.core.ledger import LedgerState
from weightline.core.plan import chain
from weightline.errors import InvalidInput
from weightline.store.checkpoint import copy_model_files, write_anchor
from weightline.store.disk import Disk, typed
from weightline.store.reading import Reading


def model_files_of(reading: Reading, state: LedgerState, version: int) -> list[Path]:
    """Verified config and tokenizer files that go with a version: the newest that were given on its chain."""
    for link in reversed(chain(state, version)):
        blobs = reading.stored(link).named("model_file")
        if blobs:
            return [reading.blob_path(link, blob) for blob in blobs]
    return []


def checkout(
    reading: Reading, state: LedgerState, disk: Disk, version: int, out: Path, shard_nbytes: int
) -> None:
    """Write `version` to the new folder `out`: whole, or not at all.

    Raises `InvalidInput` when `out` exists or its parent does not, `StorageFull`, `VersionGone`,
    `IntegrityError`.
    """
    out = out.absolute()
    if out.exists() or out.is_symlink():
        raise InvalidInput(f"{out} exists already", hint="name a folder that is not there yet")
    if not out.parent.is_dir():
        raise InvalidInput(f"there is no folder {out.parent}", hint="create it first")
    draft = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    try:
        with typed(str(out)):
            draft.mkdir()
            _fill(reading, state, disk, version, draft, shard_nbytes)
            disk.fsync_folder(draft)
            disk.on_step(f"rename {out.name}")
            draft.rename(out)
            disk.fsync_folder(out.parent)
    finally:
        disk.remove_tree(draft)


def _fill(
    reading: Reading, state: LedgerState, disk: Disk, version: int, folder: Path, shard_nbytes: int
) -> None:
    for _ in copy_model_files(disk, model_files_of(reading, state, version), folder):
        pass
    manifest = reading.stored(version)
    if state.holds_anchor(version):
        anchor = [*manifest.named("anchor"), *manifest.named("index")]
        for blob in anchor:
            disk.copy_new(reading.blob_path(version, blob), folder / blob.name)
        return
    weights = reading.load(version)
    specs = list(specs_of(weights).values())
    write_anchor(disk, folder, specs, lambda name: bits_of(weights[name]), shard_nbytes=shard_nbytes)
