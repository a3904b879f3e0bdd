"""Acknowledgements: what a line takes as one, and the catalogue that keeps them."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator, Mapping
from typing import get_args

from weightline.errors import InvalidInput, Unavailable
from weightline.store import Store
from weightline.types import Ack, Verification

MAX_NAME = 200
STAGES = ("notified", "fetched", "verified", "applied")
"""Steps of a subscriber, in the order in which they are taken; "acknowledged" follows by itself."""


def check(ack: Ack) -> Ack:
    """`ack` when it can be kept. Raises `InvalidInput` naming the field at fault."""
    name = ack.subscriber
    if not isinstance(name, str) or not name or len(name) > MAX_NAME or not name.isprintable():
        raise InvalidInput(
            f"ack: subscriber {name!r:.80} is not a name", hint=f"1 to {MAX_NAME} printable characters"
        )
    if ack.verified not in get_args(Verification):
        raise InvalidInput(
            f"ack: verified={ack.verified!r}", hint=f"one of {', '.join(get_args(Verification))}"
        )
    if ack.pause_ms is not None and not (
        isinstance(ack.pause_ms, int | float) and math.isfinite(ack.pause_ms) and ack.pause_ms >= 0
    ):
        raise InvalidInput(f"ack: pause_ms={ack.pause_ms!r}", hint="milliseconds, at least 0, or None")
    if not isinstance(ack.detail, str):
        raise InvalidInput(f"ack: detail={ack.detail!r:.80} is not a string", hint='say it in words, or ""')
    return ack


def check_way(way: Mapping[str, float]) -> dict[str, float]:
    """The times of a subscriber's steps when they can be kept. Raises `InvalidInput`."""
    for stage, at in way.items():
        if not isinstance(stage, str) or stage not in STAGES:
            raise InvalidInput(
                f"ack: trace names the stage {stage!r:.80}", hint=f"one of {', '.join(STAGES)}"
            )
        if isinstance(at, bool) or not isinstance(at, int | float) or not math.isfinite(at):
            raise InvalidInput(
                f"ack: trace[{stage!r}]={at!r:.80}", hint="seconds since the Unix epoch: time.time()"
            )
    return dict(way)


def note(store: Store, ack: Ack, way: Mapping[str, float] | None = None) -> None:
    """Keep `ack` and the steps that led to it. Raises `InvalidInput`, `VersionNotFound`, `Unavailable` when
    the catalogue cannot be written.
    """
    try:
        store.ack(check(ack), check_way(way or {}))
    except sqlite3.Error as error:
        raise Unavailable(
            f"{store.catalog.path}: the ack of {ack.subscriber} could not be kept: {error}",
            hint="check the disk; the catalogue may be deleted, it is rebuilt",
        ) from error


def noted(store: Store) -> Iterator[Ack]:
    """Every ack that is kept; none when the catalogue cannot be read, for it is only an index."""
    try:
        known = store.catalog.acks()
    except sqlite3.Error:
        return
    for acks in known.values():
        yield from acks
