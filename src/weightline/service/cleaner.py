"""The background cleaner: retention and abandoned stagings, one process at a time."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

from weightline.errors import InvalidInput, WeightlineError
from weightline.service.fetching import LEASE_SECONDS
from weightline.service.presence import OwnerLock, seat_of
from weightline.store import Lease, Store

log = logging.getLogger("weightline.cleaner")

LOCK_NAME = "cleaner.lock"
SEAT_SECONDS = 900.0
"""A cleaner of another host that died in a pass is waited for so long."""


class Cleaner:
    """A thread that cleans every `interval` seconds, on a store handle of its own.

    `live` tells subscriber -> version it serves: each is leased before anything is retired, so that retention
    never removes what a live subscriber still needs. A pass that fails is a warning; the next one tries
    again.
    """

    def __init__(
        self,
        store: str | Path,
        *,
        max_versions: int,
        disk_budget: int | None,
        interval: float,
        name: str,
        live: Callable[[], dict[str, int]] = dict,
    ) -> None:
        check_settings(max_versions=max_versions, disk_budget=disk_budget, cleanup_interval=interval)
        self._where = store
        self._max_versions = max_versions
        self._disk_budget = disk_budget
        self._interval = interval
        self._name = name
        self._live = live
        self._store: Store | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.passes = 0
        """Passes that were completed."""

    def start(self) -> None:
        """Begin. The first pass comes after one interval, so that starting is never slow."""
        self._thread = threading.Thread(
            target=self._work, name=f"weightline-cleaner-{self._name}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread after the pass that is under way. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._drop()

    def _work(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                self.clean()
            except (WeightlineError, OSError, sqlite3.Error) as error:
                log.warning("cleaning %s failed, next try in %g s: %s", self._where, self._interval, error)
                self._drop()

    def clean(self) -> bool:
        """One pass. False when another process cleans now."""
        # Kept open between passes: the log is read once, the default disk budget is the first.
        store = self._store = self._store or Store.open(self._where)
        lock = OwnerLock.take(store.root / LOCK_NAME)
        if lock is None:
            return False
        seat = seat_of(store, "cleaner", SEAT_SECONDS)
        try:
            if seat is not None and (holder := seat.take()) is not None:
                log.info("%s cleans %s now", holder.by, self._where)
                return False
            store.refresh()
            leases: list[Lease] = []
            try:
                for name, version in sorted(self._live().items()):
                    # What is retired already is beyond keeping; that engine will take a full version.
                    if version not in store.state.retired:
                        leases.append(store.lease((version,), owner=f"subscriber:{name}", ttl=LEASE_SECONDS))
                store.collect(max_versions=self._max_versions, disk_budget=self._disk_budget)
                store.sweep()
            finally:
                for lease in leases:
                    store.release(lease)
        finally:
            if seat is not None:
                seat.release()
            lock.release()
        self.passes += 1
        return True

    def _drop(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


def check_settings(
    *, max_versions: int, disk_budget: int | None, cleanup_interval: float, sync_timeout: float = 1.0
) -> None:
    """Raises `InvalidInput` naming the setting that cannot be."""
    if isinstance(max_versions, bool) or not isinstance(max_versions, int) or max_versions < 1:
        raise InvalidInput(f"max_versions is {max_versions!r}", hint="keep at least 1 version")
    if disk_budget is not None and disk_budget < 1:
        raise InvalidInput(f"disk_budget is {disk_budget!r}", hint="give bytes, at least 1, or None")
    for name, value in (("cleanup_interval", cleanup_interval), ("sync_timeout", sync_timeout)):
        if not 0 < value < threading.TIMEOUT_MAX:
            raise InvalidInput(f"{name} is {value!r}", hint="give seconds, more than 0")
