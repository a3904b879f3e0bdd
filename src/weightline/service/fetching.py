"""What has to be read to get to a version, and the lease that keeps it readable meanwhile."""

from __future__ import annotations

from msgspec import Struct

from weightline.core import plan as plans
from weightline.store import Lease, Store

LEASE_SECONDS = 120.0
"""A reader that is killed while it reads holds its versions for so long."""


class Reading(Struct, frozen=True):
    """Versions whose files are read, ascending, and their bytes."""

    versions: tuple[int, ...]
    nbytes: int


def reading_of(store: Store, version: int, have: int | None, *, full: bool) -> Reading:
    """What is read for the delta from `have` (default: the base) to `version`, or for all of it when `full`.

    Raises `VersionNotFound`, `VersionGone`.
    """
    state = store.read_log()
    have = state.version(version).base if have is None else have
    if have is not None and not full:
        state.version(have)
        links = plans.forward(state, have, version)
        if links is not None:
            return Reading(links, sum(state.version(link).delta_nbytes for link in links))
    steps = plans.plan(state, None, version).steps
    backward = have is not None and not full and have not in state.retired
    if backward and have is not None:
        steps += plans.plan(state, None, have).steps
    versions = {step.version for step in steps} | {version}
    return Reading(tuple(sorted(versions)), sum(step.nbytes for step in steps))


def lease_for(store: Store, reading: Reading, owner: str) -> Lease:
    """Keep what is read readable. Raises `VersionGone` (too late), `Unavailable`."""
    return store.lease(reading.versions, owner, LEASE_SECONDS)
