"""Acknowledgements: what a line takes as one, and the catalogue that keeps them."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator
from typing import get_args

from weightline.errors import InvalidInput, Unavailable
from weightline.store import Store
from weightline.types import Ack, Verification

MAX_NAME = 200


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


def note(store: Store, ack: Ack) -> None:
    """Keep `ack`. Raises `InvalidInput`, `VersionNotFound`, `Unavailable` when the catalogue cannot be
    written.
    """
    try:
        store.ack(check(ack))
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
