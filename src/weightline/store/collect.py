"""Collection: announce what retention lets go, wait, delete.

Order matters: the entry (retire or thin) first, then the leases are read again, then the bytes go. A reader
takes its lease first and looks for retirements afterwards. Whichever of the two comes second sees the other.
"""

from __future__ import annotations

import logging
import sqlite3
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from weightline.core.ledger import LedgerState
from weightline.core.plan import chain
from weightline.core.retention import RetentionDecision, decide
from weightline.errors import FormatError, IntegrityError, Unavailable
from weightline.store import manifest as manifests
from weightline.store.manifest import Role
from weightline.store.place import Missing, Place
from weightline.store.records import recoverable

if TYPE_CHECKING:
    from weightline.store.store import Store

logger = logging.getLogger(__name__)

WANTED = "anchor-wanted.json"
"""The newest version when retention found that an anchor would free room: the next commit makes one."""
_FORMS: dict[str, tuple[Role, ...]] = {"anchor": ("anchor", "index"), "attachments": ("attachment",)}


class Wanted(Struct, frozen=True):
    """Content of `anchor-wanted.json`. Only a wish: lost or damaged, it is made again."""

    version: int


class CollectReport(Struct, frozen=True):
    """What a collection did."""

    decision: RetentionDecision
    retired: tuple[int, ...]
    """Announced now; deleted by a later call, once the grace period is over."""
    deleted: tuple[int, ...]
    held: str
    """Why nothing was retired or deleted, or empty."""
    thinned: tuple[int, ...] = ()
    """Versions whose anchors or attachments were announced to go now; they stay readable."""
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
    decision = explain(store, max_versions, disk_budget)
    held = _held(store, hold_after_rebuild)
    if dry_run or held:
        return CollectReport(decision, (), (), held or "dry run")
    why = {e.version: e.why for e in decision.explained}
    if decision.retire:
        store.retire(decision.retire, why[decision.retire[-1]])
    if decision.thin:
        store.thin(decision.thin, "anchor", why[decision.thin[-1]])
    if decision.detach:
        store.thin(decision.detach, "attachments", why[decision.detach[-1]])
    if decision.anchor_wanted:
        store.place.put(WANTED, msgspec.json.encode(Wanted(len(store.state))))
    deleted, failed = _delete(store, store.read_log(), grace)
    try:
        store.log.index.write(store.state.seq)
    except (Missing, Unavailable, FormatError, IntegrityError) as error:
        logger.warning("the index of the log could not be written (only slower): %s", error)
    thinned = tuple(sorted({*decision.thin, *decision.detach}))
    return CollectReport(decision, decision.retire, deleted, "", thinned, failed)


def explain(store: Store, max_versions: int | None, disk_budget: int | None) -> RetentionDecision:
    """What retention would let go now, and why; changes nothing."""
    state = store.read_log()
    return decide(
        state,
        max_versions=max_versions,
        disk_budget=disk_budget,
        pinned=store.leases.pinned(),
        leased=store.leases.leased(),
        recovery=recoverable(state),
    )


def anchor_wanted(place: Place, state: LedgerState) -> bool:
    """Does retention wait for an anchor, and was none made since?"""
    try:
        since = msgspec.json.decode(place.read(WANTED), type=Wanted).version
    except (Missing, msgspec.DecodeError, Unavailable):
        return False
    return not any(state.version(v).stored == "anchor" for v in range(since + 1, len(state) + 1))


def _held(store: Store, hold: float) -> str:
    try:
        with suppress(sqlite3.OperationalError):  # a full disk must not keep what filled it
            store.catalog.index()  # a catalogue that is missing is found out here, if nobody else looked
        rebuilt = store.catalog.rebuilt_at
    except sqlite3.Error as error:
        return f"the catalogue cannot be read ({error})"
    if not store.catalog.path.exists():
        return "there is no catalogue and none can be written: who serves what is not known"
    if rebuilt is not None and store.clock() - rebuilt < hold:
        return "the catalogue was rebuilt a short while ago: who serves what is not known yet"
    return ""


def _needed(store: Store, state: LedgerState) -> set[int]:
    """Versions that a pin or lease needs although they are retired: it came just before the announcement."""
    roots = [v for v in (*store.leases.pinned(), *store.leases.leased()) if state.has(v)]
    return {link for root in roots for link in chain(state, root)}


def _delete(store: Store, state: LedgerState, grace: float) -> tuple[tuple[int, ...], tuple[str, ...]]:
    needed, now = _needed(store, state), store.leases.now()
    deleted, failed = [], []
    due = [
        (v, at, form)
        for form, table in (("", state.retired), ("anchor", state.thinned), ("attachments", state.detached))
        for v, at in table.items()
        if v not in needed and at + grace <= now and (form == "" or v not in state.retired)
    ]
    if not due:
        return (), ()
    there = {item.key for item in store.place.list(manifests.VERSIONS)}
    folders = {key.rsplit("/", key.count("/") - 1)[0] for key in there}
    # Newest first: should this stop half way, what is left is still a chain from its anchor.
    for version, _, form in sorted(due, reverse=True):
        folder = state.version(version).folder
        if folder not in folders:
            continue
        try:
            if not form:
                store.reading.forget(version)
                store.place.delete_folder(folder)
                deleted.append(version)
                continue
            for key in _parts(store, version, folder, form):
                if key in there:
                    store.place.delete(key)
        except (OSError, Unavailable, IntegrityError) as error:
            logger.warning("could not delete %s of version %d: %s", form or "the folder", version, error)
            failed.append(f"{folder}: {error}")
    return tuple(sorted(deleted)), tuple(failed)


def _parts(store: Store, version: int, folder: str, form: str) -> list[str]:
    blobs = store.reading.stored(version).blobs
    return [f"{folder}/{blob.name}" for blob in blobs if blob.role in _FORMS[form]]
