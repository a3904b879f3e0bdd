"""The server's side of every method: one ledger lane, a bell for watchers, the roll of subscribers. No gRPC
in here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import weightline
from weightline.errors import ConflictError, FormatError, Unavailable, WeightlineError
from weightline.service import acks, wire
from weightline.service.fetching import LEASE_SECONDS, lease_for, reading_of
from weightline.service.subscribers import Roll
from weightline.store import Lease, Published, Store
from weightline.types import Ack, VersionRecord

log = logging.getLogger("weightline.server")

HEARTBEAT_SECONDS = 2.0

_T = TypeVar("_T")


class Host:
    """Serves one store. Methods are coroutines of one event loop; the store is touched by one thread only."""

    def __init__(self, store: Store, *, sync_timeout: float, runtime_dir: Path) -> None:
        self._store = store
        self._runtime_dir = runtime_dir
        self._lane = ThreadPoolExecutor(1, thread_name_prefix="weightline-ledger")
        self._watchers: set[asyncio.Event] = set()
        self._roll = Roll(sync_timeout=sync_timeout)
        self._leases: dict[str, Lease] = {}
        self._newest: int | None = None
        self.closing = False
        self.trouble: WeightlineError | None = None
        """Why the log cannot be read now; None when it can."""
        self.started_at = time.time()

    async def open(self) -> None:
        """Read the log and what earlier servers were told."""
        self._newest = await self._ledger(self._store.refresh)
        self._roll.restore(await self._ledger(self._noted))

    def shut(self) -> None:
        """Tell those who watch that this server goes down on purpose."""
        self.closing = True
        self._ring()

    async def close(self) -> None:
        """End the lane. Nothing that was answered is lost: the log has it."""
        self.shut()
        await asyncio.to_thread(self._lane.shutdown, wait=True)

    async def probe(self) -> None:
        """Follow the log for versions that others committed, until cancelled."""
        while True:
            try:
                self._learn(await self._ledger(self._store.refresh))
                self.trouble = None
            except (WeightlineError, OSError) as error:
                self._complain(error)
            await asyncio.sleep(self._store.place.poll_s)

    # methods

    async def hello(self, message: wire.Hello) -> wire.Welcome:
        if message.protocol != wire.PROTOCOL:
            raise FormatError(
                f"client {message.client} speaks protocol {message.protocol}, this server {wire.PROTOCOL}",
                hint=f"use weightline {weightline.__version__} on both sides",
            )
        return wire.Welcome(
            protocol=wire.PROTOCOL,
            run=self._store.run,
            root=str(self._store.root),
            store="" if self._store.is_here else self._store.address,
            runtime_dir=str(self._runtime_dir),
            pid=os.getpid(),
            release=weightline.__version__,
            newest=self._newest,
            heartbeat=HEARTBEAT_SECONDS,
        )

    async def publish(self, message: wire.Publish) -> Published:
        if message.run != self._store.run:
            raise ConflictError(
                f"{message.client} commits to run {message.run}, this server serves run {self._store.run}",
                hint="connect again: another store is served at this address now",
            )
        done = await self._ledger(partial(self._store.publish_staged, message.request))
        self._learn(done.record.version)
        again = " (repeated)" if done.repeated else ""
        log.info("version %d from %s%s", done.record.version, message.client, again)
        return done

    async def watch(self, message: wire.Watch) -> AsyncIterator[wire.Event]:
        bell = asyncio.Event()
        self._watchers.add(bell)
        if message.subscriber is not None:
            self._roll.joined(message.subscriber, now=time.time())
        try:
            while not self.closing:
                bell.clear()
                yield wire.Event(newest=self._newest)
                if message.subscriber is not None:
                    self._roll.seen(message.subscriber, now=time.time())
                try:
                    async with asyncio.timeout(HEARTBEAT_SECONDS):
                        await bell.wait()
                except TimeoutError:
                    continue
            yield wire.Event(newest=self._newest, closing=True)
        finally:
            self._watchers.discard(bell)
            if message.subscriber is not None:
                self._roll.left(message.subscriber, now=time.time())

    async def fetch(self, message: wire.Fetch) -> wire.FetchPlan:
        plan, lease = await self._ledger(partial(self._lease, message))
        now = time.time()
        self._leases = {key: held for key, held in self._leases.items() if held.expires_at > now}
        self._leases[lease.id] = lease
        self._roll.seen(message.subscriber, now=now)
        return plan

    async def release(self, message: wire.Release) -> wire.Empty:
        lease = self._leases.pop(message.lease, None)
        if lease is not None:
            await self._ledger(partial(self._store.release, lease))
        return wire.Empty()

    async def ack(self, message: wire.Acked) -> wire.Empty:
        ack = Ack(**{name: getattr(message, name) for name in Ack.__struct_fields__})
        await self._ledger(partial(acks.note, self._store, ack, message.way))
        self._roll.acked(ack, now=time.time())
        return wire.Empty()

    async def record(self, message: wire.One) -> VersionRecord:
        return await self._ledger(partial(self._read_record, message.version))

    async def versions(self, _message: wire.Empty) -> wire.Records:
        return wire.Records(records=tuple(await self._ledger(self._store.versions)))

    async def subscribers(self, _message: wire.Empty) -> wire.Subscribers:
        # Those who follow without a server, or did while none was up, ack in the catalogue.
        self._roll.restore(await self._ledger(self._noted))
        newest = self._newest
        states = self._roll.states(newest, self._committed_at, now=time.time())
        return wire.Subscribers(newest=newest, subscribers=states)

    # inside

    @property
    def newest(self) -> int | None:
        """Newest version in the log, as last read."""
        return self._newest

    @property
    def store(self) -> Store:
        return self._store

    def live(self) -> dict[str, int]:
        """Subscriber -> version that it serves, for those that retention must think of."""
        return self._roll.live(now=time.time(), within=LEASE_SECONDS)

    def _lease(self, message: wire.Fetch) -> tuple[wire.FetchPlan, Lease]:
        store = self._store
        reading = reading_of(store, message.version, message.have, full=message.full)
        lease = lease_for(store, reading, message.subscriber)
        folders = tuple(store.state.version(version).folder for version in reading.versions)
        plan = wire.FetchPlan(
            versions=reading.versions,
            folders=folders,
            nbytes=reading.nbytes,
            lease=lease.id,
            ttl=LEASE_SECONDS,
        )
        return plan, lease

    def _noted(self) -> list[Ack]:
        return list(acks.noted(self._store))

    def _read_record(self, version: int) -> VersionRecord:
        self._store.refresh()
        return self._store.record(version)

    def _committed_at(self, version: int) -> float:
        return float(self._store.state.version(version).at)

    async def _ledger(self, work: Callable[[], _T]) -> _T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._lane, work)

    def _learn(self, newest: int | None) -> None:
        if newest is not None and newest > (self._newest or 0):
            self._newest = newest
            self._ring()

    def _ring(self) -> None:
        for bell in self._watchers:
            bell.set()

    def _complain(self, error: WeightlineError | OSError) -> None:
        trouble = error if isinstance(error, WeightlineError) else _as_unavailable(error)
        if self.trouble is None or self.trouble.message != trouble.message:
            log.error("cannot read the log: %s (%s)", trouble.message, trouble.hint)
        self.trouble = trouble


def _as_unavailable(error: OSError) -> WeightlineError:
    return Unavailable(f"{error.filename}: {error.strerror}", hint="is the store's file system mounted?")
