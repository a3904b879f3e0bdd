"""Tensors in full, one copy on a host: what engines are handed that take no changes.

Each tensor is one file named by its digest, in a folder that all followers of a host share (below the same
runtime folder). A file appears by a rename and is never written again, so any number of engines may map it;
its digest is recomputed whenever it is handed out, so a file that a crash damaged is made anew. Every
follower keeps a list of the files it needs: those of the version that its engine serves and of the one
before. What is on no list is removed. Nothing here must survive: it can all be made again from the store.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from weightline.errors import IntegrityError, StorageFull
from weightline.rollout.engines.base import WholeTensor

if TYPE_CHECKING:
    from weightline.codec import Delta
    from weightline.service.line import Line
    from weightline.store import Manifest
    from weightline.store.manifest import TensorEntry

FOLDER = "tensors"
LIST = "tensors.json"
"""In a follower's own folder: the files that it needs."""


class HostTensors:
    """The shared folder, as one follower uses it. `own` is the follower's folder, beside the others."""

    def __init__(self, own: Path) -> None:
        self.own, self.folder = own, own.parent / FOLDER

    def whole(
        self,
        line: Line,
        manifest: Manifest,
        names: Sequence[str],
        mapping: Mapping[str, str],
        *,
        base: Manifest | None = None,
        delta: Delta | None = None,
    ) -> tuple[WholeTensor, ...]:
        """Files of `names` at `manifest`'s version and, with `base`, at that one; under the engine's names.

        Raises `IntegrityError`, `VersionGone`, `StorageFull`.

        `delta` leads from `base` to `manifest` and saves the load of the whole version. Takes as much memory
        as the version has when neither helps.
        """
        if not names:
            return ()
        new = _entries(manifest, names)
        old = _entries(base, names) if base is not None else {}
        try:
            with self._locked():
                self._need([*new.values(), *old.values()])
                self._provide(line, base, old, {}, None)
                self._provide(line, manifest, new, old, delta)
                self._sweep()
        except OSError as error:
            raise StorageFull(
                f"{self.folder}: {error.strerror or error}", hint="free space, or give another --runtime-dir"
            ) from None
        return tuple(
            WholeTensor(
                name=mapping[name],
                dtype=entry.spec.dtype,
                shape=entry.spec.shape,
                digest=entry.digest,
                path=str(self._path(entry)),
                old_path=str(self._path(old[name])) if name in old else None,
                old_digest=old[name].digest if name in old else None,
            )
            for name, entry in new.items()
        )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One follower makes or removes files at a time: what one makes, the next one finds."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _path(self, entry: TensorEntry) -> Path:
        return self.folder / f"{entry.digest}.{entry.spec.dtype.lower()}"

    def _need(self, entries: Sequence[TensorEntry]) -> None:
        draft = self.own / f".{LIST}"
        draft.write_bytes(msgspec.json.encode(sorted({self._path(entry).name for entry in entries})))
        draft.rename(self.own / LIST)

    def _sweep(self) -> None:
        needed: set[str] = set()
        for path in self.folder.parent.glob(f"follow-*/{LIST}"):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                needed |= msgspec.json.decode(path.read_bytes(), type=set[str])
        for path in self.folder.iterdir():
            if path.name != ".lock" and path.name not in needed:
                path.unlink(missing_ok=True)

    def _provide(
        self,
        line: Line,
        manifest: Manifest | None,
        entries: Mapping[str, TensorEntry],
        old: Mapping[str, TensorEntry],
        delta: Delta | None,
    ) -> None:
        from weightline.codec import bits_of
        from weightline.store.reading import HELD_NBYTES

        missing = [name for name, entry in entries.items() if not self._there(entry)]
        for name in list(missing):
            if delta is not None and name in old and name in delta.changed:
                self._write(entries[name], _changed(self._read(old[name]), delta, name))
                missing.remove(name)
        if missing and manifest is not None and manifest.version is not None:
            weights = line.load(manifest.version, held=manifest.raw_nbytes <= HELD_NBYTES)
            for name in missing:
                self._write(entries[name], bits_of(weights[name]))

    def _there(self, entry: TensorEntry) -> bool:
        from weightline.codec import digest_of

        try:
            return digest_of(self._read(entry)) == entry.digest
        except (OSError, ValueError):
            return False

    def _read(self, entry: TensorEntry) -> Any:
        import numpy as np

        from weightline.codec.dtypes import bits_dtype, nbytes_of

        path, kind, nbytes = self._path(entry), bits_dtype(entry.spec.dtype), nbytes_of(entry.spec)
        if path.stat().st_size != nbytes:
            raise ValueError(f"{path}: not {nbytes} bytes")
        return np.memmap(path, kind, mode="r") if nbytes else np.empty(0, kind)

    def _write(self, entry: TensorEntry, bits: Any) -> None:
        from weightline.codec import digest_of

        if digest_of(bits) != entry.digest:
            raise IntegrityError(
                f"{entry.spec.name}: its bytes are not those that the manifest promises",
                hint="run `weightline verify --deep`",
            )
        draft = self.folder / f".{entry.digest}.{os.getpid()}"
        with draft.open("wb") as file:
            file.write(bits.data)
        draft.rename(self._path(entry))


def _entries(manifest: Manifest, names: Sequence[str]) -> dict[str, TensorEntry]:
    wanted = set(names)
    return {entry.spec.name: entry for entry in manifest.tensors if entry.spec.name in wanted}


def _changed(old: Any, delta: Delta, name: str) -> Any:
    import numpy as np

    change = delta.change(name)
    if change.index is None:
        return np.ascontiguousarray(change.bits)
    new = np.array(old)
    new[change.index] = change.bits
    return new
