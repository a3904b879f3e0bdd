"""From log entries to bytes: every blob is checked against its SHA-256 before it is believed, every result
against the digests of its tensors.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from weightline import codec
from weightline.codec import Delta
from weightline.core import plan as plans
from weightline.core.ledger import LedgerState, VersionEntry
from weightline.errors import IntegrityError, InvalidInput, Unavailable, VersionGone
from weightline.store import manifest as manifests
from weightline.store import safetensors_file as files
from weightline.store.disk import sha256_of
from weightline.store.manifest import Blob, Manifest, TensorEntry
from weightline.store.place import Missing, Place

_HINT = "run `weightline verify` on the store; take another version until it is repaired"
_verified: dict[tuple[str, int, int, int], str] = {}
"""Blobs that this process has hashed: (path, inode, bytes, modification time) -> SHA-256."""
_MAX_CACHED = 64
HELD_NBYTES = 1 << 30
"""Bytes of weights up to which a follower holds a version in memory; of larger ones the files are mapped,
which costs no memory and leaves it to the mercy of whoever cuts them short.
"""


def remember(path: Path, sha256: str) -> None:
    """This process wrote `path` itself and knows its SHA-256."""
    stat = path.stat()
    _verified[(str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns)] = sha256


def check_blob(path: Path, blob: Blob, *, again: bool = False) -> None:
    """Raises `IntegrityError` unless the file is what its manifest says; hashes it once a process (or
    `again`).

    The size comes first, so that a file that is cut short is never mapped.
    """
    try:
        stat = path.stat()
        if stat.st_size != blob.nbytes:
            raise IntegrityError(f"{path} has {stat.st_size} bytes instead of {blob.nbytes}", hint=_HINT)
        key = (str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if again or _verified.get(key) is None:
            _verified[key] = sha256_of(path)
    except FileNotFoundError:
        raise IntegrityError(f"{path} is missing", hint=_HINT) from None
    except OSError as error:
        raise Unavailable(
            f"cannot read {path}: {error.strerror}", hint="check the disk, then retry"
        ) from error
    if _verified[key] != blob.sha256:
        del _verified[key]
        raise IntegrityError(f"{path} differs from its SHA-256 {blob.sha256[:12]}…", hint=_HINT)


def to_torch(array: Any) -> Any:
    """The array as a torch tensor over the same memory."""
    import torch

    spec = codec.spec_of("", array)
    signed = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}[codec.width_of(spec.dtype)]
    flat = torch.from_numpy(codec.bits_of(array).view(signed))
    return flat.view(getattr(torch, codec.numpy_dtype(spec.dtype).name)).reshape(spec.shape)


class Reading:
    """Reads versions of one store. `state` gives the newest known state, `refresh` reads the log again."""

    def __init__(self, place: Place, state: Callable[[], LedgerState], refresh: Callable[[], object]) -> None:
        self._place = place
        self._state = state
        self._refresh = refresh
        self._lock = threading.Lock()
        self._base_lock = threading.Lock()
        self._base: tuple[int, dict[str, Any]] | None = None
        """The version that the last relative delta led to, and its bytes: the likely base of the next."""
        self._manifests: OrderedDict[int, Manifest] = OrderedDict()
        self._tables: OrderedDict[int, dict[str, TensorEntry]] = OrderedDict()

    def require(self, version: int) -> VersionEntry:
        """The entry. Raises `VersionNotFound`, `VersionGone`."""
        state = self._state()
        entry = state.version(version)
        if version in state.retired:
            raise VersionGone(
                f"version {version} was retired: its bytes are gone",
                hint="take a newer version; pin versions that must stay",
            )
        return entry

    def stored(self, version: int) -> Manifest:
        """The manifest as it lies in the folder, checked against the log. Raises `IntegrityError`,
        `VersionGone`.
        """
        with self._lock:
            if (known := self._manifests.get(version)) is not None:
                return known
        entry = self.require(version)
        key = f"{entry.folder}/{manifests.MANIFEST}"
        path = f"{self._place.url}/{key}"
        try:
            data = self._place.read(key)
            if manifests.digest_of(data) != entry.digest:
                data = self._place.read(key)  # a short read looks like damage, once
        except Missing:
            raise self._missing(version, path) from None
        if manifests.digest_of(data) != entry.digest:
            raise IntegrityError(
                f"{path} differs from the digest in log entry of version {version}", hint=_HINT
            )
        manifest = manifests.decode(data, where=str(path))
        self._keep(self._manifests, version, manifest)
        return manifest

    def table(self, version: int) -> dict[str, TensorEntry]:
        """Name -> tensor, inherited ones included; proved by the `weights_digest` in the log. Do not change
        it.
        """
        with self._lock:
            if (known := self._tables.get(version)) is not None:
                return known
        entry = self.require(version)
        table: dict[str, TensorEntry] = {}
        for manifest in reversed(self._manifest_chain(version)):
            table.update({tensor.spec.name: tensor for tensor in manifest.tensors})
        if manifests.weights_digest_of(table) != entry.weights_digest:
            raise IntegrityError(
                f"the manifests of version {version} do not add up to its digest", hint=_HINT
            )
        self._keep(self._tables, version, table)
        return table

    def _manifest_chain(self, version: int) -> list[Manifest]:
        """Newest first, back to one that lists all tensors (that of an anchor does, even a thinned one)."""
        out, at = [self.stored(version)], version
        while not out[-1].complete:
            base = self._state().version(at).base
            if base is None:
                raise IntegrityError(f"version {version} rests on no complete manifest", hint=_HINT)
            at = base
            out.append(self.stored(at))
        return out

    def manifest(self, version: int) -> Manifest:
        """The manifest with its number and all tensors."""
        import msgspec

        tensors = tuple(entry for _, entry in sorted(self.table(version).items()))
        return msgspec.structs.replace(self.stored(version), version=version, tensors=tensors, complete=True)

    def blob_path(self, version: int, blob: Blob) -> Path:
        """Path of a blob that is what it should be. Raises `IntegrityError`, `VersionGone`."""
        key = f"{self._state().version(version).folder}/{blob.name}"
        try:
            path = self._place.file(key, nbytes=blob.nbytes, sha256=blob.sha256)
        except Missing:
            raise self._missing(version, f"{self._place.url}/{key}") from None
        check_blob(path, blob)
        return path

    def delta(self, version: int) -> Delta:
        """The delta that is stored with the version, against its base."""
        blobs = self.stored(version).named("delta")
        if not blobs:
            raise InvalidInput(
                f"version {version} has no delta", hint="it is an anchor that stands on its own"
            )
        # The blob's SHA-256 is known to be right, so the codec need not check its streams again.
        delta = codec.read_delta(self.blob_path(version, blobs[0]), verify=False)
        return delta.numbered(self._state().version(version).base, version)

    def load(
        self, version: int, *, like: Literal["numpy", "torch"] = "numpy", held: bool = False
    ) -> dict[str, Any]:
        """Name -> array, bit-exact and verified. Mapped copy-on-write: memory is used only where deltas
        apply; `held`: all in memory, so that no file that is cut short can kill the process.
        """
        if like not in ("numpy", "torch"):
            raise InvalidInput(f"like={like!r} is neither 'numpy' nor 'torch'", hint="choose one of the two")
        self.require(version)
        plan = plans.plan(self._state(), None, version)
        try:
            tensors = self._rebuilt(version, plan, held)
        except IntegrityError:
            # Retention may have let an anchor on the way go meanwhile; then there is another way.
            self._refresh()
            again = plans.plan(self._state(), None, version)
            if again == plan:
                raise
            tensors = self._rebuilt(version, again, held)
        if like == "torch":
            return {name: to_torch(array) for name, array in tensors.items()}
        return tensors

    def check_whole(self, version: int) -> None:
        """Raises `IntegrityError` unless every file that `version` is rebuilt from is what it should be.

        Files that this process has hashed before are not read again.
        """
        self.table(version)
        for step in plans.plan(self._state(), None, version).steps:
            for blob in self.stored(step.version).named(step.form):
                self.blob_path(step.version, blob)

    def load_through(self, version: int) -> dict[str, Any]:
        """The weights of `version` without a look at its own anchor: the version before it and its delta."""
        entry = self.require(version)
        if entry.base is None:
            raise IntegrityError(f"version {version} stands on its own", hint="restore its files from a copy")
        tensors = self.load(entry.base)
        digests = {name: tensor.digest for name, tensor in self.table(entry.base).items()}
        undo = self.delta(version).apply_(tensors, digests=digests)
        self._check_result(version, tensors, set(undo.digests))
        return tensors

    def _rebuilt(self, version: int, plan: plans.Plan, held: bool) -> dict[str, Any]:
        tensors: dict[str, Any] = {}
        for blob in self.stored(plan.steps[0].version).named("anchor"):
            tensors.update(files.map_file(self.blob_path(plan.steps[0].version, blob), held=held))
        digests = {name: entry.digest for name, entry in self.table(plan.steps[0].version).items()}
        written: set[str] = set()
        for step in plan.steps[1:]:
            undo = self.delta(step.version).apply_(tensors, digests=digests)
            digests.update(undo.digests)
            written.update(undo.digests)
        self._check_result(version, tensors, written)
        return tensors

    def _check_result(self, version: int, tensors: Mapping[str, Any], written: set[str]) -> None:
        table = self.table(version)
        if tensors.keys() != table.keys():
            names = sorted(tensors.keys() ^ table.keys())
            raise IntegrityError(
                f"version {version} and its manifest differ in {', '.join(names)}", hint=_HINT
            )
        for name in written:
            if codec.digest_of(codec.bits_of(tensors[name])) != table[name].digest:
                raise IntegrityError(
                    f"tensor {name!r} of version {version} differs from its digest", hint=_HINT
                )

    def fetch(self, version: int, have: int | None) -> Delta:
        """What turns the bytes of `have` (None: the base of `version`) into those of `version`."""
        entry = self.require(version)
        have = entry.base if have is None else have
        if have is None:
            return self._full(version)
        state = self._state()
        state.version(have)
        if have == version:
            return codec.diff({}, {}).numbered(have, version)
        links = plans.forward(state, have, version)
        if links is not None:
            return self._joined(have, version, links)
        if have in state.retired or self._specs(have) != self._specs(version):
            return self._full(version)
        known = {name: tensor.digest for name, tensor in self.table(have).items()}
        delta = codec.diff(self.load(have), self.load(version), old_digests=known)
        return self._proved(delta.numbered(have, version))

    def _joined(self, have: int, version: int, links: tuple[int, ...]) -> Delta:
        deltas = [self.delta(link) for link in links]
        if all(delta.level == "absolute" for delta in deltas):
            delta = deltas[0] if len(deltas) == 1 else codec.merge(deltas)
            return self._proved(delta.numbered(have, version))
        known = {name: tensor.digest for name, tensor in self.table(have).items()}
        with self._base_lock:
            # A reader that goes from version to version finds its base here and reads each delta once.
            held, self._base = self._base, None
            try:
                if held is not None and held[0] == have:
                    base = held[1]
                else:
                    base = self.load(have, held=self.require(have).raw_nbytes <= HELD_NBYTES)
            except VersionGone:
                return self._full(version)
            if len(deltas) == 1:
                delta = deltas[0].decoded(base, digests=known)
            else:
                delta = codec.squash(base, deltas, digests=known)
            delta = self._proved(delta.numbered(have, version))
            delta.apply_(base, digests=known)
            self._base = (version, base)
        return delta

    def _full(self, version: int) -> Delta:
        digests = {name: tensor.digest for name, tensor in self.table(version).items()}
        return codec.full(self.load(version), digests=digests).numbered(None, version)

    def _proved(self, delta: Delta) -> Delta:
        """The delta, whose tensors end in the digests of the manifest. Raises `IntegrityError`."""
        table = self.table(delta.version) if delta.version is not None else {}
        for change in delta.changes():
            tensor = table.get(change.spec.name)
            if tensor is None or tensor.digest != change.digest or tensor.spec != change.spec:
                raise IntegrityError(
                    f"the delta to version {delta.version} and its manifest differ in {change.spec.name!r}",
                    hint=_HINT,
                )
        return delta

    def _specs(self, version: int) -> dict[str, Any]:
        return {name: tensor.spec for name, tensor in self.table(version).items()}

    def _missing(self, version: int, path: str) -> Exception:
        self._refresh()
        if version in self._state().retired:
            return VersionGone(
                f"version {version} was retired while it was read",
                hint="take a newer version; lease what must stay",
            )
        return IntegrityError(f"{path} of version {version} is missing", hint=_HINT)

    def _keep(self, cache: OrderedDict[int, Any], version: int, value: Any) -> None:
        with self._lock:
            cache[version] = value
            while len(cache) > _MAX_CACHED:
                cache.popitem(last=False)

    def forget(self, version: int) -> None:
        """Drop what is remembered of a version that goes away."""
        with self._lock:
            self._manifests.pop(version, None)
            self._tables.pop(version, None)
