"""A line without a server: straight on the store's folder. `file:///dir`, and the ground under the other
doors.
"""

from __future__ import annotations

import operator
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from weightline.errors import InvalidInput, Unavailable
from weightline.service import acks
from weightline.service.feed import Feed
from weightline.service.fetching import lease_for, reading_of
from weightline.service.lane import CommitLane
from weightline.service.line import Weights
from weightline.service.subscribers import Roll
from weightline.service.wire import Subscriber
from weightline.store import Store, Writer
from weightline.types import Ack, Verification, VersionRecord

if TYPE_CHECKING:
    from weightline.codec import Delta
    from weightline.store import Manifest, Recovered


_WAYS = 64
"""Versions whose way a handle remembers until they are acknowledged."""


class DirectLine:
    """The verbs of `Line` on a store's folder. Opening and reading fences nobody; the first commit takes the
    epoch.
    """

    def __init__(self, store: Store, *, sync_timeout: float = 30.0) -> None:
        self._store = store
        self._sync_timeout = sync_timeout
        self._owner = f"{socket.gethostname()}-{os.getpid()}"
        self._writer: Writer | None = None
        self._ways: dict[int, dict[str, float]] = {}
        """version -> stage -> when, as this handle saw it; told with the ack."""
        self._ways_lock = threading.Lock()
        self._feed = Feed(store.refresh, store.place.poll_s)
        self._lane = CommitLane(self._commit_now, name="weightline-commit")

    @property
    def run(self) -> str:
        """Id of the run that the store belongs to."""
        return self._store.run

    @property
    def root(self) -> Path:
        """The store's folder; that of this host for a store that lies elsewhere."""
        return self._store.root

    @property
    def address(self) -> str:
        """What `Store.open` takes to open the same store: its folder, or a URL."""
        return self._store.address

    def commit(
        self,
        weights: Weights | str | Path | Delta,
        *,
        step: int | None = None,
        partial: bool = False,
        anchor: bool = False,
        attachments: Mapping[str, Path | str | bytes] | None = None,
        label: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        model_files: str | Path | None = None,
        commit_id: str | None = None,
        check_finite: bool = False,
    ) -> int:
        """`Line.commit`: after every commit that this handle was asked for before."""
        options: dict[str, Any] = {
            "step": None if step is None else as_number("step", step),
            "partial": partial,
            "anchor": anchor,
            "attachments": attachments,
            "label": label,
            "metadata": metadata,
            "model_files": model_files,
            "commit_id": commit_id,
            "check_finite": check_finite,
        }
        return self._lane.run(weights, options)

    @property
    def damaged(self) -> str | None:
        """What was wrong with the newest version when this handle committed last: its commit was then made an
        anchor, so that engines find a version that is whole. None when nothing was.
        """
        found = self._writer.damaged if self._writer is not None else None
        return None if found is None else str(found)

    def commit_async(self, weights: Weights, **options: Any) -> Future[int]:
        """`Line.commit_async`: `weights` may change as soon as this returns.

        Attachments that are given as paths are read in the background: leave those files alone until the
        future is done. A failure is raised by the future, and once more by the next commit of this handle.
        """
        unknown = sorted(set(options) - COMMIT_OPTIONS)
        if unknown:
            raise InvalidInput(
                f"commit_async: unknown option {', '.join(unknown)}",
                hint=f"the options are those of commit: {', '.join(sorted(COMMIT_OPTIONS))}",
            )
        return self._lane.submit(weights, dict(options))

    def wait_for_update(self, timeout: float | None = None, after: int | None = None) -> int | None:
        """`Line.wait_for_update`: rung by commits of this handle, found by probing the log for all others."""
        newer = self._feed.wait(timeout, None if after is None else as_number("after", after))
        if newer is not None:
            self._passed(newer, "notified")
        return newer

    def fetch_delta(self, version: int, have: int | None = None) -> Delta:
        """`Line.fetch_delta`."""
        version = as_number("version", version)
        have = None if have is None else as_number("have", have)
        self._passed(version, "notified")
        with self._held(version, have, full=False):
            delta = self._store.fetch_delta(version, have)
        self._passed(version, "fetched")
        return delta

    def ack(
        self,
        version: int,
        subscriber: str,
        *,
        verified: Verification = "none",
        pause_ms: float | None = None,
        detail: str = "",
        trace: Mapping[str, float] | None = None,
    ) -> None:
        """`Line.ack`."""
        version = as_number("version", version)
        ack = Ack(
            subscriber=subscriber,
            version=version,
            verified=verified,
            at=time.time(),
            pause_ms=pause_ms,
            detail=detail,
        )
        way = {**self._ways.get(version, {}), **acks.check_way(trace or {})}
        self._send_ack(acks.check(ack), way)

    def latest(self) -> int | None:
        """`Line.latest`."""
        return self._store.refresh()

    def record(self, version: int) -> VersionRecord:
        """`Line.record`."""
        self._store.refresh()
        return self._store.record(as_number("version", version))

    def versions(self) -> list[VersionRecord]:
        """`Line.versions`."""
        self._store.refresh()
        return self._store.versions()

    def manifest(self, version: int) -> Manifest:
        """`Line.manifest`."""
        self._store.refresh()
        return self._store.manifest(as_number("version", version))

    def load(
        self, version: int, *, like: Literal["numpy", "torch"] = "numpy", held: bool = False
    ) -> dict[str, Any]:
        """`Line.load`."""
        version = as_number("version", version)
        self._passed(version, "notified")
        with self._held(version, None, full=True):
            weights = self._store.load(version, like=like, held=held)
        self._passed(version, "fetched")
        return weights

    def recover(self) -> Recovered:
        """`Line.recover`."""
        self._store.refresh()
        return self._store.recover()

    def subscribers(self) -> tuple[Subscriber, ...]:
        """How far each subscriber has come; "lagging" after `sync_timeout` seconds without the ack."""
        newest = self._store.refresh()
        roll = Roll(sync_timeout=self._sync_timeout)
        roll.restore(acks.noted(self._store))
        return roll.states(newest, lambda v: self._store.record(v).committed_at, now=time.time())

    def close(self) -> None:
        """`Line.close`: commits that were taken are finished first."""
        self._feed.close()
        self._lane.close()
        if self._writer is not None:
            self._writer.close()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # inside; the lane lets one commit in at a time

    def _commit_now(self, weights: Any, options: Mapping[str, Any]) -> int:
        if self._writer is None:
            self._writer = self._new_writer()
        version = self._writer.commit(weights, **options).version
        self._feed.announce(version)
        return version

    def _new_writer(self) -> Writer:
        return self._store.writer()

    def _send_ack(self, ack: Ack, way: dict[str, float]) -> None:
        acks.note(self._store, ack, way)

    def _passed(self, version: int, stage: str) -> None:
        """This handle saw a version get there, now; the first time counts."""
        with self._ways_lock:
            self._ways.setdefault(version, {}).setdefault(stage, time.time())
            while len(self._ways) > _WAYS:
                del self._ways[next(iter(self._ways))]

    @contextmanager
    def _held(self, version: int, have: int | None, *, full: bool) -> Iterator[None]:
        """Keeps what is read from being deleted meanwhile."""
        reading = reading_of(self._store, version, have, full=full)
        lease = None
        # A disk that is full or read-only keeps nobody from reading: retention has a grace period too.
        with suppress(Unavailable):
            lease = lease_for(self._store, reading, self._owner)
        try:
            yield
        finally:
            if lease is not None:
                self._store.release(lease)


def as_number(what: str, value: Any) -> int:
    """A version or step as a plain int; numpy integers are taken, anything else is `InvalidInput` naming
    `what`.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise InvalidInput(f"{what} is {value!r:.80}", hint="give a whole number") from None


COMMIT_OPTIONS = frozenset(
    {
        "step",
        "partial",
        "anchor",
        "attachments",
        "label",
        "metadata",
        "model_files",
        "commit_id",
        "check_finite",
    }
)
