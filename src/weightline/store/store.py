"""The store: one handle for everything that the log, the version folders and the catalogue know."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from weightline.codec import Delta
from weightline.core import commit as machines
from weightline.core.ledger import LedgerState, VersionEntry
from weightline.core.request import CommitRequest
from weightline.errors import (
    ConflictError,
    FormatError,
    IntegrityError,
    InvalidInput,
    StorageFull,
    VersionGone,
    WeightlineError,
)
from weightline.store import staging
from weightline.store.catalog import Catalog, Subscriber, TraceEvent, way_of
from weightline.store.checkout import checkout, model_files_of
from weightline.store.checkpoint import SHARD_NBYTES
from weightline.store.disk import Disk, OnStep, no_step, typed
from weightline.store.keeping import Keeping
from weightline.store.leases import Leases
from weightline.store.leftovers import sweep_for_writer
from weightline.store.log import Log
from weightline.store.manifest import MANIFEST, VERSIONS, Manifest, digest_of
from weightline.store.mirror_make import refuse_half
from weightline.store.mirror_repair import with_mirror
from weightline.store.opening import is_store_url, place_of
from weightline.store.place import Missing, Place
from weightline.store.place_clock import PlaceClock
from weightline.store.place_local import LocalPlace
from weightline.store.reading import Reading
from weightline.store.records import record_of
from weightline.store.recovered import Recovered, recover
from weightline.store.repair import repair as mend
from weightline.store.run import Run, adopt_copy, is_copy, make_run, read_run, refuse_copy
from weightline.store.verify import verify
from weightline.store.writer import Publish, Published, Writer, new_id
from weightline.types import Ack, VerifyReport, VersionRecord

logger = logging.getLogger(__name__)


class Store(Keeping):
    """A handle on one store. Any number of handles may read; opening one fences nobody. Safe to use from any
    thread.
    """

    def __init__(
        self,
        root: Path,
        run: Run,
        *,
        place: Place,
        disk: Disk,
        clock: Callable[[], float],
        shard_nbytes: int,
    ) -> None:
        self.root = root
        """Folder of this host in which versions are staged and the catalogue lies; a local store's own."""
        self.place = place
        """Where the log, the versions, leases and pins are."""
        self.run = run.run
        self.clock = clock
        self.disk = disk
        self.state = LedgerState(run.run)
        """What this handle knows of the log; `refresh` reads on."""
        self.damage: WeightlineError | None = None
        """Why the log could not be read to its end when the store was opened."""
        self.resumed: int | None = None
        """The version that `recover` gave and that the next commit goes on from."""
        self.log = Log(place, run.run)
        # A clock that is given is taken as it is; else all hosts go by the place's.
        self.leases = Leases(place, PlaceClock(place) if clock is time.time else clock)
        self.reading = Reading(place, lambda: self.state, self.refresh)
        self.catalog = Catalog(root, lambda: self.state, clock, disk.on_step)
        self.shard_nbytes = shard_nbytes
        self._lock = threading.RLock()
        self._free_at_start = place.free()
        self.address: str = place.url
        """What `Store.open` takes to open it again, on this host."""

    @staticmethod
    def open(
        root: str | Path,
        *,
        place: Place | None = None,
        create: bool = False,
        run: str | None = None,
        clock: Callable[[], float] = time.time,
        on_step: OnStep = no_step,
        shard_nbytes: int = SHARD_NBYTES,
    ) -> Store:
        """Open the store in the folder `root`, or make one there with `create`.

        `root` may be a URL (`s3://…`, `mirror:…`, see `opening`). With `place` the store is there, and `root`
        is a folder of this host for stagings and the catalogue.
        `run` is the run that the caller expects. `shard_nbytes` is the size above which anchors are written
        in shards; `on_step` hears of every durable step. Raises `StoreNotFound`, `FormatError` (another
        format), `ConflictError` (another run), `InvalidInput` (a place where no store can be). A damaged log
        does not keep it from opening (see `damage`): what comes before the damage can be read.
        """
        if not isinstance(root, str | Path) or "\0" in str(root):
            raise InvalidInput(f"{root!r} is no path", hint="give the folder of the store, or its URL")
        disk, address = Disk(on_step), root
        if place is None and isinstance(root, str) and is_store_url(root):
            root, place = place_of(root, create=create, disk=disk)
        root = Path(root).absolute()
        if root.exists() and not root.is_dir():
            raise InvalidInput(f"{root} is not a folder", hint="give a folder for the store")
        place = place or LocalPlace(root, disk)
        if create:
            with typed(str(root)):
                (root / VERSIONS).mkdir(parents=True, exist_ok=True)
        found = make_run(place, clock) if create else read_run(place)
        if run is not None and run != found.run:
            raise ConflictError(
                f"{place.url} holds run {found.run}, not {run}", hint="give each run a place of its own"
            )
        store = Store(root, found, place=place, disk=disk, clock=clock, shard_nbytes=shard_nbytes)
        store.address = str(address) if isinstance(address, str) and is_store_url(address) else place.url
        try:
            store.refresh()
            store.log.check_gap(store.state)
        except (FormatError, IntegrityError) as error:
            logger.warning("the log of %s is damaged: %s", place.url, error)
            store.damage = error
        return store

    @property
    def is_here(self) -> bool:
        """Is the place the folder in which this process stages?"""
        return staging.is_here(self)

    @property
    def copied(self) -> bool:
        """Was this store made elsewhere and copied here? It can be read; a writer is refused."""
        return is_copy(self.place, self.run)

    def adopt_copy(self, *, fork: bool = False) -> str:
        """Say that a copy is the store now; gives its run. `fork`: the original lives on, so this one gets a
        run of its own. All other handles have to be opened anew then.
        """
        with self._lock:
            self.run = adopt_copy(self.place, self.clock, fork=fork).run
            self.log = Log(self.place, self.run)
            self.state = LedgerState(self.run)
            self.read_log()
            return self.run

    def close(self) -> None:
        """Close the catalogue. Idempotent."""
        self.catalog.close()

    # Reading ------------------------------------------------------------------------------------------------

    def read_log(self) -> LedgerState:
        """The state of the log as it is now. Raises `FormatError` for a damaged entry, `ConflictError` when
        another store took this one's place.
        """
        with self._lock:
            # One after another: what comes before a damaged entry is known all the same.
            known = self.state.seq
            for state in self.log.on_from(self.state):
                if known and self.state.seq == known:
                    self._check_run()
                self.state = state
            return self.state

    def _check_run(self) -> None:
        if (found := read_run(self.place).run) != self.run:
            raise ConflictError(
                f"{self.place.url} holds another store now: run {found}, not {self.run}",
                hint="open it anew; what was read from the old one stays as it is",
            )

    def refresh(self) -> int | None:
        """Read the entries that are new in the log; gives the newest version, None in an empty store."""
        return len(self.read_log()) or None

    def latest(self) -> int | None:
        """Newest version as of the last `refresh`; yanked and abandoned ones count."""
        return len(self.state) or None

    def record(self, version: int) -> VersionRecord:
        """One version. Raises `VersionNotFound`."""
        entry = self._known(version)
        return record_of(self.state, entry, self._acks().get(version, ()))

    def versions(self) -> list[VersionRecord]:
        """All versions, oldest first, retired ones included."""
        state, acks = self.read_log(), self._acks()
        return [record_of(state, entry, acks.get(entry.version, ())) for entry in state.versions()]

    def manifest(self, version: int) -> Manifest:
        """All tensors of a version with their digests. Raises `VersionNotFound`, `VersionGone`,
        `IntegrityError`.
        """
        self._known(version)
        return self.reading.manifest(version)

    def load(
        self, version: int, *, like: Literal["numpy", "torch"] = "numpy", held: bool = False
    ) -> dict[str, Any]:
        """Name -> array, bit-exact and verified; mapped copy-on-write, or all in memory (`held`), so writing
        to it changes no file. Raises `VersionNotFound`, `VersionGone`, `IntegrityError`.
        """
        self._known(version)
        return self.reading.load(version, like=like, held=held)

    def fetch_delta(self, version: int, have: int | None = None) -> Delta:
        """What turns the bytes of `have` (default: the version's base) into those of `version`, verified.

        A chain is merged into one; backward, it is the exact difference of the two. A delta whose `base` is
        None holds every tensor in full: the version has no base, or has no way from `have`.
        """
        self._known(version)
        if have is not None:
            self._known(have)
        return self.reading.fetch(version, have)

    def attachments(self, version: int) -> dict[str, Path]:
        """Name -> verified file, read only. Raises `VersionNotFound`, `VersionGone`, `IntegrityError`."""
        self._known(version)
        if version in self.state.detached:
            raise VersionGone(
                f"the attachments of version {version} were let go", hint="take those of recover()"
            )
        blobs = self.reading.stored(version).named("attachment")
        return {Path(blob.name).name: self.reading.blob_path(version, blob) for blob in blobs}

    def model_files(self, version: int) -> list[Path]:
        """Config and tokenizer files that go with a version; empty when none were ever given."""
        self._known(version)
        return model_files_of(self.reading, self.state, version)

    def recover(self) -> Recovered:
        """The newest version on the line of the newest that has attachments, is not yanked and is still
        there.

        One whose files are damaged is passed over, with a warning and in `passed_over`. The next commit of a
        writer of this handle goes on from it: its parent is that version. Raises `VersionNotFound` when there
        is none, `IntegrityError` when none of them is whole.
        """
        found = recover(self)
        self.resumed = found.version
        return found

    def checkout(self, version: int, out: str | Path) -> None:
        """Write a version as a plain Hugging Face folder, bit-exact; `InvalidInput` if `out` exists."""
        self._known(version)
        checkout(self.reading, self.state, self.disk, version, Path(out), self.shard_nbytes)

    def verify(self, deep: bool = False, repair: bool = False) -> VerifyReport:
        """Check every entry, folder, blob and chain like fsck; `deep` also every tensor's digest along every
        chain. `repair` first mends what another copy of the same bytes can mend (see `repair`).
        """
        if repair:
            mend(self)
        return with_mirror(verify(self, deep=deep), self.place)

    def repair(self) -> list[str]:
        """Mend what can be: entries out of the index, the index and the hint out of the log, anchors out of
        their chains, the catalogue. Gives what was done, in words.
        """
        return mend(self)

    # Writing ------------------------------------------------------------------------------------------------

    def writer(
        self, *, publish: Publish | None = None, commit_id_source: Callable[[], str] = new_id
    ) -> Writer:
        """A writer that stages in this store; `publish` makes its versions visible (default: this handle).

        Raises `InvalidInput` for a place that does not refuse a second file of one name, `FormatError` or
        `IntegrityError` for a damaged log, `ConflictError` for a copy of a store.
        """
        self.read_log()
        self.log.check_gap(self.state, thorough=True)
        refuse_half(self.place)
        refuse_copy(self.place, self.run)
        self.place.probe()
        sweep_for_writer(self)
        return Writer(
            self,
            publish=publish or self.publish_staged,
            commit_id_source=commit_id_source,
            shard_nbytes=self.shard_nbytes,
        )

    def publish_staged(self, request: CommitRequest) -> Published:
        """Make a staging in this store visible, for whichever process staged it; `request.epoch` is that
        trainer's.

        Raises `WriterFenced`, `ConflictError`, `InvalidInput`, `IntegrityError` (the staging is not what the
        request says), `StorageFull`, `Unavailable`.
        """
        folder = staging.locate(self.root, request.folder)
        with self._lock:
            state = self.read_log()
            self._check_run()
            known = state.by_commit(request.commit_id)
            if known is None or known.write_id != request.write_id:
                if known is None:
                    self.log.check_gap(state)
                    self._index()  # before there are versions: a catalogue that comes later was lost
                    staging.adopt(folder, self)
                    self._check_staged(request)
                done = self._commit(state, request, folder)
                entry, repeated = done.entry, done.repeated
            else:
                entry, repeated = known, False
        if not isinstance(entry, VersionEntry):
            raise TypeError("a commit ended in another entry")
        self._index(() if repeated else way_of(entry.version, request, self.clock()))
        return Published(record_of(self.state, entry, ()), repeated)

    def ack(self, ack: Ack, way: Mapping[str, float] | None = None) -> None:
        """Note that a subscriber's engine serves a version, and when it took the steps there (stage ->
        seconds since the Unix epoch). Raises `VersionNotFound`.
        """
        self._known(ack.version)
        ack = ack if ack.at else msgspec.structs.replace(ack, at=self.clock())
        times = {**(way or {}), "acknowledged": ack.at}
        events = [
            TraceEvent(version=ack.version, stage=stage, at=at, subscriber=ack.subscriber)
            for stage, at in times.items()
        ]
        self.catalog.ack(ack, events)

    def subscribers(self) -> list[Subscriber]:
        """Everyone who ever acknowledged."""
        return self.catalog.subscribers()

    def trace(self, *events: TraceEvent) -> None:
        """Note steps of versions on their way."""
        self.catalog.trace(*events)

    def events(self, version: int) -> list[TraceEvent]:
        """The way of a version so far. Raises `VersionNotFound`."""
        self._known(version)
        return self.catalog.events(version)

    # Within -------------------------------------------------------------------------------------------------

    def _known(self, version: int) -> VersionEntry:
        state = self.state if self.state.has(version) else self.read_log()
        return state.version(version)

    def _drive(self, machine: machines.Machine) -> machines.Done:
        refuse_half(self.place)
        try:
            return self.log.drive(machine)
        finally:
            if machine.state.seq > self.state.seq:
                self.state = machine.state

    def _commit(self, state: LedgerState, request: CommitRequest, folder: Path) -> machines.Done:
        try:
            return self._drive(machines.commit(state, request))
        except (ConflictError, InvalidInput, StorageFull):
            # It was adopted, so whoever staged it cannot remove it any more.
            staging.discard(folder, self)
            raise

    def _check_staged(self, request: CommitRequest) -> None:
        where, data = f"{self.place.url}/{request.folder}/{MANIFEST}", b""
        with suppress(Missing):
            data = self.place.read(f"{request.folder}/{MANIFEST}")
        if digest_of(data) != request.digest:
            raise IntegrityError(f"{where} is not the one to commit", hint="stage and commit again")

    def _acks(self) -> Mapping[int, tuple[Ack, ...]]:
        try:
            return self.catalog.acks()
        except sqlite3.Error as error:
            logger.warning("no acknowledgements: %s: %s", self.catalog.path, error)
            return {}

    def _index(self, events: Sequence[TraceEvent] = ()) -> None:
        try:
            self.catalog.index()
            if events:
                self.catalog.trace(*events)
        except (sqlite3.Error, OverflowError) as error:
            # The log has the commit; whatever ails the catalogue must not fail it.
            logger.warning("%s is not up to date: %s", self.catalog.path, error)
