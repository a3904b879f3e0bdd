"""The ledger: entries of the append-only log, and what they add up to.

The log is a sequence of entries numbered 1, 2, 3, ... without a gap, each created by one put-if-absent and
never changed or deleted. `LedgerState` is the fold over them; every process that reads the same log has the
same state. Nothing here reads a clock or a disk. How entries get into the log is `core.commit`'s business.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from msgspec import Struct

from weightline.core.seal import seal, unseal
from weightline.errors import FormatError, VersionNotFound
from weightline.types import VersionKind

FORMAT = 1
"""Format of the log and of everything it names (`docs/format.md`)."""


class _Entry(Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True):
    write_id: str
    """Unique to one intended write: tells a put that was retried below us from somebody else's."""
    epoch: int
    """Epoch of the writer that wrote the entry (of the run, for entries that any process may write)."""
    at: float
    """When it was written, seconds since the Unix epoch, by the writer's clock. For people only."""


class VersionEntry(_Entry, frozen=True, kw_only=True, tag="version"):
    """A version became visible. Its folder was complete and durable before this entry named it."""

    version: int
    parent: int | None
    """The version training went on from; None for the first."""
    base: int | None
    """The version whose bytes the delta is against; None when only an anchor is stored."""
    step: int | None
    label: str
    stored: VersionKind
    """"anchor" when the whole weights are stored (a delta may lie beside them), else "delta"."""
    digest: str
    """SHA-256 of manifest.json."""
    folder: str
    """Below the store's root."""
    commit_id: str
    nbytes: int
    """Bytes of the anchor and delta blobs."""
    delta_nbytes: int
    """Bytes of the delta blob alone; 0 without one."""
    raw_nbytes: int
    changed: int
    elements: int
    weights_digest: str
    attachments: tuple[str, ...] = ()
    attachment_nbytes: int = 0
    """Bytes of the attachments together."""
    metadata: dict[str, Any] = {}


class FenceEntry(_Entry, frozen=True, kw_only=True, tag="fence"):
    """Epoch `epoch` begins: from here on no entry of an older writer is accepted."""

    writer: str
    """Who took it, for people: host, process id, start time."""


class RetireEntry(_Entry, frozen=True, kw_only=True, tag="retire"):
    """The blobs of these versions are about to be deleted; nobody may begin to read them."""

    versions: tuple[int, ...]
    reason: str


class ThinEntry(_Entry, frozen=True, kw_only=True, tag="thin"):
    """These versions stay, but their `form` is about to be deleted: an anchor that has a delta beside it, or
    attachments.
    """

    versions: tuple[int, ...]
    form: Literal["anchor", "attachments"]
    reason: str


class YankEntry(_Entry, frozen=True, kw_only=True, tag="yank"):
    """No engine should serve this version."""

    version: int
    reason: str


class AbandonEntry(_Entry, frozen=True, kw_only=True, tag="abandon"):
    """Training went back behind these versions and on from an older one."""

    versions: tuple[int, ...]


Entry = VersionEntry | FenceEntry | RetireEntry | ThinEntry | YankEntry | AbandonEntry

_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)


def encode(entry: Entry) -> bytes:
    """The entry as it lies in the log: one line of JSON, sealed."""
    return seal(_ENCODER.encode(entry)) + b"\n"


def decode(data: bytes, *, where: str = "log entry") -> Entry:
    """The inverse of `encode`. Raises `FormatError` naming `where` for anything else (a torn entry, say)."""
    hint = "run `weightline verify`; entries are never rewritten, so restore this file from a copy"
    body = unseal(data, where=where, hint=hint)
    try:
        return _DECODER.decode(body)
    except msgspec.DecodeError as error:
        raise FormatError(
            f"{where} is not an entry of format {FORMAT}: {error}",
            hint=hint,
        ) from None


class _Index:
    """Append-only tables shared by all states that grew out of one another.

    A state sees the first `count` versions only, so sharing is safe: a state that is not the longest copies
    first.
    """

    __slots__ = ("commits", "labels", "records")

    def __init__(self) -> None:
        self.records: list[tuple[int, VersionEntry]] = []
        self.labels: dict[str, int] = {}
        self.commits: dict[str, int] = {}

    def first(self, count: int) -> _Index:
        copy = _Index()
        for seq, entry in self.records[:count]:
            copy.add(seq, entry)
        return copy

    def add(self, seq: int, entry: VersionEntry) -> None:
        self.labels[entry.label] = entry.version
        self.commits[entry.commit_id] = entry.version
        self.records.append((seq, entry))


class LedgerState:
    """What the first `seq` entries of a log add up to. Immutable; `apply` gives the next one in O(1)
    amortised.
    """

    __slots__ = (
        "_count",
        "_index",
        "abandoned",
        "detached",
        "epoch",
        "fence_write_id",
        "retired",
        "run",
        "seq",
        "thinned",
        "yanked",
    )

    def __init__(self, run: str) -> None:
        self.run = run
        self.seq = 0
        """Number of the newest entry; 0 for an empty log."""
        self.epoch = 0
        """Epoch that may commit; 0 before the first fence."""
        self.fence_write_id = ""
        """Write id of the fence that began `epoch`."""
        self.retired: dict[int, float] = {}
        """version -> when its retirement was announced. Never changed once a caller holds the state."""
        self.thinned: dict[int, float] = {}
        """version -> when it was announced that its anchor goes and its delta stays."""
        self.detached: dict[int, float] = {}
        """version -> when it was announced that its attachments go."""
        self.yanked: frozenset[int] = frozenset()
        self.abandoned: frozenset[int] = frozenset()
        self._index = _Index()
        self._count = 0

    def __len__(self) -> int:
        """How many versions there are; also the number of the newest, as they are consecutive from 1."""
        return self._count

    @property
    def head(self) -> VersionEntry | None:
        """The newest version, yanked or not."""
        return self._index.records[self._count - 1][1] if self._count else None

    def versions(self) -> list[VersionEntry]:
        """All versions, oldest first."""
        return [entry for _, entry in self._index.records[: self._count]]

    def version(self, version: int) -> VersionEntry:
        """Raises `VersionNotFound`."""
        return self._index.records[self._position(version)][1]

    def seq_of(self, version: int) -> int:
        """Number of the log entry that made `version` visible. Raises `VersionNotFound`."""
        return self._index.records[self._position(version)][0]

    def has(self, version: int) -> bool:
        """Was `version` ever committed?"""
        return 1 <= version <= self._count

    def by_label(self, label: str) -> VersionEntry | None:
        """The version that carries `label`."""
        return self._seen(self._index.labels.get(label))

    def by_commit(self, commit_id: str) -> VersionEntry | None:
        """The version that was committed under `commit_id`."""
        return self._seen(self._index.commits.get(commit_id))

    def parent(self, version: int) -> int | None:
        """The version that training went on from to make `version`. Raises `VersionNotFound`."""
        return self.version(version).parent

    def lineage(self) -> dict[int, int | None]:
        """version -> parent, for `core.staleness`."""
        return {entry.version: entry.parent for entry in self.versions()}

    def ancestors(self, version: int) -> list[int]:
        """`version`, its parent, that one's parent, ... down to the first."""
        out, at = [], version
        while True:
            out.append(at)
            parent = self.parent(at)
            if parent is None:
                return out
            at = parent

    def overtaken(self, version: int) -> tuple[int, ...]:
        """Versions before `version` that training had reached and went back behind to make it, ascending."""
        entry = self.version(version)
        before = version - 1 if version > 1 else None
        if entry.parent is None or before is None or entry.parent == before:
            return ()
        left, kept, out = before, entry.parent, []
        while left != kept:
            if left > kept:
                out.append(left)
                step = self.parent(left)
            else:
                step = self.parent(kept)
            if step is None:
                break
            left, kept = (step, kept) if left > kept else (left, step)
        return tuple(reversed(out))

    def apply(self, seq: int, entry: Entry) -> LedgerState:
        """The state after entry `seq`. Raises `FormatError` for one that no correct writer could have put
        there.
        """
        state = self._copy()
        state._take(seq, entry)
        return state

    def extended(self, entries: Iterable[tuple[int, Entry]]) -> LedgerState:
        """`apply` of many at once: takes the time of the entries alone, however many versions are retired."""
        state = self._copy()
        for seq, entry in entries:
            state._take(seq, entry)
        return state

    def holds_anchor(self, version: int) -> bool:
        """Are the whole weights of `version` stored, and not let go since?"""
        return self.version(version).stored == "anchor" and version not in self.thinned

    def _take(self, seq: int, entry: Entry) -> None:
        if seq != self.seq + 1:
            raise _impossible(seq, f"it does not follow entry {self.seq}")
        match entry:
            case FenceEntry():
                if entry.epoch != self.epoch + 1:
                    raise _impossible(seq, f"it begins epoch {entry.epoch} after epoch {self.epoch}")
                self.epoch, self.fence_write_id = entry.epoch, entry.write_id
            case VersionEntry():
                self._check_version(seq, entry)
                self._append(seq, entry)
            case RetireEntry():
                self._check_known(seq, entry.versions)
                self.retired.update(dict.fromkeys(entry.versions, entry.at))
            case ThinEntry():
                self._check_known(seq, entry.versions)
                self._thin(seq, entry)
            case YankEntry():
                self._check_known(seq, (entry.version,))
                self.yanked = self.yanked | {entry.version}
            case AbandonEntry():
                self._check_known(seq, entry.versions)
                self.abandoned = self.abandoned | frozenset(entry.versions)
        self.seq = seq

    def _thin(self, seq: int, entry: ThinEntry) -> None:
        if entry.form == "attachments":
            self.detached.update(dict.fromkeys(entry.versions, entry.at))
            return
        for version in entry.versions:
            if self.version(version).base is None:
                raise _impossible(seq, f"it lets go of the anchor of version {version}, which has no base")
        self.thinned.update(dict.fromkeys(entry.versions, entry.at))

    def _check_version(self, seq: int, entry: VersionEntry) -> None:
        if entry.epoch != self.epoch:
            raise _impossible(seq, f"it is of epoch {entry.epoch} in epoch {self.epoch}")
        if entry.version != self._count + 1:
            raise _impossible(seq, f"it holds version {entry.version} after version {self._count}")
        if self.by_label(entry.label) is not None:
            raise _impossible(seq, f"its label {entry.label!r} is not new in the run")
        if self.by_commit(entry.commit_id) is not None:
            raise _impossible(seq, f"its commit_id {entry.commit_id!r} is not new in the run")
        self._check_known(seq, tuple(v for v in (entry.parent, entry.base) if v is not None))
        if entry.base is None and entry.stored != "anchor":
            raise _impossible(seq, f"version {entry.version} is a delta without a base")

    def _check_known(self, seq: int, versions: tuple[int, ...]) -> None:
        for version in versions:
            if not self.has(version):
                raise _impossible(seq, f"it names version {version}, which was never committed")

    def _append(self, seq: int, entry: VersionEntry) -> None:
        if len(self._index.records) != self._count:
            self._index = self._index.first(self._count)
        self._index.add(seq, entry)
        self._count += 1
        # Training may go on from an abandoned version after all: its line is alive again.
        at = entry.parent
        while at is not None and at in self.abandoned:
            self.abandoned = self.abandoned - {at}
            at = self.parent(at)

    def _copy(self) -> LedgerState:
        state = LedgerState.__new__(LedgerState)
        state.run, state.seq, state.epoch = self.run, self.seq, self.epoch
        state.fence_write_id = self.fence_write_id
        state.retired, state.thinned = dict(self.retired), dict(self.thinned)
        state.detached = dict(self.detached)
        state.yanked, state.abandoned = self.yanked, self.abandoned
        state._index, state._count = self._index, self._count
        return state

    def _position(self, version: int) -> int:
        if not self.has(version):
            newest = f"the newest is {self._count}" if self._count else "the run has no version yet"
            raise VersionNotFound(
                f"version {version} was never committed in run {self.run}; {newest}",
                hint="list the versions with `weightline log`",
            )
        return version - 1

    def _seen(self, version: int | None) -> VersionEntry | None:
        return self._index.records[version - 1][1] if version is not None and version <= self._count else None


def _impossible(seq: int, why: str) -> FormatError:
    return FormatError(
        f"log entry {seq} cannot be: {why}",
        hint="the log was changed by hand or by another program; restore it from a copy, nothing was changed",
    )
