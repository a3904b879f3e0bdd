"""Collection: retire what retention lets go, wait, delete.

Order matters: the retire entry first, then the leases are read again, then the bytes go. A reader takes its
lease first and looks for retirements afterwards. Whichever of the two comes second sees the other.
"""

from __future__ import annotations

import logging
import sqlite3
from typing import TYPE_CHECKING

from msgspec import Struct

from weightline.core.ledger import LedgerState
from weightline.core.plan import chain
from weightline.core.retention import RetentionDecision, decide
from weightline.store.records import recoverable

if TYPE_CHECKING:
    from weightline.store.store import Store

logger = logging.getLogger(__name__)


class CollectReport(Struct, frozen=True):
    """What a collection did."""

    decision: RetentionDecision
    retired: tuple[int, ...]
    """Announced now; deleted by a later call, once the grace period is over."""
    deleted: tuple[int, ...]
    held: str
    """Why nothing was retired or deleted, or empty."""
    failed: tuple[str, ...] = ()
    """Deletions that did not work; they are tried again next time."""


def collect(
    store: Store,
    *,
    max_versions: int | None,
    disk_budget: int | None,
    grace: float,
    hold_after_rebuild: float,
    dry_run: bool,
) -> CollectReport:
    """See `Store.collect`."""
    state = store.read_log()
    decision = decide(
        state,
        max_versions=max_versions,
        disk_budget=disk_budget,
        pinned=store.leases.pinned(),
        leased=store.leases.leased(),
        recovery=recoverable(state),
    )
    held = _held(store, hold_after_rebuild)
    if dry_run or held:
        return CollectReport(decision, (), (), held or "dry run")
    if decision.retire:
        reasons = {e.version: e.why for e in decision.explained}
        store.retire(decision.retire, reasons[decision.retire[-1]])
    deleted, failed = _delete(store, store.read_log(), grace)
    return CollectReport(decision, decision.retire, deleted, "", failed)


def _held(store: Store, hold: float) -> str:
    try:
        rebuilt = store.catalog.rebuilt_at
    except sqlite3.Error as error:
        return f"the catalogue cannot be read ({error})"
    if rebuilt is not None and store.clock() - rebuilt < hold:
        return "the catalogue was rebuilt a short while ago: who serves what is not known yet"
    return ""


def _needed(store: Store, state: LedgerState) -> set[int]:
    """Versions that a pin or lease needs although they are retired: it came just before the announcement."""
    roots = [v for v in (*store.leases.pinned(), *store.leases.leased()) if state.has(v)]
    return {link for root in roots for link in chain(state, root)}


def _delete(store: Store, state: LedgerState, grace: float) -> tuple[tuple[int, ...], tuple[str, ...]]:
    needed, now = _needed(store, state), store.clock()
    deleted, failed = [], []
    # Newest first: should this stop half way, what is left is still a chain from its anchor.
    for version, at in sorted(state.retired.items(), reverse=True):
        folder = store.root / state.version(version).folder
        if version in needed or at + grace > now or not folder.exists():
            continue
        try:
            store.reading.forget(version)
            store.disk.remove_tree(folder)
            deleted.append(version)
        except OSError as error:
            logger.warning("could not delete version %d in %s: %s", version, folder, error)
            failed.append(f"{folder}: {error.strerror}")
    return tuple(sorted(deleted)), tuple(failed)
