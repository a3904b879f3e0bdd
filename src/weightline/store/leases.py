"""Leases and pins: small files that say who needs which versions. They outlive every process and every
server.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec
from msgspec import Struct

from weightline.errors import InvalidInput
from weightline.store.disk import Disk, typed

logger = logging.getLogger(__name__)


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
    """`leases/` and `pins/` below a store's root."""

    def __init__(self, root: Path, disk: Disk, clock: Callable[[], float]) -> None:
        self._leases = root / "leases"
        self._pins = root / "pins"
        self._disk = disk
        self._clock = clock

    def take(self, versions: Collection[int], owner: str, ttl: float) -> Lease:
        """A new lease for `ttl` seconds. The caller looks for retired versions afterwards."""
        if not ttl > 0:
            raise InvalidInput(f"a lease of {ttl} seconds", hint="give a ttl above 0")
        lease = Lease(uuid.uuid4().hex, tuple(sorted(set(versions))), owner, self._clock() + ttl)
        self._put(self._leases / f"{lease.id}.json", lease)
        return lease

    def renew(self, lease: Lease, ttl: float) -> Lease:
        """The same lease for `ttl` seconds from now."""
        renewed = Lease(lease.id, lease.versions, lease.owner, self._clock() + ttl)
        self._put(self._leases / f"{lease.id}.json", renewed)
        return renewed

    def release(self, lease: Lease) -> None:
        """End a lease; one that is gone already is fine."""
        (self._leases / f"{lease.id}.json").unlink(missing_ok=True)

    def leased(self) -> dict[int, str]:
        """version -> an owner who leases it now. Expired leases are removed on the way."""
        out: dict[int, str] = {}
        now = self._clock()
        for path in sorted(self._leases.glob("*.json")):
            lease = _read(path, Lease)
            if lease is None:
                continue
            if lease.expires_at <= now:
                path.unlink(missing_ok=True)
                continue
            out.update(dict.fromkeys(lease.versions, lease.owner))
        return out

    def pin(self, version: int) -> None:
        """Keep a version for good. Pinning it again is fine."""
        self._put(self._pins / f"{version}.json", Pin(version, self._clock()))

    def unpin(self, version: int) -> None:
        """The inverse; a version that is not pinned is fine."""
        (self._pins / f"{version}.json").unlink(missing_ok=True)

    def pinned(self) -> list[int]:
        """Pinned versions, ascending."""
        return sorted(int(path.stem) for path in self._pins.glob("*.json") if path.stem.isdigit())

    def _put(self, path: Path, value: Struct) -> None:
        with typed(str(path)):
            path.parent.mkdir(exist_ok=True)
            self._disk.replace(path, msgspec.json.encode(value))


def _read(path: Path, kind: type[Lease]) -> Lease | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        # Nobody can tell what it protects or for how long; it is left for people to look at.
        logger.warning("%s is damaged and ignored: %s", path, error)
        return None
