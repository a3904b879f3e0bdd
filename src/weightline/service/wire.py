"""What crosses the socket: one table of methods, frozen structs in MessagePack, errors as themselves.

Every unary reply is an envelope, either the method's reply or the error as `WeightlineError.to_dict` tells
it: an error that lists four hundred missing tensors does not fit into the 8 KiB that gRPC allows for trailing
metadata. A message that is not what its method takes is `FormatError` on both sides. Fields may be added with
a default at any time; anything else raises `PROTOCOL`.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from weightline.core.request import CommitRequest
from weightline.errors import FormatError, WeightlineError, from_dict
from weightline.store import Published
from weightline.types import Ack, VersionRecord

PROTOCOL = 1
SERVICE = "weightline.v1.Line"
MAX_REQUEST_BYTES = 4 << 20
MAX_REPLY_BYTES = 256 << 20
"""A reply with the records of a hundred thousand versions stays below it."""


class Hello(Struct, frozen=True, kw_only=True):
    """First call of a client."""

    protocol: int
    client: str
    """Name for logs: host and process id unless the caller gave one."""


class Welcome(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which line this server serves; a client on the same host finds `run` again in `<root>/run.json`."""

    protocol: int
    run: str
    root: str
    runtime_dir: str
    pid: int
    release: str
    """`weightline.__version__` of the server."""
    newest: int | None
    heartbeat: float
    """Seconds between two events of a quiet `watch`."""
    store: str = ""
    """URL of a store that is not the folder `root`."""


class Publish(Struct, frozen=True, kw_only=True):
    """Make what a trainer staged in the store's folder visible.

    Idempotent: a request that is repeated (same `commit_id`) is answered with the version it has become.
    """

    run: str
    """The run that the trainer is of: a server of another store refuses."""
    request: CommitRequest
    client: str


class Watch(Struct, frozen=True, kw_only=True):
    """Open a stream of `Event`: one at once, then one a new version, and one every `Welcome.heartbeat`
    seconds of silence.
    """

    client: str
    subscriber: str | None = None


class Event(Struct, frozen=True, kw_only=True):
    """The newest version now. Versions that came in quick succession may share one event."""

    newest: int | None
    closing: bool = False
    """The server goes down on purpose; poll the store until it is back."""


class Fetch(Struct, frozen=True, kw_only=True):
    """What is read for the delta from `have` (None: the base) to `version`. The answer holds a lease."""

    version: int
    have: int | None
    full: bool = False
    """All of `version`, whatever the reader has."""
    subscriber: str


class FetchPlan(Struct, frozen=True, kw_only=True):
    """Versions whose blobs turn `have` into `version`, oldest first; leased until `release` or for `ttl`
    seconds.
    """

    versions: tuple[int, ...]
    folders: tuple[str, ...]
    """Their folders below the store's root."""
    nbytes: int
    lease: str
    ttl: float


class Release(Struct, frozen=True, kw_only=True):
    """Give a lease of `fetch` back. One that has expired is no error."""

    lease: str


class Acked(Ack, frozen=True, kw_only=True):
    """An acknowledgement, and when its subscriber took the steps there."""

    way: dict[str, float] = msgspec.field(default_factory=dict)
    """Stage -> seconds since the Unix epoch."""


class One(Struct, frozen=True, kw_only=True):
    """Names one version."""

    version: int


class Empty(Struct, frozen=True, kw_only=True):
    """No arguments, or nothing to say."""


class Records(Struct, frozen=True, kw_only=True):
    """All versions, oldest first."""

    records: tuple[VersionRecord, ...]


class Subscriber(Struct, frozen=True, kw_only=True):
    """One engine's follower as the server sees it."""

    name: str
    state: Literal["current", "behind", "lagging"]
    """"current": it acked the newest version. "behind": not yet. "lagging": not within `sync_timeout` of the
    commit of the oldest version that it lacks.
    """
    version: int | None
    """Newest version that it acked."""
    lag: int
    """Versions between that and the newest."""
    connected: bool
    """A watch stream of its is open now."""
    last_seen: float | None
    ack: Ack | None = None


class Subscribers(Struct, frozen=True, kw_only=True):
    """Every subscriber that ever acked or watched by name, by name."""

    newest: int | None
    subscribers: tuple[Subscriber, ...]


METHODS: dict[str, tuple[type[Struct], type[Struct]]] = {
    "Hello": (Hello, Welcome),
    "Publish": (Publish, Published),
    "Watch": (Watch, Event),
    "Fetch": (Fetch, FetchPlan),
    "Release": (Release, Empty),
    "Ack": (Acked, Empty),
    "Record": (One, VersionRecord),
    "Versions": (Empty, Records),
    "Subscribers": (Empty, Subscribers),
}
STREAMS = frozenset({"Watch"})


class _Reply(Struct, array_like=True, frozen=True):
    error: dict[str, Any] | None
    body: msgspec.Raw = msgspec.Raw(b"\xc0")


_T = TypeVar("_T", bound=Struct)
_encoder = msgspec.msgpack.Encoder()


def path_of(method: str) -> str:
    """The HTTP/2 path of a method."""
    return f"/{SERVICE}/{method}"


def pack(message: Struct) -> bytes:
    """A request, or an event of a stream."""
    return _encoder.encode(message)


def unpack(data: bytes, kind: type[_T], *, what: str) -> _T:
    """The inverse of `pack`. Raises `FormatError` naming `what` and the field at fault."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise FormatError(
            f"{what}: {len(data)} bytes are not a {kind.__name__} message: {error}",
            hint="client and server must be of releases that speak the same protocol",
        ) from error


def pack_reply(reply: Struct) -> bytes:
    """A unary reply that went well."""
    return _encoder.encode(_Reply(None, msgspec.Raw(_encoder.encode(reply))))


def pack_error(error: WeightlineError) -> bytes:
    """A unary reply that says why not; `unpack_reply` raises the same error on the other side."""
    return _encoder.encode(_Reply(error.to_dict()))


def unpack_reply(data: bytes, kind: type[_T], *, what: str) -> _T:
    """The reply, or the error that the server answered with, raised as its own type."""
    envelope = unpack(data, _Reply, what=what)
    if envelope.error is not None:
        raise from_dict(envelope.error)
    return unpack(bytes(envelope.body), kind, what=what)
