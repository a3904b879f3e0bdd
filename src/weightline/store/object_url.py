"""`s3://container/prefix?endpoint=…&region=…`: where an object store is. Credentials are never in a URL."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from msgspec import Struct

from weightline.errors import InvalidInput

FORM = "s3://container/prefix?endpoint=http://host:port&region=us-east-1"
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_OPTIONS = {"endpoint", "region", "cache", "cache_nbytes"}


class ObjectUrl(Struct, frozen=True):
    """A parsed URL of an object store."""

    container: str
    prefix: str
    endpoint: str | None = None
    """None: that of the environment (AWS_ENDPOINT_URL), else Amazon's."""
    region: str = "us-east-1"
    cache: Path | None = None
    """Where this host keeps its copies; None: below `cache_home`."""
    cache_nbytes: int | None = None

    def __str__(self) -> str:
        where = f"s3://{self.container}/{self.prefix}".rstrip("/")
        return where if self.endpoint is None else f"{where}?endpoint={self.endpoint}"

    @property
    def local(self) -> Path:
        """The folder on this host for stagings, catalogue and copies of this store."""
        if self.cache is not None:
            return self.cache
        mark = hashlib.sha256(str(self).encode()).hexdigest()[:16]
        return cache_home() / mark


def endpoint_of_environment() -> str | None:
    """The endpoint that the environment names, for URLs that name none; None: Amazon's."""
    for name in ENDPOINT_VARIABLES:
        if given := os.environ.get(name):
            return given
    return None


def cache_home() -> Path:
    """$WEIGHTLINE_CACHE, else `weightline` in the user's cache folder."""
    if given := os.environ.get("WEIGHTLINE_CACHE"):
        return Path(given).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser().absolute() / "weightline"


def parse_object_url(text: str) -> ObjectUrl:
    """The URL's parts. Raises `InvalidInput` that names what is wrong with it."""
    parts = urlsplit(text)
    if parts.scheme != "s3" or not parts.netloc:
        raise InvalidInput(f"{text!r} names no object store", hint=f"give {FORM}")
    if "@" in parts.netloc or "@" in (parse_qs(parts.query).get("endpoint") or [""])[0]:
        raise InvalidInput(
            "the URL of an object store holds credentials",
            hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment",
        )
    try:
        options = parse_qs(parts.query, strict_parsing=bool(parts.query), keep_blank_values=True)
    except ValueError as error:
        raise InvalidInput(f"{text!r}: {error}", hint=f"give {FORM}") from None
    unknown = sorted(set(options) - _OPTIONS)
    if unknown:
        raise InvalidInput(
            f"{text!r}: unknown option {', '.join(unknown)}",
            hint=f"the options are {', '.join(sorted(_OPTIONS))}",
        )
    one = {name: values[-1] for name, values in options.items()}
    endpoint = one.get("endpoint")
    if endpoint is not None and urlsplit(endpoint).scheme not in ("http", "https"):
        raise InvalidInput(f"{text!r}: the endpoint {endpoint!r} is no http(s) URL", hint=f"give {FORM}")
    prefix = unquote(parts.path).strip("/")
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise InvalidInput(f"{text!r}: {prefix!r} is no prefix", hint=f"give {FORM}")
    limit = one.get("cache_nbytes")
    if limit is not None and not (limit.isascii() and limit.isdigit()):
        raise InvalidInput(
            f"{text!r}: cache_nbytes {limit!r} is no number", hint="give bytes, for example 10000000000"
        )
    return ObjectUrl(
        parts.netloc,
        prefix,
        endpoint,
        one.get("region")
        or os.environ.get("AWS_REGION")
        or os.environ.get("AWS_DEFAULT_REGION")
        or "us-east-1",
        Path(one["cache"]).expanduser().absolute() if one.get("cache") else None,
        None if limit is None else int(limit),
    )
