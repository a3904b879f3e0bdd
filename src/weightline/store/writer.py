"""The writer: holds the bits of the newest version, stages what changed against them, publishes, follows
along.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import Struct

from weightline import codec
from weightline.codec import Delta, bits_of, from_bits
from weightline.codec.dtypes import Bits
from weightline.core.ledger import VersionEntry
from weightline.core.request import CommitRequest, check_repeated, other_commit
from weightline.errors import (
    ConflictError,
    IntegrityError,
    StorageFull,
    Unavailable,
    VersionGone,
    WeightlineError,
)
from weightline.store import manifest as manifests
from weightline.store import offer as offers
from weightline.store import staging
from weightline.store.head_watch import HeadWatch, Kept
from weightline.store.manifest import TensorEntry
from weightline.store.offer import Options
from weightline.store.stage import Draft, Pieces
from weightline.types import VersionRecord

if TYPE_CHECKING:
    from weightline.store.store import Store


logger = logging.getLogger(__name__)


class Published(Struct, frozen=True):
    """What became of a commit request."""

    record: VersionRecord
    repeated: bool
    """An earlier request under the same commit_id made this version; this one added nothing."""


Publish = Callable[[CommitRequest], Published]
"""Makes a staged version visible: the store's own log, or a server on behalf of this process."""


class Staged(Struct, frozen=True, eq=False):
    """A version that is complete and durable, and that nobody sees yet."""

    request: CommitRequest
    folder: Path | None
    """None when `commit_id` had already been committed: there is nothing to publish."""
    delta: Delta | None
    """Against the head; None for an anchor that stands on its own."""
    bits: dict[str, Bits] | None
    """The writer's copy of the weights of an anchor that stands on its own."""
    table: dict[str, TensorEntry]
    existing: VersionRecord | None = None
    files: tuple[Kept, ...] = ()
    """What a delta on top would rest on, of this version's own."""


class Writer:
    """One training process at a store. Uses as much memory as the weights. Safe to call from several threads,
    one by one.

    Opening one fences nobody: the epoch is taken by the first commit.
    """

    def __init__(
        self, store: Store, *, publish: Publish, commit_id_source: Callable[[], str], shard_nbytes: int
    ) -> None:
        self._store = store
        self._publish = publish
        self._new_id = commit_id_source
        self._shard_nbytes = shard_nbytes
        # On one host reading is what costs; over a network it is the bytes.
        self._level = "fast" if staging.is_here(store) else "dense"
        self._lock = threading.RLock()
        self.epoch: int | None = None
        """The epoch of this writer; None before its first commit."""
        self._head: int | None = None
        self._bits: dict[str, Bits] = {}
        self._table: dict[str, TensorEntry] = {}
        self._parent: int | None = None
        self._watch = HeadWatch(store)
        self.damaged: IntegrityError | None = None
        """What was found to be wrong with the newest version when the last commit was made: that one became
        an anchor that does not rest on it.
        """

    def resume_from(self, version: int) -> None:
        """Training went back: the next commit goes on from `version` (its parent), whatever the newest is."""
        self._store.state.version(version)
        self._parent = version

    def commit(self, weights: Mapping[str, Any] | str | Path | Delta, **options: Any) -> VersionRecord:
        """`stage` and `publish`. After any error the newest version is what it was, and nothing is left
        behind.

        A first commit that finds that another trainer committed meanwhile compares with the newest once more.
        """
        with self._lock:
            options["commit_id"] = options.get("commit_id") or self._new_id()
            first = self.epoch is None
            try:
                return self._commit_once(weights, options)
            except ConflictError as error:
                # Its fence is in the log by now, so nobody can get between again.
                if not first or type(error) is not ConflictError or isinstance(weights, Delta):
                    raise
                self._store.refresh()
                if len(self._store.state) == (self._head or 0):
                    raise
                return self._commit_once(weights, options)

    def _commit_once(
        self, weights: Mapping[str, Any] | str | Path | Delta, options: dict[str, Any]
    ) -> VersionRecord:
        staged = self.stage(weights, **options)
        try:
            return self.publish(staged)
        except Unavailable:
            self.abort(staged)
            raise

    def stage(self, weights: Mapping[str, Any] | str | Path | Delta, **options: Any) -> Staged:
        """Compare with the newest version, encode, write and fsync. Takes the options of `Line.commit`.

        Raises `InvalidInput` listing all misfits, `StorageFull`, `Unavailable`; nothing is left behind then.
        """
        began = self._store.clock()
        chosen = offers.options_of(options)
        with self._lock:
            given, model_files = offers.read_offer(weights, chosen.model_files)
            self._follow_for(given, chosen)
            chosen = msgspec.structs.replace(
                chosen, model_files=model_files, commit_id=chosen.commit_id or self._new_id()
            )
            if (existing := self._committed(given, chosen)) is not None:
                return existing
            if isinstance(given, Delta):
                given = self._absolute(given)
            staged = self._stage(given, chosen)
            return msgspec.structs.replace(
                staged, request=msgspec.structs.replace(staged.request, began=began)
            )

    def publish(self, staged: Staged) -> VersionRecord:
        """Make a staged version visible; the atomic step. Takes the epoch if this writer has none yet.

        Raises `WriterFenced`, `ConflictError`, `InvalidInput` (its label was taken meanwhile), `StorageFull`:
        the staging is removed then. After another `Unavailable` it stays: the same call may be repeated, else
        `abort` it.
        """
        with self._lock:
            if staged.existing is not None:
                # Training goes on from what this commit made, whatever recover() said before.
                self._parent = staged.existing.version
                self._store.resumed = None
                return staged.existing
            request = msgspec.structs.replace(staged.request, epoch=self.epoch)
            try:
                published = self._publish(request)
            except WeightlineError as error:
                if not isinstance(error, Unavailable) or isinstance(error, StorageFull):
                    self.abort(staged)
                raise
            if published.repeated:
                self.abort(staged)
            else:
                self.epoch = published.record.epoch
                self._advance(staged, published.record.version)
                if staged.folder is not None and not staging.is_here(self._store):
                    self._store.disk.remove_tree(staged.folder)  # it was uploaded
            self._parent = published.record.version if published.repeated else None
            self._store.resumed = None
            return published.record

    def abort(self, staged: Staged) -> None:
        """Drop a staging. Harmless for one that was published. Never raises."""
        if staged.folder is not None:
            staging.discard(staged.folder, self._store)

    def head(self) -> tuple[int | None, Mapping[str, Bits]]:
        """The newest version and its bits, which this writer holds. Do not change them."""
        with self._lock:
            self._follow()
            return self._head, self._bits

    def close(self) -> None:
        """Release the memory. The writer may be used again: it then reads the newest version anew."""
        with self._lock:
            self._forget()

    def _stage(self, given: Mapping[str, Any] | Delta, options: Options) -> Staged:
        if isinstance(given, Delta) and self._head is None:
            if any(change.index is not None for change in given.changes()):
                raise ConflictError(
                    "the store is empty and the delta is against something",
                    hint="commit the whole weights first",
                )
            given = {change.spec.name: from_bits(change.bits, change.spec) for change in given.changes()}
        if isinstance(given, Delta):
            delta = offers.check_delta(given, self._head, self._table, self._bits)
            return self._write(delta, None, options)
        same = offers.check_names(given, self._table, options)
        if options.check_finite:
            offers.check_finite(given)
        if self._head is None or not same:
            bits = {name: np.array(bits_of(array), copy=True) for name, array in given.items()}
            return self._write(None, (codec.specs_of(given), bits), options)
        old = {name: from_bits(self._bits[name], self._table[name].spec) for name in given}
        known = {name: self._table[name].digest for name in given}
        delta = codec.diff(old, given, old_digests=known, level=self._level)
        return self._write(delta, None, options)

    def _absolute(self, delta: Delta) -> Delta:
        """A delta from a file may be told relative to its base: the newest version, or it is refused."""
        known = {name: self._table[name].digest for name in delta.changed if name in self._table}
        return delta.decoded(offers.arrays(self._bits, self._table), digests=known)

    def _write(
        self, delta: Delta | None, whole: tuple[dict[str, Any], dict[str, Bits]] | None, options: Options
    ) -> Staged:
        draft = Draft(self._store, self._shard_nbytes, options, self._level)
        parent = self._parent if self._parent is not None else self._store.resumed
        if delta is not None:
            pieces, base = Pieces.after(self._table, delta, self._bits), self._head
            if self.damaged is not None:
                # Its bits are here: all of them are written, and nothing rests on its files.
                count = sum(flat.size for flat in self._bits.values())
                pieces, base = Pieces(pieces.table, pieces.bits, count), None
            request, folder = draft.write(pieces, base=base, parent=parent)
            return Staged(request, folder, delta, None, pieces.table, files=tuple(draft.files))
        specs, bits = whole if whole is not None else ({}, {})
        pieces = Pieces.alone(specs, bits)
        request, folder = draft.write(pieces, base=None, parent=parent)
        return Staged(request, folder, None, bits, pieces.table, files=tuple(draft.files))

    def _committed(self, given: Mapping[str, Any] | Delta, options: Options) -> Staged | None:
        """A commit whose answer was lost and that is repeated: the version that it made."""
        entry = self._store.state.by_commit(options.commit_id or "")
        if entry is None:
            return None
        check_repeated(entry, options.step, options.label, options.attachments)
        self._check_same_weights(entry, given, options)
        record = self._store.record(entry.version)
        request = CommitRequest(
            commit_id=entry.commit_id,
            write_id="",
            writer="",
            epoch=self.epoch,
            at=entry.at,
            base=entry.base,
            stored=entry.stored,
            digest=entry.digest,
            folder=entry.folder,
            nbytes=entry.nbytes,
            delta_nbytes=entry.delta_nbytes,
            raw_nbytes=entry.raw_nbytes,
            changed=entry.changed,
            elements=entry.elements,
            weights_digest=entry.weights_digest,
        )
        return Staged(request, None, None, None, {}, existing=record)

    def _check_same_weights(
        self, entry: VersionEntry, given: Mapping[str, Any] | Delta, options: Options
    ) -> None:
        """Raises `ConflictError` if a commit that is repeated offers other weights than the first time."""
        if isinstance(given, Mapping) and not options.partial:
            specs = codec.specs_of(given)
            offered = {n: TensorEntry(spec, codec.digest_of(bits_of(given[n]))) for n, spec in specs.items()}
            if manifests.weights_digest_of(offered) != entry.weights_digest:
                raise other_commit(entry, "other weights")
            return
        if entry.version in self._store.state.retired:
            return  # a part alone cannot be told any more
        table = self._store.reading.table(entry.version)
        if isinstance(given, Delta):
            if entry.base is not None and given.level != "absolute":
                given = given.decoded(self._store.load(entry.base))
            digests = {change.spec.name: change.digest for change in given.changes()}
        else:
            digests = {name: codec.digest_of(bits_of(array)) for name, array in given.items()}
        other = [n for n, digest in digests.items() if n not in table or table[n].digest != digest]
        if other:
            raise other_commit(entry, f"other weights in {', '.join(map(repr, other[:5]))}")

    def _follow_for(self, given: Mapping[str, Any] | Delta, options: Options) -> None:
        self.damaged = None
        try:
            self._follow()
        except IntegrityError as error:
            self._forget()
            if isinstance(given, Delta) or options.partial:
                raise
            # Whole weights need nothing of the newest version, and engines need a version that is whole.
            self._tell(error)
            return
        try:
            self._watch.look()
        except IntegrityError:
            # Retention may have changed what the chain is made of.
            try:
                self._watch.begin(self._head)
                self._watch.look()
            except (IntegrityError, VersionGone) as error:
                self._tell(IntegrityError(error.message, hint=error.hint))

    def _tell(self, damage: IntegrityError) -> None:
        self.damaged = damage
        logger.warning("%s; what is committed now becomes an anchor that stands on its own", damage)

    def _follow(self) -> None:
        """Hold the bits of the newest version, whoever committed it."""
        newest = self._store.refresh()
        if newest == self._head:
            return
        self._forget()
        if newest is None:
            return
        # In memory: the shadow must not depend on files that retention deletes or a disk fault cuts short.
        loaded = self._store.reading.load(newest, held=True)
        self._bits = {name: bits_of(array) for name, array in loaded.items()}
        self._table = dict(self._store.reading.table(newest))
        self._head = newest
        self._watch.begin(newest, trusted=True)

    def _advance(self, staged: Staged, version: int) -> None:
        if staged.bits is not None:
            self._bits = staged.bits
        elif staged.delta is not None:
            # Checked when it was staged; the old bits are not needed any more.
            staged.delta.apply_(offers.arrays(self._bits, self._table), check=False)
        self._table, self._head = staged.table, version
        self._watch.add(list(staged.files), alone=staged.request.stored == "anchor")

    def _forget(self) -> None:
        self._head, self._bits, self._table = None, {}, {}
        self._watch.begin(None)


def new_id() -> str:
    """A fresh commit_id."""
    return uuid.uuid4().hex
