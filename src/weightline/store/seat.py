"""A seat in a store that one process at a time holds, whichever host it is on: the server's, the cleaner's.

`seats/<name>/<number>.json` says who took it and until when. To take it is to create the next number, which
one of several can; who holds a number renews it before its time is up. Nothing that matters rests on a seat:
two servers would be a waste, and every commit is a put-if-absent whoever makes it.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from contextlib import suppress

import msgspec
from msgspec import Struct

from weightline.errors import Unavailable
from weightline.store import owner as owners
from weightline.store.owner import Owner
from weightline.store.place import Missing, Place

logger = logging.getLogger(__name__)

SEATS = "seats"
_DIGITS = 12
_TRIES = 4


class Holder(Struct, frozen=True):
    """Content of a seat."""

    id: str
    by: Owner
    until: float
    """By the clock of the place; 0 once it was given back."""
    about: str = ""
    """Where it can be reached, in words."""


class Seat:
    """One seat of one place. `now` gives seconds since the Unix epoch by the clock of the place."""

    def __init__(self, place: Place, name: str, *, ttl: float, now: Callable[[], float]) -> None:
        self._place = place
        self._folder = f"{SEATS}/{name}"
        self._ttl = ttl
        self._now = now
        self._number = 0
        self._mine: Holder | None = None

    def take(self, about: str = "") -> Holder | None:
        """None when it is ours now, else who holds it. Raises `Unavailable`."""
        number, holder = self._newest()
        now = self._now()
        if holder is not None and holder.until > now and not owners.is_dead(holder.by):
            return holder
        mine = Holder(uuid.uuid4().hex, owners.this_process(), now + self._ttl, about)
        number += 1
        for _ in range(_TRIES):
            outcome = self._place.put_if_absent(self._key(number), msgspec.json.encode(mine))
            there = mine if outcome == "created" else self._read(number)
            if there is not None:
                break
        else:
            raise Unavailable(f"{self._place.url} gave no answer about a seat", hint="retry")
        if there.id != mine.id:
            return there
        self._number, self._mine = number, mine
        for old in self._numbers()[:-1]:
            with suppress(Unavailable):
                self._place.delete(self._key(old))
        return None

    def renew(self, about: str | None = None) -> bool:
        """Hold it for longer. False when somebody else took it meanwhile. Raises `Unavailable`."""
        if self._mine is None or self._newest()[0] != self._number:
            self._mine = None
            return False
        about = self._mine.about if about is None else about
        self._mine = msgspec.structs.replace(self._mine, until=self._now() + self._ttl, about=about)
        self._place.put(self._key(self._number), msgspec.json.encode(self._mine))
        return True

    def release(self) -> None:
        """Give it back. Idempotent; never raises: its time ends by itself."""
        mine, self._mine = self._mine, None
        if mine is None:
            return
        try:
            # The number stays: a holder that wakes up late must find that it is not the newest.
            free = msgspec.structs.replace(mine, until=0.0)
            self._place.put(self._key(self._number), msgspec.json.encode(free))
        except Unavailable as error:
            logger.warning("the seat %s stays taken until its time is up: %s", self._folder, error)

    def _key(self, number: int) -> str:
        return f"{self._folder}/{number:0{_DIGITS}d}.json"

    def _numbers(self) -> list[int]:
        names = (item.key.rsplit("/", 1)[-1].removesuffix(".json") for item in self._place.list(self._folder))
        return [int(name) for name in names if name.isdigit()]

    def _newest(self) -> tuple[int, Holder | None]:
        number = max(self._numbers(), default=0)
        return number, self._read(number) if number else None

    def _read(self, number: int) -> Holder | None:
        """None for a seat that is not there; one that is damaged is held by nobody."""
        try:
            return msgspec.json.decode(self._place.read(self._key(number)), type=Holder)
        except Missing:
            return None
        except msgspec.DecodeError:
            return Holder("", Owner("", "", 0, ""), 0.0)
