"""The commit lane of one handle: commits happen one after another, in the order of the calls, in the caller
or in the background.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from weightline.errors import InvalidInput
from weightline.service.snapshot import snapshot

Commit = Callable[[Any, Mapping[str, Any]], int]

MAX_PENDING = 2
"""Snapshots that may wait at once: each is a whole copy of the weights, so a trainer faster than its disk
must wait, not swell.
"""


class _Queued(NamedTuple):
    ticket: int
    weights: Any
    options: Mapping[str, Any]
    future: Future[int]


class CommitLane:
    """Runs `commit(weights, options)` for one handle.

    A commit that failed in the background is raised twice: by its future, and by the next call here, so that
    a loop that never looks at its futures cannot go on for hours without committing anything.
    """

    def __init__(self, commit: Commit, *, name: str) -> None:
        self._commit = commit
        self._pid = os.getpid()
        self._name = name
        self._cond = threading.Condition()
        self._next_ticket = 0
        self._turn = 0
        self._queue: deque[_Queued] = deque()
        self._pending = 0
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def run(self, weights: Any, options: Mapping[str, Any]) -> int:
        """Commit in this thread, after every commit that was asked for before."""
        ticket = self._enter()
        try:
            self._await(ticket)
            return self._commit(weights, options)
        finally:
            self._leave(ticket)

    def submit(self, weights: Any, options: Mapping[str, Any]) -> Future[int]:
        """Take a snapshot in this thread and commit it in the background. Waits while `MAX_PENDING` snapshots
        are not committed yet.
        """
        with self._cond:
            self._check()
            self._cond.wait_for(lambda: self._pending < MAX_PENDING or self._closed)
            self._check()
            self._pending += 1
        try:
            frozen = snapshot(weights) if isinstance(weights, Mapping) else weights
            future: Future[int] = Future()
            with self._cond:
                self._check()
                queued = _Queued(self._take_ticket(), frozen, options, future)
                self._queue.append(queued)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                    self._thread.start()
                self._cond.notify_all()
        except BaseException:
            with self._cond:
                self._pending -= 1
                self._cond.notify_all()
            raise
        return future

    def close(self) -> None:
        """Refuse new commits, finish those that were taken, end the thread. Idempotent."""
        with self._cond:
            self._closed = True
            self._cond.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._cond:
            self._cond.wait_for(lambda: self._turn == self._next_ticket)

    def _enter(self) -> int:
        with self._cond:
            self._check()
            return self._take_ticket()

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidInput(
                f"this handle belongs to process {self._pid}; this is a fork of it",
                hint="open the store in the child to read; one process commits",
            )
        if self._closed:
            raise InvalidInput("this handle is closed", hint="open the store again to commit")
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _take_ticket(self) -> int:
        self._next_ticket += 1
        return self._next_ticket - 1

    def _await(self, ticket: int) -> None:
        with self._cond:
            self._cond.wait_for(lambda: self._turn == ticket)

    def _leave(self, ticket: int) -> None:
        with self._cond:
            # An interrupt may end the wait of a caller whose turn it is not: the turn still has to pass it
            # by, in order.
            self._cond.wait_for(lambda: self._turn == ticket)
            self._turn += 1
            self._cond.notify_all()

    def _work(self) -> None:
        while True:
            with self._cond:
                self._cond.wait_for(lambda: bool(self._queue) or self._closed)
                if not self._queue:
                    return
                queued = self._queue.popleft()
            self._await(queued.ticket)
            try:
                self._settle(queued)
            finally:
                with self._cond:
                    self._pending -= 1
                self._leave(queued.ticket)
            del queued

    def _settle(self, queued: _Queued) -> None:
        if not queued.future.set_running_or_notify_cancel():
            return
        try:
            version = self._commit(queued.weights, queued.options)
        except BaseException as error:  # noqa: BLE001 - whatever it was, it belongs to the caller, who is in another thread
            with self._cond:
                self._failure = error
            queued.future.set_exception(error)
        else:
            queued.future.set_result(version)
