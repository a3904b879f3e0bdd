"""A place in an S3-compatible store, through obstore.

The one write that two may race on goes out with `If-None-Match: *` and without retries below us. What comes
back is 200 (`created`), 412 or 409, or nothing at all. A 409 only says that somebody else is writing, so it
is looked into; an answer that does not come is `lost`, unless a look shows that nothing is there, and then
the same bytes may be sent again: should the first request arrive late, the second is refused, and the write
id in the object says whose it is.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from weightline.errors import InvalidInput, Unavailable
from weightline.store.object_cache import BlobCache
from weightline.store.object_errors import explained, is_no_container, no_container
from weightline.store.object_url import ObjectUrl, endpoint_of_environment
from weightline.store.place import (
    LAST,
    Listed,
    Missing,
    Outcome,
    below,
    check_key,
    files_of,
    hidden,
    missing,
    probe,
)

if TYPE_CHECKING:
    from obstore.store import S3Store

logger = logging.getLogger(__name__)
T = TypeVar("T")

PART_NBYTES = 8 << 20
"""Size of the parts of a large upload, and of the pieces of a download."""
PARTS_AT_ONCE = 4
"""Bounds the memory of an upload to PART_NBYTES times this."""
_TRIES = 4
_FIRST_PAUSE_S = 0.05
_CLOCK_S = 2.0
"""Less is no difference between two clocks: stores tell whole seconds."""


class ObjectPlace:
    """See `Place`. `pause` sleeps between our own tries; `retries` are those below us, of the other verbs."""

    poll_s = 0.5
    degraded = ""

    def __init__(
        self,
        url: ObjectUrl,
        cache: BlobCache,
        *,
        timeout: float = 30.0,
        retries: int = 6,
        pause: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._url = url
        self._cache = cache
        self._pause = pause
        self._clock = clock
        self._store = _open(url, timeout=timeout, retries=retries)
        self._once = _open(url, timeout=timeout, retries=0)

    @property
    def url(self) -> str:
        return str(self._url)

    def free(self) -> int | None:
        return None

    def skew(self) -> float:
        """What the store says an object was written at, against this host's clock around the write.

        Stores tell whole seconds, so less than two are none.
        """
        import obstore

        key = f".clock-{uuid.uuid4().hex}"
        before = self._clock()
        self.put(key, b"")
        after = self._clock()
        try:
            with self._typed("read its clock", key):
                there = obstore.head(self._store, key)["last_modified"].timestamp()
        finally:
            self.delete(key)
        ahead = there - after if there > after else min(0.0, there + 1 - before)
        return ahead if abs(ahead) >= _CLOCK_S else 0.0

    def put_if_absent(self, key: str, data: bytes) -> Outcome:
        check_key(key)
        data = bytes(data)
        for attempt in range(_TRIES):
            if attempt:
                self._pause(_FIRST_PAUSE_S * 2**attempt)
            outcome = self._create_once(key, data)
            if outcome != "lost":
                return outcome
            try:
                there = self._look(key)
            except Unavailable:
                return "lost"
            if there is not None:
                # Ours or a twin's: nobody can tell from the bytes alone.
                return "lost" if there == data else "exists"
        return "lost"

    def put(self, key: str, data: bytes) -> None:
        import obstore

        check_key(key)
        with self._typed(f"write {key}"):
            obstore.put(self._store, key, bytes(data), mode="overwrite", use_multipart=False)

    def read(self, key: str) -> bytes:
        import obstore

        def act() -> bytes:
            with self._typed(f"read {check_key(key)}", key):
                return bytes(obstore.get(self._store, key).bytes())

        return self._through(act)

    def size(self, key: str) -> int | None:
        import obstore

        try:
            with self._typed(f"look at {check_key(key)}", key):
                return int(obstore.head(self._store, key)["size"])
        except Missing:
            return None

    def list(self, prefix: str, *, after: str = "") -> Iterator[Listed]:
        import obstore

        start = below(prefix)

        def act() -> list[Listed]:
            found = []
            with self._typed(f"list {prefix or 'everything'}"):
                for chunk in obstore.list(self._store, prefix or None, offset=after or None, chunk_size=1000):
                    found += [Listed(str(item["path"]), int(item["size"])) for item in chunk]
            return found

        found = self._through(act)
        return iter(
            sorted(i for i in found if i.key.startswith(start) and i.key > after and not hidden(i.key))
        )

    def delete(self, key: str) -> None:
        import obstore

        with contextlib.suppress(Missing), self._typed(f"delete {check_key(key)}", key):
            obstore.delete(self._store, key)

    def delete_folder(self, prefix: str) -> None:
        self.delete(f"{prefix}/{LAST}")
        for item in self.list(prefix):
            self.delete(item.key)

    def upload(self, prefix: str, folder: Path, same: Mapping[str, str] = {}) -> None:
        for name, path in files_of(folder):
            known = same.get(name)
            if known is None or not self._copied(known, f"{prefix}/{name}", path.stat().st_size):
                self._upload(f"{prefix}/{name}", path)

    def file(self, key: str, *, nbytes: int, sha256: str) -> Path:
        check_key(key)
        return self._cache.get(key, self.url, nbytes, sha256, lambda: self._pieces(key))

    def probe(self) -> None:
        probe(self)

    def _create_once(self, key: str, data: bytes) -> Outcome:
        import obstore
        from obstore import exceptions

        try:
            # What does not go away by itself (credentials, region) is raised: certainly nothing was made.
            with self._typed(f"create {key}"):
                obstore.put(self._once, key, data, mode="create")
        except Unavailable as error:
            # 412 and 409 look alike here; what is there tells them apart.
            if isinstance(error.__cause__, exceptions.AlreadyExistsError | exceptions.PreconditionError):
                return "exists" if self.size(key) is not None else "lost"
            logger.warning("no answer from creating %s in %s: %s", key, self.url, error)
            return "lost"
        return "created"

    def _look(self, key: str) -> bytes | None:
        try:
            return self.read(key)
        except Missing:
            return None

    def _copied(self, known: str, key: str, nbytes: int) -> bool:
        """Could the store make `key` out of `known` by itself? Bytes that did not change are not sent again.

        S3 copies up to 5 GiB in one request; what cannot be copied is uploaded.
        """
        import obstore

        try:
            with self._typed(f"copy {known}", known):
                obstore.copy(self._store, known, check_key(key))
            return self.size(key) == nbytes
        except (Missing, InvalidInput, Unavailable) as error:
            logger.info("%s is uploaded: %s", key, error)
            return False

    def _upload(self, key: str, path: Path) -> None:
        import obstore

        nbytes = path.stat().st_size
        for attempt in range(_TRIES):
            large = nbytes > PART_NBYTES
            try:
                with self._typed(f"write {key}"):
                    obstore.put(
                        self._store,
                        check_key(key),
                        path if large else path.read_bytes(),
                        mode="overwrite",
                        use_multipart=large,
                        chunk_size=PART_NBYTES,
                        max_concurrency=PARTS_AT_ONCE,
                    )
                if not large or self.size(key) == nbytes:
                    return
                raise Unavailable(
                    f"{key} in {self.url} has not the {nbytes} bytes that were sent", hint="repeat the call"
                )
            except Unavailable as error:
                # A finish of a multipart upload whose answer was lost cannot be sent again; the upload can.
                if attempt == _TRIES - 1:
                    raise
                logger.warning("%s is sent again: %s", key, error)
                self._pause(_FIRST_PAUSE_S * 2**attempt)

    def _pieces(self, key: str) -> Iterable[Any]:
        """The bytes of an object; goes on where a connection broke off."""
        import obstore

        at, tries = 0, 0
        with self._typed(f"read {key}", key):
            size = int(obstore.head(self._store, key)["size"])
        while at < size:
            end = min(size, at + PART_NBYTES)
            try:
                with self._typed(f"read {key}", key):
                    piece = bytes(obstore.get_range(self._store, key, start=at, end=end))
            except Unavailable:
                tries += 1
                if tries == _TRIES:
                    raise
                self._pause(_FIRST_PAUSE_S * 2**tries)
                continue
            yield piece
            at, tries = at + len(piece), 0

    def _through(self, act: Callable[[], T]) -> T:
        """`act`, which only reads; again when an answer broke off, which is not repeated below us."""
        for attempt in range(1, _TRIES):
            try:
                return act()
            except Unavailable as error:
                if "body error" not in str(error.__cause__):
                    raise
                self._pause(_FIRST_PAUSE_S * 2**attempt)
        return act()

    @contextmanager
    def _typed(self, what: str, key: str | None = None) -> Iterator[None]:
        """Turns what obstore raises into typed errors: `Missing` for `key`, `InvalidInput`, `Unavailable`."""
        from obstore import exceptions

        try:
            yield
        except FileNotFoundError as error:
            if key is None or is_no_container(error):
                raise no_container(what, self._url) from error
            raise missing(self.url, key) from None
        except (exceptions.BaseError, OSError) as error:
            raise explained(what, self._url, error, exceptions) from error


def _open(url: ObjectUrl, *, timeout: float, retries: int) -> S3Store:
    try:
        from obstore.store import S3Store
    except ImportError as error:
        raise InvalidInput(
            f"{url} needs the package obstore", hint="install it with: pip install 'weightline[s3]'"
        ) from error
    endpoint = url.endpoint or endpoint_of_environment()
    options: dict[str, Any] = {} if endpoint is None else {"endpoint": endpoint}
    return S3Store(
        url.container,
        prefix=url.prefix or None,
        region=url.region,
        virtual_hosted_style_request=False,
        conditional_put="etag",
        disable_bulk_delete=True,
        client_options={
            "allow_http": (endpoint or "").startswith("http:"),
            "timeout": timedelta(seconds=timeout),
            "connect_timeout": timedelta(seconds=min(5.0, timeout)),
        },
        retry_config={
            "max_retries": retries,
            "retry_timeout": timedelta(seconds=4 * timeout),
            "backoff": {
                "init_backoff": timedelta(milliseconds=50),
                "max_backoff": timedelta(seconds=2),
                "base": 2,
            },
        },
        **options,
    )
