"""Stores that are named by a URL: `s3://container/prefix?endpoint=…` and `mirror:/one,/other?policy=both`.

Stagings and the catalogue of such a store lie in a folder of this host: below `cache_home`, or where `cache=`
says.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from urllib.parse import parse_qs, unquote

from weightline.errors import InvalidInput, Unavailable
from weightline.store.disk import Disk, typed
from weightline.store.manifest import VERSIONS
from weightline.store.mirror import MirrorPlace, Policy, mirror_url
from weightline.store.object import ObjectPlace
from weightline.store.object_cache import BlobCache
from weightline.store.object_url import cache_home, parse_object_url
from weightline.store.place import Place

logger = logging.getLogger(__name__)

MIRROR_FORM = "mirror:/disk1/store,/disk2/store?policy=both"
_SCHEMES = ("s3:", "mirror:")
_POLICIES: dict[str, Policy] = {"both": "both", "degrade": "degrade"}


def is_store_url(text: object) -> bool:
    """Does the text name a store by a URL that `place_of` knows?"""
    return isinstance(text, str) and text.startswith(_SCHEMES)


def place_of(url: str, *, create: bool = False, disk: Disk | None = None) -> tuple[Path, Place]:
    """(folder of this host, place) behind a URL. Raises `InvalidInput` for one that cannot be, and, with
    `create`, for a place that does not refuse to create an object twice.
    """
    place: Place
    if url.startswith("mirror:"):
        local, place = _mirror(url, create, disk)
    else:
        parsed = parse_object_url(url)
        local = parsed.local
        place = ObjectPlace(parsed, BlobCache(local / "blobs", limit=parsed.cache_nbytes))
    with typed(str(local)):
        (local / VERSIONS).mkdir(parents=True, exist_ok=True)
    if create:
        try:
            place.probe()
        except Unavailable as error:
            if not isinstance(place, MirrorPlace) or place.size("run.json") is None:
                raise
            # Half of a mirror is away: what is there can be served; a writer probes again.
            logger.warning("%s can be read only: %s", place.url, error)
    return local, place


def local_folder(url: str) -> Path:
    """The folder of this host that goes with a store's URL. Raises `InvalidInput`; looks nowhere."""
    if not url.startswith("mirror:"):
        return parse_object_url(url).local
    halves, _, cache = _halves(url)
    mark = hashlib.sha256(mirror_url(halves).encode()).hexdigest()[:16]
    return Path(cache).absolute() if cache else cache_home() / mark


def check_store_url(url: str) -> None:
    """Raises `InvalidInput` for a URL that cannot be; looks nowhere."""
    if url.startswith("mirror:"):
        _halves(url)
    else:
        parse_object_url(url)


def _mirror(url: str, create: bool, disk: Disk | None) -> tuple[Path, MirrorPlace]:
    halves, policy, _ = _halves(url)
    return local_folder(url), MirrorPlace(halves, policy=policy, create=create, disk=disk)


def _halves(url: str) -> tuple[tuple[Path, Path], Policy, str]:
    folders, _, query = url.removeprefix("mirror:").removeprefix("//").partition("?")
    parts = [unquote(part) for part in folders.split(",")]
    if len(parts) != 2 or not all(parts):
        raise InvalidInput(f"{url!r} does not name two folders", hint=f"give {MIRROR_FORM}")
    options = {name: values[-1] for name, values in parse_qs(query, keep_blank_values=True).items()}
    if unknown := sorted(set(options) - {"policy", "cache"}):
        raise InvalidInput(f"{url!r}: unknown option {', '.join(unknown)}", hint=f"give {MIRROR_FORM}")
    policy = _POLICIES.get(options.get("policy", "both"))
    if policy is None:
        raise InvalidInput(
            f"{url!r}: policy {options['policy']!r} is neither both nor degrade", hint=f"give {MIRROR_FORM}"
        )
    one, other = (Path(part).expanduser().absolute() for part in parts)
    return (one, other), policy, options.get("cache", "")
