"""`connect(url)`: the same verbs behind every address."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from weightline.core.request import CommitRequest
from weightline.errors import FormatError, InvalidInput, StorageFull, StoreNotFound, Unavailable
from weightline.service import wire
from weightline.service.address import Address, check_socket_path, heard, parse
from weightline.service.direct import DirectLine, as_number
from weightline.service.rpc import Rpc
from weightline.service.watching import Watching
from weightline.store import Published, Store, Writer
from weightline.types import Ack, VersionRecord

if TYPE_CHECKING:
    from weightline.service.line import Line

_T = TypeVar("_T")

PUBLISH_SECONDS = 30.0
"""Bound on one publish, which checks and links a few small files; an answer that is lost is asked for again.
"""
CALL_SECONDS = 5.0
"""Bound on any other call; then the folder is asked instead."""
ABSENT_SECONDS = 1.0
"""How long a new handle waits where no server listens: one that starts at the same time needs a moment."""
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 1.0


def connect(
    url: str | Path,
    *,
    name: str | None = None,
    timeout: float | None = None,
    commit_timeout: float = 120.0,
) -> Line:
    """The line at `url`: `unix:///path/wl.sock`, `grpc://host:port` (a server on this host), `file:///dir`,
    a folder, `s3://container/prefix?endpoint=…` or `mirror:/one,/other` (no server).

    `name` makes this handle a subscriber that the server lists while it watches. A server that does not
    answer within `timeout` seconds (default: 5, or 1 where nobody listens) is `Unavailable`; later, commits
    wait for one that is away up to `commit_timeout` seconds, and everything that only reads goes on without
    it. Raises `StoreNotFound`, `InvalidInput` (the address; a store whose folder is not on this host).
    """
    address = parse(url)
    if address.scheme == "store":
        return DirectLine(Store.open(address.url))
    if address.scheme == "file":
        return DirectLine(Store.open(address.path))
    if address.scheme == "unix":
        check_socket_path(address.path)
    rpc = Rpc(address)
    client = name or f"{socket.gethostname()}-{os.getpid()}"
    try:
        hello = wire.Hello(protocol=wire.PROTOCOL, client=client)
        began = time.monotonic()
        within = CALL_SECONDS if timeout is None else timeout
        welcome = _until(
            began + within,
            threading.Event(),
            lambda: rpc.call("Hello", hello, wire.Welcome, timeout=max(0.1, min(within, CALL_SECONDS))),
            worth=lambda: timeout is not None or time.monotonic() < began + ABSENT_SECONDS or heard(address),
        )
        if welcome.protocol != wire.PROTOCOL:
            raise FormatError(
                f"{address} speaks protocol {welcome.protocol}, this client {wire.PROTOCOL}",
                hint=f"use weightline {welcome.release} here too",
            )
        store = _store_of(address, welcome)
    except BaseException:
        rpc.close()
        raise
    return ServedLine(address, rpc, store, client=client, subscriber=name, commit_timeout=commit_timeout)


def _store_of(address: Address, welcome: wire.Welcome) -> Store:
    if welcome.store:
        store = Store.open(welcome.store)
        if store.run != welcome.run:
            store.close()
            raise InvalidInput(
                f"{address} serves run {welcome.run}, but {welcome.store} holds run {store.run} from here",
                hint="give both the same endpoint and credentials",
            )
        return store
    remedy = "run on the server's host, or mount the store's folder here under the same path"
    try:
        store = Store.open(Path(welcome.root))
    except StoreNotFound as error:
        raise InvalidInput(
            f"{address}: its store {welcome.root} is not on this host, and this version sends no bytes",
            hint=remedy,
        ) from error
    if store.run != welcome.run:
        raise InvalidInput(
            f"{address} serves run {welcome.run}, but {welcome.root} here holds run {store.run}", hint=remedy
        )
    return store


class ServedLine(DirectLine):
    """A `Line` through a server on this host.

    Weights are staged straight into the store's folder and read from it; the server is asked to publish,
    rings for new versions and keeps the roll. While it is away reading goes on from the folder, waiting polls
    it, and commits wait for its return.
    """

    def __init__(
        self,
        address: Address,
        rpc: Rpc,
        store: Store,
        *,
        client: str,
        subscriber: str | None,
        commit_timeout: float,
    ) -> None:
        super().__init__(store)
        self._address = address
        self._rpc = rpc
        self._client = client
        self._commit_timeout = commit_timeout
        self._watching = Watching(rpc, self._feed, run=store.run, client=client, subscriber=subscriber)
        self._over = threading.Event()

    @property
    def connected(self) -> bool:
        """A server rings for this handle now; else waiting polls the store's folder."""
        return self._feed.ringing

    def wait_for_update(self, timeout: float | None = None, after: int | None = None) -> int | None:
        """`Line.wait_for_update`: rung by the server; by polling the folder while there is none."""
        self._watching.start()
        return super().wait_for_update(timeout, after)

    def record(self, version: int) -> VersionRecord:
        """`Line.record`."""
        found = self._if_up(
            lambda: self._call("Record", wire.One(version=as_number("version", version)), VersionRecord)
        )
        return found if found is not None else super().record(version)

    def versions(self) -> list[VersionRecord]:
        """`Line.versions`."""
        found = self._if_up(lambda: self._call("Versions", wire.Empty(), wire.Records))
        return list(found.records) if found is not None else super().versions()

    def subscribers(self) -> tuple[wire.Subscriber, ...]:
        """How far each subscriber has come, as the server sees it."""
        found = self._if_up(lambda: self._call("Subscribers", wire.Empty(), wire.Subscribers))
        return found.subscribers if found is not None else super().subscribers()

    def close(self) -> None:
        """`Line.close`: commits that were taken are finished first, those that wait for a server that is away
        are given up.
        """
        self._over.set()
        self._feed.close()
        self._watching.close()
        super().close()
        self._rpc.close()

    def _call(self, method: str, request: msgspec.Struct, reply: type[Any]) -> Any:
        return self._rpc.call(method, request, reply, timeout=CALL_SECONDS)

    def _if_up(self, work: Callable[[], _T]) -> _T | None:
        """What the server says; None while it is away: then the folder is asked."""
        try:
            return work()
        except Unavailable:
            return None

    @contextmanager
    def _held(self, version: int, have: int | None, *, full: bool) -> Iterator[None]:
        """As `DirectLine`, but the server takes the lease; while it is away, this handle does."""
        fetch = wire.Fetch(version=version, have=have, full=full, subscriber=self._client)
        plan = self._if_up(lambda: self._call("Fetch", fetch, wire.FetchPlan))
        if plan is None:
            with super()._held(version, have, full=full):
                yield
            return
        try:
            yield
        finally:
            release = wire.Release(lease=plan.lease)
            self._if_up(lambda: self._call("Release", release, wire.Empty))

    def _send_ack(self, ack: Ack, way: dict[str, float]) -> None:
        message = wire.Acked(**msgspec.structs.asdict(ack), way=way)
        if self._if_up(lambda: self._call("Ack", message, wire.Empty)) is None:
            super()._send_ack(ack, way)

    def _new_writer(self) -> Writer:
        return self._store.writer(publish=self._send)

    def _send(self, request: CommitRequest) -> Published:
        """One publish, repeated with the same commit_id until it is answered: it happens once however often
        it is asked for.
        """
        message = wire.Publish(run=self.run, request=request, client=self._client)
        deadline = time.monotonic() + self._commit_timeout
        folder = self.root / request.folder

        def publish() -> Published:
            return self._rpc.call("Publish", message, Published, timeout=PUBLISH_SECONDS)

        # A staging that was swept cannot be published by trying again: the caller has to stage anew.
        return _until(deadline, self._over, publish, worth=folder.exists)


def _until(
    deadline: float,
    over: threading.Event,
    work: Callable[[], _T],
    *,
    worth: Callable[[], bool] = lambda: True,
) -> _T:
    """Repeats `work` while it is `Unavailable` and `worth` it, with growing pauses; its last error after
    `deadline`.
    """
    pause = FIRST_PAUSE
    while True:
        try:
            return work()
        except StorageFull:
            raise
        except Unavailable:
            left = deadline - time.monotonic()
            if left <= 0 or not worth() or over.wait(min(pause, left)):
                raise
            pause = min(2 * pause, LONGEST_PAUSE)
