"""Leases and pins: small files that say who needs which versions. They outlive every process and every
server.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection
from typing import TypeVar

import msgspec
from msgspec import Struct

from weightline.core.seal import seal, unseal
from weightline.errors import FormatError, InvalidInput
from weightline.store.place import Missing, Place

logger = logging.getLogger(__name__)

LEASES = "leases"
PINS = "pins"
_HINT = "remove it if nobody needs it any more; pin or lease anew"


class Lease(Struct, frozen=True):
    """Retention keeps these versions, and all they rest on, until `expires_at`."""

    id: str
    versions: tuple[int, ...]
    owner: str
    expires_at: float


class Pin(Struct, frozen=True):
    """Retention keeps this version, and all it rests on, until it is unpinned."""

    version: int
    at: float


class Leases:
    """`leases/` and `pins/` of a place."""

    def __init__(self, place: Place, clock: Callable[[], float]) -> None:
        self._place = place
        self.now = clock
        """Seconds since the Unix epoch, by the clock that leases and grace periods go by."""

    def take(self, versions: Collection[int], owner: str, ttl: float) -> Lease:
        """A new lease for `ttl` seconds. The caller looks for retired versions afterwards."""
        if not ttl > 0:
            raise InvalidInput(f"a lease of {ttl} seconds", hint="give a ttl above 0")
        lease = Lease(uuid.uuid4().hex, tuple(sorted(set(versions))), owner, self.now() + ttl)
        self._put(f"{LEASES}/{lease.id}.json", lease)
        return lease

    def renew(self, lease: Lease, ttl: float) -> Lease:
        """The same lease for `ttl` seconds from now."""
        renewed = Lease(lease.id, lease.versions, lease.owner, self.now() + ttl)
        self._put(f"{LEASES}/{lease.id}.json", renewed)
        return renewed

    def release(self, lease: Lease) -> None:
        """End a lease; one that is gone already is fine."""
        self._place.delete(f"{LEASES}/{lease.id}.json")

    def leased(self) -> dict[int, str]:
        """version -> an owner who leases it now. Expired leases are removed on the way."""
        out: dict[int, str] = {}
        now = self.now()
        for item in self._place.list(LEASES):
            if not item.key.endswith(".json"):
                continue
            try:
                lease = self.read(item.key)
            except Missing:
                continue
            except FormatError as error:
                # Nobody can tell what it protects or for how long; it is left for people to look at.
                logger.warning("%s; it is ignored", error)
                continue
            if lease.expires_at <= now:
                self._place.delete(item.key)
                continue
            out.update(dict.fromkeys(lease.versions, lease.owner))
        return out

    def read(self, key: str) -> Lease:
        """One lease. Raises `Missing`, `FormatError`."""
        return _read(self._place, key, Lease)

    def pin(self, version: int) -> None:
        """Keep a version for good. Pinning it again is fine."""
        self._put(f"{PINS}/{version}.json", Pin(version, self.now()))

    def unpin(self, version: int) -> None:
        """The inverse; a version that is not pinned is fine."""
        self._place.delete(f"{PINS}/{version}.json")

    def pinned(self) -> list[int]:
        """Pinned versions, ascending. The name of a pin says it all: a damaged one still holds."""
        names = (item.key[len(PINS) + 1 :].removesuffix(".json") for item in self._place.list(PINS))
        return sorted(int(name) for name in names if name.isdigit())

    def damaged(self) -> list[tuple[str, str]]:
        """(key, what is wrong with it) of every lease and pin that is not as it was written."""
        out = []
        for prefix, kind in ((LEASES, Lease), (PINS, Pin)):
            for item in list(self._place.list(prefix)):
                try:
                    _read(self._place, item.key, kind)  # type: ignore[type-var]
                except Missing:
                    continue
                except FormatError as error:
                    out.append((item.key, error.message))
        return out

    def _put(self, key: str, value: Struct) -> None:
        self._place.put(key, seal(msgspec.json.encode(value)))


_Record = TypeVar("_Record", Lease, Pin)


def _read(place: Place, key: str, kind: type[_Record]) -> _Record:
    where = f"{place.url}/{key}"
    try:
        return msgspec.json.decode(unseal(place.read(key), where=where, hint=_HINT), type=kind)
    except msgspec.DecodeError as error:
        raise FormatError(f"{where} is damaged: {error}", hint=_HINT) from None
