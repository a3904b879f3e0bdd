"""What a follower keeps on disk for its engine, and the one file it hands over for a refit.

The bytes of every version lie in the store already, mapped from the same host, so a replica holds nothing
between two refits but what its engine must be given in full (`host.py`): it takes what it needs from the
store, for the length of one refit, into a runtime folder of its own. Every change in the file is an absolute
value, so that applying it twice is harmless and N-1 can be made again from the store at any time.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from weightline.errors import IntegrityError, InvalidInput, StorageFull
from weightline.rollout.engines.base import WholeTensor
from weightline.rollout.host import HostTensors

if TYPE_CHECKING:
    from weightline.codec import Delta
    from weightline.service.line import Line
    from weightline.store import Manifest
    from weightline.types import VersionRecord

OWNER = "owner.json"


class Owner(msgspec.Struct, frozen=True):
    """Whose runtime folder this is; the process is named so that a later follower can tell whether it still
    lives."""

    run: str
    follower: str
    host: str
    pid: int
    started: float
    """Start time of the process, seconds since the epoch: a pid alone may have been given away again."""


class RefitFile(msgspec.Struct, frozen=True):
    """A delta file, absolute level, under the engine's names."""

    path: Path
    digests: dict[str, str]
    """The engine's name -> additive digest that the tensor must have afterwards."""
    elements: int
    nbytes: int
    """Size of the file in bytes."""
    whole: tuple[WholeTensor, ...] = ()
    """See `Refit.whole`."""


def _process_started(pid: int) -> float | None:
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def default_runtime_dir() -> Path:
    """A folder of this user's below the system's temporary folder."""
    return Path(tempfile.gettempdir()) / f"weightline-{os.getuid()}"


def sweep(parent: Path, *, host: str | None = None) -> list[Path]:
    """Remove the runtime folders of followers of this host that are dead; returns what was removed.

    Folders of live processes, of other hosts (another pod may share the mount) and of anything else are left
    alone.
    """
    here = host or socket.gethostname()
    removed = []
    for folder in sorted(parent.glob("follow-*")):
        if folder.is_symlink() or not folder.is_dir():
            continue
        try:
            owner = msgspec.json.decode((folder / OWNER).read_bytes(), type=Owner)
        except (OSError, msgspec.DecodeError):
            # Not ours to judge: the folder of a follower has its owner file from the first moment on.
            continue
        if owner.host != here:
            continue
        started = _process_started(owner.pid)
        if started is None or abs(started - owner.started) > 1.0:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


class Replica:
    """The runtime folder of one follower process: created at start, gone after `close`."""

    def __init__(self, run: str, follower: str, *, parent: Path | None = None) -> None:
        """Sweep what dead followers left in `parent` and make a folder of our own. Raises `InvalidInput`,
        `StorageFull`."""
        self.writer: Callable[[Delta, Path], int] | None = None
        """Writes the file that is handed over, in the form of the engine's own adapter; returns its size in
        bytes. None: a delta file."""
        parent = parent if parent is not None else default_runtime_dir()
        safe = re.sub(r"[^A-Za-z0-9._-]", "_", follower)[:40]
        name = f"follow-{run[:16]}-{safe}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        owner = Owner(run, follower, socket.gethostname(), os.getpid(), _process_started(os.getpid()) or 0.0)
        try:
            parent.mkdir(parents=True, exist_ok=True)
            sweep(parent)
            # Named with its owner inside from the first moment on: a sweep never sees a folder of ours
            # without one.
            draft = parent / f".{name}"
            draft.mkdir()
            (draft / OWNER).write_bytes(msgspec.json.encode(owner))
            self.folder = draft.rename(parent / name)
        except OSError as error:
            raise InvalidInput(
                f"runtime folder {parent}: {error.strerror or error}", hint="give a writable --runtime-dir"
            ) from None

    def close(self) -> None:
        """Remove the folder and all in it. Idempotent."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def delta_file(
        self,
        line: Line,
        record: VersionRecord,
        have: int,
        manifest: Manifest,
        mapping: Mapping[str, str],
        groups: Mapping[str, int],
    ) -> RefitFile:
        """One file that takes the bytes of `have` to those of `record`, however many versions lie between,
        and in full what goes with a group that it touches.

        Raises `IntegrityError`, `VersionGone`.
        """
        delta = line.fetch_delta(record.version, have=have)
        touched = {groups[mapping[name]] for name in delta.changed if mapping[name] in groups}
        names = _together(manifest, mapping, groups, touched)
        base = line.manifest(have) if names else None
        whole = HostTensors(self.folder).whole(line, manifest, names, mapping, base=base, delta=delta)
        file = self._write(delta, manifest, mapping, f"{have}-{record.version}", without=set(names))
        return msgspec.structs.replace(file, whole=whole)

    def full_file(
        self,
        line: Line,
        record: VersionRecord,
        manifest: Manifest,
        mapping: Mapping[str, str],
        groups: Mapping[str, int],
        *,
        live: Mapping[str, str] | None = None,
    ) -> RefitFile:
        """The tensors of `record` in full: right whatever the engine holds now. Raises `IntegrityError`,
        `VersionGone`.

        `live`: digests of the engine's tensors, by its names; those that have theirs already are left out.
        """
        from weightline.codec import full
        from weightline.store.reading import HELD_NBYTES

        digests = {entry.spec.name: entry.digest for entry in manifest.tensors}
        held = record.raw_nbytes <= HELD_NBYTES
        weights = line.load(record.version, held=held)  # verified against these digests
        names = _together(manifest, mapping, groups, set(groups.values()))
        whole = HostTensors(self.folder).whole(line, manifest, names, mapping)
        there = {name for name, digest in digests.items() if (live or {}).get(mapping[name]) == digest}
        there.update(names)
        delta = full(
            {name: array for name, array in weights.items() if name not in there},
            digests={name: digest for name, digest in digests.items() if name not in there},
        )
        file = self._write(delta, manifest, mapping, f"full-{record.version}")
        promised = {mapping[name]: digest for name, digest in digests.items()}
        return msgspec.structs.replace(file, digests=promised, whole=whole)

    def discard(self, file: RefitFile) -> None:
        """Remove a file that this replica wrote."""
        file.path.unlink(missing_ok=True)

    def _write(
        self,
        delta: Delta,
        manifest: Manifest,
        mapping: Mapping[str, str],
        stem: str,
        without: AbstractSet[str] = frozenset(),
    ) -> RefitFile:
        digests = _expected(delta, manifest, mapping)
        path = self.folder / f"{stem}-{uuid.uuid4().hex[:8]}.safetensors"
        try:
            nbytes = (self.writer or _write_absolute)(_renamed(delta, mapping, without), path)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise StorageFull(
                f"{path}: {error.strerror or error}", hint="free space, or give another --runtime-dir"
            ) from None
        return RefitFile(path, digests, delta.elements, nbytes)


def _write_absolute(delta: Delta, path: Path) -> int:
    from weightline.codec import write_delta

    return write_delta(delta, path, level="absolute")


def _together(
    manifest: Manifest, mapping: Mapping[str, str], groups: Mapping[str, int], touched: set[int]
) -> list[str]:
    """The version's names of everything in the touched groups."""
    names = (entry.spec.name for entry in manifest.tensors)
    return [name for name in names if groups.get(mapping[name]) in touched]


def _renamed(delta: Delta, mapping: Mapping[str, str], without: AbstractSet[str]) -> Delta:
    """The same changes under the engine's names, but for those of `without`; arrays are borrowed."""
    from weightline.codec import Delta
    from weightline.codec.delta import Held

    if not without and all(mapping[name] == name for name in delta.changed):
        return delta
    changes = []
    for change in delta.changes():
        if change.spec.name not in without:
            spec = msgspec.structs.replace(change.spec, name=mapping[change.spec.name])
            changes.append(msgspec.structs.replace(change, spec=spec))
    return Delta(Held(changes), base=delta.base, version=delta.version)


def _expected(delta: Delta, manifest: Manifest, mapping: Mapping[str, str]) -> dict[str, str]:
    """The digests that the manifest promises for the tensors that `delta` changes, under the engine's
    names."""
    promised = {entry.spec.name: entry.digest for entry in manifest.tensors}
    wrong = [name for name in delta.changed if delta.change(name).digest != promised.get(name)]
    if wrong:
        raise IntegrityError(
            f"version {manifest.version}: delta and manifest disagree on the bytes of {', '.join(wrong)}",
            hint="run `weightline verify --deep`",
        )
    return {mapping[name]: promised[name] for name in delta.changed}
