"""The catalogue: an SQLite index beside the log. It may be deleted at any time: what the log and the
manifests know is rebuilt, and only acknowledgements and traces are lost.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from weightline.core.ledger import LedgerState, VersionEntry
from weightline.core.request import CommitRequest
from weightline.store.disk import OnStep, no_step
from weightline.types import Ack

logger = logging.getLogger(__name__)

NAME = "catalog.sqlite"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS versions (version INTEGER PRIMARY KEY, seq INTEGER NOT NULL, label TEXT NOT NULL,
  step INTEGER, parent INTEGER, base INTEGER, stored TEXT NOT NULL, nbytes INTEGER NOT NULL, at REAL NOT NULL,
  entry BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS acks (subscriber TEXT NOT NULL, version INTEGER NOT NULL, at REAL NOT NULL,
  verified TEXT NOT NULL, pause_ms REAL, detail TEXT NOT NULL, PRIMARY KEY (subscriber, version));
CREATE INDEX IF NOT EXISTS acks_by_version ON acks (version);
CREATE TABLE IF NOT EXISTS subscribers (name TEXT PRIMARY KEY, version INTEGER, seen REAL NOT NULL);
CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY, version INTEGER NOT NULL, stage TEXT NOT NULL,
  subscriber TEXT NOT NULL, at REAL NOT NULL, detail TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS events_by_version ON events (version);
"""
_BUSY_S = 10.0
TRACED = 1000
"""Versions whose traces are kept: they are for people who ask which side is slow now."""
T = TypeVar("T")
Row = tuple[object, ...]
Statement = tuple[str, list[Row]]
_REBUILT = "SELECT value FROM facts WHERE name = 'rebuilt_at'"


class TraceEvent(Struct, frozen=True, kw_only=True):
    """One step of one version on its way from the trainer to an engine."""

    version: int
    stage: str
    """commit, staged and published by the trainer; notified, fetched, verified, applied and acknowledged by
    each subscriber.
    """
    at: float
    subscriber: str = ""
    detail: str = ""


def way_of(version: int, request: CommitRequest, published: float) -> list[TraceEvent]:
    """The trainer's steps of a version."""
    times = (("commit", request.began), ("staged", request.staged), ("published", published))
    return [TraceEvent(version=version, stage=stage, at=at) for stage, at in times if at]


class Subscriber(Struct, frozen=True):
    """An engine's follower, as its acknowledgements tell."""

    name: str
    version: int | None
    seen: float


class Catalog:
    """One process's handle on `catalog.sqlite`. Safe to use from several threads; opened on first use.

    A damaged file is replaced by a new one, with a warning. Raises `sqlite3.Error` only for a disk that does
    not work.
    """

    def __init__(
        self,
        root: Path,
        state: Callable[[], LedgerState],
        clock: Callable[[], float],
        on_step: OnStep = no_step,
    ) -> None:
        self._on_step = on_step
        self.path = root / NAME
        self._state = state
        self._clock = clock
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._indexed = 0
        self._file = (0, 0)

    @property
    def rebuilt_at(self) -> float | None:
        """When the file was made anew although versions existed: acknowledgements from before are lost."""
        rows = self._rows(_REBUILT)
        return float(str(rows[0][0])) if rows else None

    def index(self) -> None:
        """Take in the versions that the log has and the catalogue lacks."""
        with self._lock:
            self._mended(self._take_in)

    def _take_in(self, connection: sqlite3.Connection) -> None:
        state = self._state()
        # Number by number: a commit must not cost more the longer the run is.
        rows = [_row(state.version(v), state.seq_of(v)) for v in range(self._indexed + 1, len(state) + 1)]
        if not rows:
            return
        # One transaction: thousands of versions are taken in within a second.
        self._transaction(connection, [("INSERT OR IGNORE INTO versions VALUES (?,?,?,?,?,?,?,?,?,?)", rows)])
        self._indexed = len(state)

    def ack(self, ack: Ack, way: Sequence[TraceEvent] = ()) -> None:
        """Note an acknowledgement, and the steps of the version on its way. The same one again is fine."""
        acked = (ack.subscriber, ack.version, ack.at, ack.verified, ack.pause_ms, ack.detail)
        seen = (
            "INSERT INTO subscribers VALUES (?, ?, ?) "
            "ON CONFLICT (name) DO UPDATE SET version = excluded.version, seen = excluded.seen"
        )
        self._write(
            [
                ("INSERT OR REPLACE INTO acks VALUES (?, ?, ?, ?, ?, ?)", [acked]),
                (seen, [(ack.subscriber, ack.version, ack.at)]),
                *_events(way),
            ]
        )

    def acks(self) -> dict[int, tuple[Ack, ...]]:
        """version -> acknowledgements, in the order of their arrival."""
        out: dict[int, list[Ack]] = {}
        for row in self._rows(
            "SELECT subscriber, version, verified, at, pause_ms, detail FROM acks ORDER BY at, rowid"
        ):
            ack = msgspec.convert(dict(zip(Ack.__struct_fields__, row, strict=True)), Ack)
            out.setdefault(ack.version, []).append(ack)
        return {version: tuple(acks) for version, acks in out.items()}

    def subscribers(self) -> list[Subscriber]:
        """Everyone who ever acknowledged, with the last version they took."""
        rows = self._rows("SELECT name, version, seen FROM subscribers ORDER BY name")
        return [
            msgspec.convert(dict(zip(("name", "version", "seen"), r, strict=True)), Subscriber) for r in rows
        ]

    def trace(self, *events: TraceEvent) -> None:
        """Note steps of versions. A step that was noted before is noted once. Only those of the newest
        `TRACED` versions are kept.
        """
        self._write(_events(events))

    def events(self, version: int) -> list[TraceEvent]:
        """Steps of a version, oldest first."""
        rows = self._rows(
            "SELECT version, stage, at, subscriber, detail FROM events WHERE version = ? ORDER BY at, id",
            (version,),
        )
        fields = TraceEvent.__struct_fields__
        return [msgspec.convert(dict(zip(fields, row, strict=True)), TraceEvent) for row in rows]

    def __del__(self) -> None:
        # A store that is dropped without `close` must not leave its connection to the garbage collector.
        connection = getattr(self, "_connection", None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Close the file. The next use opens it again."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
                self._indexed = 0

    def _rows(self, query: str, values: Row = ()) -> list[tuple[object, ...]]:
        with self._lock:
            if self._connection is None and not self.path.exists():
                return []
            return self._mended(lambda connection: connection.execute(query, values).fetchall())

    def _write(self, statements: list[Statement]) -> None:
        with self._lock:
            self._mended(lambda connection: self._transaction(connection, statements))

    def _transaction(self, connection: sqlite3.Connection, statements: list[Statement]) -> None:
        """All of it or nothing."""
        if len(statements) == 1 and len(statements[0][1]) == 1:
            connection.execute(statements[0][0], statements[0][1][0])
            return
        connection.execute("BEGIN IMMEDIATE")
        try:
            for query, rows in statements:
                connection.executemany(query, rows)
            self._on_step("commit the catalogue")
            connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise

    def _mended(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """`work`, once more on a new file if this one turns out to be damaged or to be gone."""
        if self._connection is not None and not self._in_place():
            logger.warning("%s is gone from its place and is opened anew", self.path)
            self.close()
        try:
            return work(self._open())
        except sqlite3.DatabaseError as error:
            if not _damaged(error):
                raise
            self._replace(error)
            return work(self._open())

    def _in_place(self) -> bool:
        """Is the file that is open still the one under this name? Else what is noted would go nowhere."""
        try:
            stat = self.path.stat()
        except OSError:
            return False
        return (stat.st_dev, stat.st_ino) == self._file and stat.st_size > 0

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None:
            return self._connection
        self._on_step("open the catalogue")
        connection = sqlite3.connect(
            self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            self._on_step("make the catalogue's tables")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.executescript(_SCHEMA)
            count = self._mark(connection)
            stat = self.path.stat()
        except BaseException:
            connection.close()
            raise
        self._connection, self._file = connection, (stat.st_dev, stat.st_ino)
        self._indexed = min(count, len(self._state()))
        return connection

    def _mark(self, connection: sqlite3.Connection) -> int:
        """Say in the file that it was made anew, if it was; gives the number of versions in it."""
        state = self._state()
        row = connection.execute("SELECT count(*) FROM versions").fetchone()
        # Told by what is in it: who made the file may not have lived to say that it is a new one.
        if row[0] == 0 and len(state) and not connection.execute(_REBUILT).fetchone():
            self._on_step("mark the catalogue as rebuilt")
            logger.warning("%s was missing and is rebuilt; acknowledgements and traces are lost", self.path)
            connection.execute(
                "INSERT OR REPLACE INTO facts VALUES ('rebuilt_at', ?)", (repr(self._clock()),)
            )
        return int(row[0])

    def _replace(self, error: sqlite3.DatabaseError) -> None:
        logger.warning("%s is damaged (%s) and is rebuilt", self.path, error)
        self.close()
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                self.path.with_name(self.path.name + suffix).unlink()
        self._indexed = 0
        self._take_in(self._open())


def _row(entry: VersionEntry, seq: int) -> Row:
    return (
        entry.version,
        seq,
        entry.label,
        entry.step,
        entry.parent,
        entry.base,
        entry.stored,
        entry.nbytes,
        entry.at,
        msgspec.json.encode(entry),
    )


def _events(events: Sequence[TraceEvent]) -> list[Statement]:
    if not events:
        return []
    insert = (
        "INSERT INTO events (version, stage, subscriber, at, detail) SELECT ?1, ?2, ?3, ?4, ?5 WHERE NOT "
        "EXISTS (SELECT 1 FROM events WHERE version = ?1 AND stage = ?2 AND subscriber = ?3)"
    )
    rows: list[Row] = [(e.version, e.stage, e.subscriber, e.at, e.detail) for e in events]
    oldest = max(event.version for event in events) - TRACED
    return [(insert, rows), ("DELETE FROM events WHERE version <= ?", [(oldest,)])]


def _damaged(error: sqlite3.DatabaseError) -> bool:
    name = getattr(error, "sqlite_errorname", "")
    return name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")) or "no such table" in str(error)
