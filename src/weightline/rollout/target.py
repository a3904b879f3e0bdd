"""Which version an engine should serve next: pure, from the store's records and what the engine says of
itself."""

from __future__ import annotations

from collections.abc import Sequence

from weightline.errors import InvalidInput, VersionGone, VersionNotFound
from weightline.rollout.engines.base import EngineDescription
from weightline.types import VersionRecord


def servable(record: VersionRecord) -> bool:
    """May an engine be brought to this version?"""
    return not (record.yanked or record.abandoned or record.retired)


def live_version(engine: EngineDescription, run: str, versions: Sequence[VersionRecord]) -> int | None:
    """The version of this run that the engine serves by its own account; None when its state is no known
    version.

    None for a restarted or quarantined engine, for one of another run, and for one whose label was changed
    behind the follower's back.
    """
    if engine.quarantined or engine.run != run or engine.version is None:
        return None
    for record in versions:
        if record.version == engine.version:
            return record.version if record.label == engine.label else None
    return None


def choose(
    versions: Sequence[VersionRecord],
    live: int | None,
    *,
    at: int | None = None,
    hold: int | None = None,
    held: bool = False,
) -> int | None:
    """The version to serve, or None when there is nothing to move to.

    `at` pins to one version. `held` forbids moves by itself: the engine keeps what is live, and a restarted
    one is brought back to `hold`, the last version that this follower saw it serve. Only a yank moves a held
    engine. Else it is the newest version that is not yanked, abandoned or retired; an engine that is ahead of
    it (its version was abandoned by a rewind) stays until something newer comes.
    """
    by_number = {record.version: record for record in versions}
    if at is not None:
        check_pin(by_number.get(at), at)
        return at
    newest = max((record.version for record in versions if servable(record)), default=None)
    current = by_number.get(live) if live is not None else None
    if current is not None and not current.yanked and (held or newest is None or newest <= current.version):
        return current.version
    if held and live is None:
        before = by_number.get(hold) if hold is not None else None
        return before.version if before is not None and servable(before) else None
    return newest


def chosen(
    versions: Sequence[VersionRecord],
    live: int | None,
    at: int | None,
    held: int | None,
    last: int | None,
    *,
    still: bool,
) -> int | None:
    """The version to serve when somebody may have held the engine: `held` is where.

    It goes before the follower's own `at` and `still` (its `--hold`), because it came later; `last` is what
    the follower last saw the engine serve. A held version that was yanked or retired since is no place to
    stay: then as `choose(held=True)`, which moves only what is yanked.
    """
    if held is None:
        return choose(versions, live, at=at, hold=last, held=still)
    if any(record.version == held and servable(record) for record in versions):
        return held
    return choose(versions, live, hold=last, held=True)


def check_pin(record: VersionRecord | None, at: int) -> None:
    """Raises when no engine can be pinned to this version."""
    if record is None:
        raise VersionNotFound(f"version {at} was never committed", hint="see `weightline log`")
    if record.yanked:
        raise InvalidInput(
            f"version {at} is yanked: no engine should serve it", hint="pin to another version"
        )
    if record.retired:
        raise VersionGone(f"version {at}: its bytes have been retired", hint="pin to a version that is kept")
