"""Writing one version folder: blobs, attachments, model files, manifest, all durable before anybody may name
it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from weightline import codec
from weightline.codec import Delta
from weightline.codec.dtypes import Bits
from weightline.core.plan import anchor_due
from weightline.core.request import CommitRequest
from weightline.errors import IntegrityError, InvalidInput, Unavailable, VersionGone
from weightline.store import checkpoint, manifest, staging
from weightline.store import owner as owners
from weightline.store.collect import anchor_wanted
from weightline.store.disk import sha256_of, typed
from weightline.store.head_watch import Kept, kept
from weightline.store.manifest import ATTACHMENTS, DELTA, MANIFEST, Blob, Manifest, TensorEntry
from weightline.store.offer import Options, arrays, raw_size
from weightline.store.reading import remember
from weightline.store.records import recoverable
from weightline.types import TensorSpec

if TYPE_CHECKING:
    from weightline.store.store import Store


class Pieces:
    """The weights of one version, as a delta on the head or on their own."""

    def __init__(
        self,
        table: dict[str, TensorEntry],
        bits: Callable[[str], Bits],
        changed: int,
        delta: Delta | None = None,
        before: Mapping[str, Any] | None = None,
    ) -> None:
        self.table = table
        """Every tensor of the version."""
        self.bits = bits
        """Name -> all bits of the tensor in this version."""
        self.changed = changed
        self.delta = delta
        self.before = before or {}
        """Name -> array that `delta` is against."""

    @classmethod
    def alone(cls, specs: Mapping[str, TensorSpec], bits: Mapping[str, Bits]) -> Pieces:
        """Whole weights without a base."""
        table = {name: TensorEntry(spec, codec.digest_of(bits[name])) for name, spec in specs.items()}
        return cls(table, bits.__getitem__, sum(flat.size for flat in bits.values()))

    @classmethod
    def after(cls, head: Mapping[str, TensorEntry], delta: Delta, bits: Mapping[str, Bits]) -> Pieces:
        """The head with a delta on top."""
        table = dict(head)
        changed = set(delta.changed)
        for change in delta.changes():
            table[change.spec.name] = TensorEntry(change.spec, change.digest)

        def after(name: str) -> Bits:
            if name not in changed:
                return bits[name]
            change = delta.change(name)
            if change.index is None:
                return change.bits
            flat = np.array(bits[name], copy=True)
            flat[change.index] = change.bits
            return flat

        return cls(table, after, delta.elements, delta, arrays(bits, head))

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {name: entry.spec for name, entry in self.table.items()}


class Draft:
    """Writes one version folder."""

    def __init__(self, store: Store, shard_nbytes: int, options: Options, level: str) -> None:
        self._store = store
        self._level = level
        self._disk = store.disk
        self._shard_nbytes = shard_nbytes
        self._options = options
        self.files: list[Kept] = []
        """What the version that was written last rests on, of its own."""
        self._same: dict[str, str] = {}
        """Attachment in the folder -> key of the same bytes in an earlier version."""

    def write(self, pieces: Pieces, *, base: int | None, parent: int | None) -> tuple[CommitRequest, Path]:
        """The complete folder and the request that would make it a version. After an error the folder is
        gone.
        """
        folder = staging.create(self._store.root, self._disk)
        try:
            with typed(f"staging {folder}"):
                request = self._fill(folder, pieces, base, parent)
                staging.seal(folder, self._disk)
            self._store.place.upload(request.folder, folder, self._same)
            return msgspec.structs.replace(request, staged=self._store.clock()), folder
        except BaseException:
            staging.discard(folder, self._store)
            raise

    def _fill(self, folder: Path, pieces: Pieces, base: int | None, parent: int | None) -> CommitRequest:
        options = self._options
        raw_nbytes, elements = raw_size(pieces.specs)
        blobs: list[Blob] = []
        if pieces.delta is not None:
            blobs.append(self._write_delta(folder, pieces.delta.numbered(base, None), pieces.before))
        delta_nbytes = sum(blob.nbytes for blob in blobs)
        anchor = options.anchor or base is None or self._due(base, delta_nbytes, raw_nbytes)
        anchor = anchor or anchor_wanted(self._store.place, self._store.state)
        if anchor:
            specs = list(pieces.specs.values())
            blobs += checkpoint.write_anchor(
                self._disk, folder, specs, pieces.bits, shard_nbytes=self._shard_nbytes
            )
        nbytes = sum(blob.nbytes for blob in blobs)
        blobs += self._model_files(folder, base, anchor)
        blobs += self._attachments(folder)
        changed = set(pieces.table) if anchor else set(pieces.delta.changed if pieces.delta else ())
        weights_digest = manifest.weights_digest_of(pieces.table)
        record = Manifest(
            run=self._store.run,
            base=base,
            step=options.step,
            complete=anchor,
            tensors=tuple(entry for name, entry in sorted(pieces.table.items()) if name in changed),
            blobs=tuple(blobs),
            weights_digest=weights_digest,
            raw_nbytes=raw_nbytes,
            elements=elements,
            changed=pieces.changed,
            attachments=tuple(sorted(options.attachments)),
            metadata=dict(options.metadata),
            created_at=self._store.clock(),
        )
        size, digest = self._disk.write_new(folder / MANIFEST, [manifest.encode(record)])
        key = f"{manifest.VERSIONS}/{folder.name}"
        self.files = kept(key, blobs, "anchor" if anchor else "delta", (size, digest))
        for blob in blobs:
            remember(folder / blob.name, blob.sha256)
        return CommitRequest(
            commit_id=options.commit_id or uuid.uuid4().hex,
            write_id=uuid.uuid4().hex,
            writer=str(owners.this_process()),
            epoch=None,
            at=record.created_at,
            base=base,
            parent=parent,
            step=options.step,
            label=options.label,
            stored="anchor" if anchor else "delta",
            digest=digest,
            folder=key,
            nbytes=nbytes,
            delta_nbytes=delta_nbytes,
            raw_nbytes=raw_nbytes,
            changed=pieces.changed,
            elements=elements,
            weights_digest=weights_digest,
            attachments=record.attachments,
            attachment_nbytes=sum(blob.nbytes for blob in blobs if blob.role == "attachment"),
            metadata=record.metadata,
        )

    def _write_delta(self, folder: Path, delta: Delta, before: Mapping[str, Any]) -> Blob:
        path = folder / DELTA
        self._disk.on_step(f"create {DELTA}")
        codec.write_delta(delta, path, level=self._level, base=before)
        return Blob(DELTA, path.stat().st_size, sha256_of(path), "delta")

    def _due(self, base: int, delta_nbytes: int, anchor_nbytes: int) -> bool:
        """Do the deltas since the last anchor outweigh an anchor?"""
        state, total, at = self._store.state, delta_nbytes, base
        while True:
            entry = state.version(at)
            if state.holds_anchor(at) or entry.base is None:
                return anchor_due(total, anchor_nbytes)
            total, at = total + entry.delta_nbytes, entry.base

    def _model_files(self, folder: Path, base: int | None, anchor: bool) -> list[Blob]:
        """Those that were given; for an anchor else those of the version before: a folder that opens by
        itself.
        """
        if self._options.model_files is not None:
            sources = checkpoint.model_files(self._options.model_files)
        elif anchor and base is not None:
            sources = self._store.model_files(base)
        else:
            return []
        return list(checkpoint.copy_model_files(self._disk, sources, folder))

    def _attachments(self, folder: Path) -> list[Blob]:
        given = self._options.attachments
        if not given:
            return []
        (folder / ATTACHMENTS).mkdir()
        earlier = self._earlier()
        blobs = []
        for name, value in sorted(given.items()):
            path = folder / ATTACHMENTS / name
            try:
                nbytes, sha = (
                    self._disk.write_new(path, [value])
                    if isinstance(value, bytes)
                    else self._disk.copy_new(Path(value), path)
                )
            except FileNotFoundError:
                raise InvalidInput(
                    f"attachment {name!r}: {value!r} is gone", hint="give a file that stays"
                ) from None
            if sha in earlier:
                self._same[f"{ATTACHMENTS}/{name}"] = earlier[sha]
                self._share(earlier[sha], path, sha)
            blobs.append(Blob(f"{ATTACHMENTS}/{name}", nbytes, sha, "attachment"))
        return blobs

    def _share(self, key: str, path: Path, sha: str) -> None:
        """Make a staged attachment a second name of the earlier file: it costs no room, and each version may
        be deleted without a look at the others. Other places see to it when the folder is uploaded.
        """
        known = self._store.root / key
        if staging.is_here(self._store) and known.is_file() and sha256_of(known) == sha:
            self._disk.link_instead(known, path)

    def _earlier(self) -> dict[str, str]:
        """SHA-256 -> key of the attachments of the newest version that has some."""
        version = recoverable(self._store.state)
        if version is None:
            return {}
        try:
            blobs = self._store.reading.stored(version).named("attachment")
            folder = self._store.state.version(version).folder
            return {blob.sha256: f"{folder}/{blob.name}" for blob in blobs}
        except (IntegrityError, VersionGone, Unavailable):
            return {}
