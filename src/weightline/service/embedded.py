"""`CheckpointEngine`: the whole line inside one process, store and cleaner included."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from weightline.errors import InvalidInput
from weightline.service import acks
from weightline.service.address import store_of
from weightline.service.cleaner import Cleaner, check_settings
from weightline.service.direct import DirectLine
from weightline.service.fetching import LEASE_SECONDS
from weightline.service.subscribers import Roll
from weightline.store import Store

if TYPE_CHECKING:
    from weightline.codec import Delta


class CheckpointEngine(DirectLine):
    """A `Line` on a store, which is created when missing: a folder of this host, `s3://container/prefix` or
    `mirror:/a,/b`. The embedded form of the server.

    `start()` (or `with`) begins background cleaning: every `cleanup_interval` seconds, with at most
    `max_versions` anchors and `disk_budget` bytes kept (default: a quarter of what is free at start, no bound
    on S3). The
    verbs work before it too. A subscriber that has not acked within `sync_timeout` seconds counts as lagging.
    With `attachments_every` n, attachments are kept on every n-th version only: a commit within n - 1
    versions of one that has some drops those that it is given.
    Raises `InvalidInput` for settings that cannot be, `FormatError` for a store of another format.
    """

    def __init__(
        self,
        storage_path: str | Path,
        max_versions: int = 20,
        sync_timeout: float = 30.0,
        cleanup_interval: float = 60.0,
        disk_budget: int | None = None,
        attachments_every: int = 1,
    ) -> None:
        check_settings(
            max_versions=max_versions,
            disk_budget=disk_budget,
            cleanup_interval=cleanup_interval,
            sync_timeout=sync_timeout,
        )
        where = store_of(storage_path)
        self._attachments_every = check_every(attachments_every)
        super().__init__(Store.open(where, create=True), sync_timeout=sync_timeout)
        self._cleaner = Cleaner(
            where,
            max_versions=max_versions,
            disk_budget=disk_budget,
            interval=cleanup_interval,
            name="embedded",
            live=self._live,
        )
        self._state_lock = threading.Lock()
        self._state = "new"

    def start(self) -> Self:
        """Begin background cleaning. Idempotent; raises `InvalidInput` after `close`."""
        with self._state_lock:
            if self._state == "closed":
                raise InvalidInput(
                    "this CheckpointEngine is closed", hint="make a new one on the same storage_path"
                )
            if self._state == "new":
                self._cleaner.start()
                self._state = "started"
        return self

    def close(self) -> None:
        """Finish the commits that were taken, end every thread. Idempotent."""
        with self._state_lock:
            self._state = "closed"
        super().close()
        self._cleaner.close()

    def _commit_now(self, weights: Any, options: Mapping[str, Any]) -> int:
        if options.get("attachments") and not self._attachments_due(options.get("commit_id")):
            options = {**options, "attachments": None}
        return super()._commit_now(weights, options)

    def _attachments_due(self, commit_id: str | None) -> bool:
        """Told by the log alone: the same after a restart, and for a commit that is repeated."""
        state = self._store.read_log()
        done = state.by_commit(commit_id) if commit_id else None
        newest = done.version - 1 if done is not None else len(state)
        since = range(max(1, newest - self._attachments_every + 2), newest + 1)
        return not any(state.version(version).attachments for version in since)

    def _live(self) -> dict[str, int]:
        roll = Roll(sync_timeout=self._sync_timeout)
        roll.restore(acks.noted(self._store))
        return roll.live(now=time.time(), within=LEASE_SECONDS)

    def __enter__(self) -> Self:
        return self.start()


def check_every(every: int) -> int:
    """`every` when it counts versions. Raises `InvalidInput`."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise InvalidInput(f"attachments_every is {every!r}", hint="give a number of versions, at least 1")
    return every


def compute_delta(
    current: Mapping[str, Any], last_committed: Mapping[str, Any], threshold: float = 0
) -> Delta:
    """What changed between two sets of weights (name -> `numpy.ndarray` or `torch.Tensor`), for `commit` to
    take.

    Names, shapes and dtypes must be equal, else `InvalidInput` lists every difference. `threshold` 0 compares
    bits and loses nothing. Greater than 0, an element whose relative change is at most `threshold` counts as
    unchanged: then the committed version differs from `current` in those elements.
    """
    from weightline.codec import diff

    return diff(last_committed, current, threshold=threshold)
