"""What keeps versions and what lets them go: leases, pins, yanks, retention. A part of `Store`."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from weightline.core import commit as machines
from weightline.core.ledger import LedgerState, VersionEntry
from weightline.core.retention import RetentionDecision
from weightline.errors import VersionGone
from weightline.store import staging
from weightline.store.collect import CollectReport, collect, explain
from weightline.store.leases import Lease, Leases
from weightline.store.leftovers import sweep_drafts
from weightline.store.ranks import sweep_receipts
from weightline.store.writer import new_id

if TYPE_CHECKING:
    from weightline.store.store import Store


class Keeping(ABC):
    """The half of `Store` that decides what stays; the abstract methods are the other half's."""

    root: Path
    state: LedgerState
    clock: Callable[[], float]
    leases: Leases
    _lock: threading.RLock
    _free_at_start: int | None

    @abstractmethod
    def read_log(self) -> LedgerState:
        """See `Store`."""

    @abstractmethod
    def _known(self, version: int) -> VersionEntry: ...

    @abstractmethod
    def _drive(self, machine: machines.Machine) -> machines.Done: ...

    @property
    def _store(self) -> Store:
        return cast("Store", self)

    def yank(self, version: int, reason: str = "") -> None:
        """Tell every engine not to serve a version. Raises `VersionNotFound`."""
        with self._lock:
            state = self.read_log()
            machine = machines.yank(state, version, write_id=new_id(), at=self.clock(), reason=reason)
            self._drive(machine)

    def retire(self, versions: Collection[int], reason: str) -> None:
        """Announce that the bytes of `versions` go. `collect` does this; nothing is deleted yet."""
        with self._lock:
            state, wanted, at = self.read_log(), tuple(sorted(versions)), self.leases.now()
            self._drive(machines.retire(state, wanted, write_id=new_id(), at=at, reason=reason))

    def thin(self, versions: Collection[int], form: Literal["anchor", "attachments"], reason: str) -> None:
        """Announce that the anchors, or attachments, of versions that stay go. `collect` does this."""
        with self._lock:
            state, wanted, at = self.read_log(), tuple(sorted(versions)), self.leases.now()
            self._drive(machines.thin(state, wanted, form=form, write_id=new_id(), at=at, reason=reason))

    def lease(self, versions: Collection[int], owner: str, ttl: float) -> Lease:
        """Keep `versions` readable for `ttl` seconds. Raises `VersionNotFound`, `VersionGone` (it was too
        late).
        """
        for version in versions:
            self._known(version)
        lease = self.leases.take(versions, owner, ttl)
        # Looking for retirements only now closes the gap: whoever retires looks for leases after announcing
        # it.
        if late := [v for v in versions if v in self.read_log().retired]:
            self.leases.release(lease)
            raise VersionGone(f"version {late[0]} is retired", hint="take a newer version")
        return lease

    def release(self, lease: Lease) -> None:
        """End a lease. Idempotent."""
        self.leases.release(lease)

    def pin(self, version: int) -> None:
        """Keep a version for good. Raises `VersionNotFound`, `VersionGone`."""
        self._known(version)
        self.leases.pin(version)
        if version in self.read_log().retired:
            self.leases.unpin(version)
            raise VersionGone(f"version {version} is retired", hint="pin a newer version")

    def unpin(self, version: int) -> None:
        """The inverse. Idempotent."""
        self.leases.unpin(version)

    def default_disk_budget(self) -> int | None:
        """A quarter of the room that the store and free space had together when this handle was opened; None
        (no bound) where room has none, as on S3.
        """
        if self._free_at_start is None:
            return None
        state = self.state
        held = sum(e.nbytes + e.attachment_nbytes for e in state.versions() if e.version not in state.retired)
        return max(1, (self._free_at_start + held) // 4)

    def collect(
        self,
        *,
        max_versions: int | None = None,
        disk_budget: int | None = None,
        grace: float = 60.0,
        hold_after_rebuild: float = 600.0,
        dry_run: bool = False,
    ) -> CollectReport:
        """Retire what the bounds do not allow, and delete what was retired `grace` seconds ago and nobody
        leases.
        """
        return collect(
            self._store,
            max_versions=max_versions,
            disk_budget=self.default_disk_budget() if disk_budget is None else disk_budget,
            grace=grace,
            hold_after_rebuild=hold_after_rebuild,
            dry_run=dry_run,
        )

    def explain_retention(
        self, *, max_versions: int | None = None, disk_budget: int | None = None
    ) -> RetentionDecision:
        """What `collect` would let go under these bounds, and why each version stays; changes nothing."""
        budget = self.default_disk_budget() if disk_budget is None else disk_budget
        return explain(self._store, max_versions, budget)

    def sweep(self) -> list[str]:
        """Remove the drafts and stagings of dead processes of this host; gives the folders of stagings."""
        sweep_drafts(self._store)
        gone = staging.sweep(self._store)
        sweep_receipts(self._store)
        return gone

    # Index --------------------------------------------------------------------------------------------------
