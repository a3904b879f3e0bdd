"""What the objects of a store should be, by what they say: seals, the log, the manifests it names."""

from __future__ import annotations

from collections.abc import Sequence

from weightline.core import ledger
from weightline.core.ledger import RetireEntry, ThinEntry, VersionEntry
from weightline.core.seal import unseal
from weightline.errors import FormatError, Unavailable
from weightline.store import manifest as manifests
from weightline.store.place import Missing, Place

_SEALED = ("log/", "run.json", "place.json")


def sound(key: str, data: bytes) -> bool:
    """Can the bytes be what they should, as far as they say themselves?"""
    if not key.startswith(_SEALED):
        return True
    try:
        unseal(data, where=key, hint="")
    except FormatError:
        return False
    return True


def expected(places: Sequence[Place]) -> dict[str, str]:
    """Key -> SHA-256 of every file of every version that is not retired, out of the best copies there are."""
    versions: list[VersionEntry] = []
    retired: set[int] = set()
    dropped: dict[int, set[str]] = {}
    keys = sorted({item.key for place in places for item in place.list("log")})
    for key in keys:
        entry = _entry(places, key)
        if isinstance(entry, VersionEntry):
            versions.append(entry)
        elif isinstance(entry, RetireEntry):
            retired.update(entry.versions)
        elif isinstance(entry, ThinEntry):
            for version in entry.versions:
                dropped.setdefault(version, set()).add(entry.form)
    out: dict[str, str] = {}
    for entry in versions:
        if entry.version in retired:
            continue
        key = f"{entry.folder}/{manifests.MANIFEST}"
        out[key] = entry.digest
        data = next((d for d in _copies(places, key) if manifests.digest_of(d) == entry.digest), None)
        if data is None:
            continue
        gone = dropped.get(entry.version, set())
        for blob in manifests.decode(data, where=key).blobs:
            if blob.role in ("anchor", "index") and "anchor" in gone:
                continue
            if blob.role == "attachment" and "attachments" in gone:
                continue
            out[f"{entry.folder}/{blob.name}"] = blob.sha256
    return out


def _entry(places: Sequence[Place], key: str) -> ledger.Entry | None:
    for data in _copies(places, key):
        try:
            return ledger.decode(data, where=key)
        except FormatError:
            continue
    return None


def _copies(places: Sequence[Place], key: str) -> list[bytes]:
    out = []
    for place in places:
        try:
            out.append(place.read(key))
        except (Missing, Unavailable):
            continue
    return out
