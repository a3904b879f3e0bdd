"""Every error that Weightline raises on purpose, as one tree grouped by what a handler would do.

```
WeightlineError
├── InvalidInput        the caller passed something wrong; nothing was changed   fix the call
│   └── StoreNotFound   there is no store at that place                          create it, or mend the path
├── ConflictError       somebody else got there first                            read what is there, decide
│   ├── WriterFenced    a newer trainer owns the store                           stop
│   └── AlreadyServing  another server already serves this store                 use that one
├── VersionNotFound     no such version was ever committed                       mend the number
├── VersionGone         it was committed, its bytes were retired                 take a newer one
├── IntegrityError      bytes differ from their digest                           repair or refetch
├── FormatError         bytes are not what their format says, or are too new     upgrade, or mend the file
├── Unavailable         a server, store or engine does not answer now            try again
│   └── StorageFull     no room to write; nothing was published                  free space, try again
└── RefitError          an engine did not take a version                         see its `engine_state`
```

Each error has a `kind` (stable string), a `hint` (what to do next) and `retryable`. All of them pickle, so
they cross process pools. `STATUS` maps every kind to the CLI exit code, the HTTP status and the gRPC status.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

EngineState = Literal["old", "new", "unknown"]


class Status(NamedTuple):
    """How one error kind looks at each door."""

    exit_code: int
    http: int
    grpc: str


STATUS: dict[str, Status] = {
    "error": Status(1, 500, "INTERNAL"),
    "invalid_input": Status(2, 400, "INVALID_ARGUMENT"),
    "store_not_found": Status(3, 404, "NOT_FOUND"),
    "conflict": Status(4, 409, "ABORTED"),
    "writer_fenced": Status(5, 409, "FAILED_PRECONDITION"),
    "already_serving": Status(6, 409, "ALREADY_EXISTS"),
    "version_not_found": Status(7, 404, "NOT_FOUND"),
    "version_gone": Status(8, 410, "OUT_OF_RANGE"),
    "integrity": Status(9, 500, "DATA_LOSS"),
    "format": Status(10, 422, "UNIMPLEMENTED"),
    "unavailable": Status(11, 503, "UNAVAILABLE"),
    "storage_full": Status(12, 507, "RESOURCE_EXHAUSTED"),
    "refit": Status(13, 502, "CANCELLED"),
}


class WeightlineError(Exception):
    """Base of every error raised on purpose.

    `message` names the file, tensor or field at fault in one line; `hint` says what to do next.
    """

    kind: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, dict(self.__dict__)))

    @property
    def status(self) -> Status:
        """Exit code, HTTP status and gRPC status of this kind."""
        return STATUS[self.kind]

    def to_dict(self) -> dict[str, Any]:
        """The error as it crosses a wire; `from_dict` is its inverse."""
        extra = {k: v for k, v in self.__dict__.items() if k not in ("message", "hint")}
        known = {"kind": self.kind, "message": self.message, "hint": self.hint}
        return {**known, "retryable": self.retryable, **extra}


class InvalidInput(WeightlineError):
    """The caller passed something wrong; nothing was changed."""

    kind = "invalid_input"


class StoreNotFound(InvalidInput):
    """There is no store at that place."""

    kind = "store_not_found"


class ConflictError(WeightlineError):
    """Somebody else got there first."""

    kind = "conflict"


class WriterFenced(ConflictError):
    """A newer trainer owns the store; this one must stop. It has published nothing since it was fenced."""

    kind = "writer_fenced"


class AlreadyServing(ConflictError):
    """Another server already serves this store."""

    kind = "already_serving"


class VersionNotFound(WeightlineError):
    """No such version was ever committed in this run."""

    kind = "version_not_found"


class VersionGone(WeightlineError):
    """The version was committed, and its bytes have been retired."""

    kind = "version_gone"


class IntegrityError(WeightlineError):
    """Bytes differ from the digest that was recorded for them."""

    kind = "integrity"


class FormatError(WeightlineError):
    """Bytes are not what their format says, or come from a newer format."""

    kind = "format"


class Unavailable(WeightlineError):
    """A server, store or engine does not answer now; the same call may go through later."""

    kind = "unavailable"
    retryable = True


class StorageFull(Unavailable):
    """There was no room to write; nothing was published and what was staged is removed."""

    kind = "storage_full"


class RefitError(WeightlineError):
    """An engine did not take a version.

    `engine_state` says what it serves now: "old" (the version before, bit-exactly), "new" (the version that
    was asked for) or "unknown" (quarantined: refit it in full before it serves again).
    """

    kind = "refit"

    def __init__(self, message: str, *, engine_state: EngineState, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.engine_state: EngineState = engine_state


def _subclasses(root: type[WeightlineError]) -> list[type[WeightlineError]]:
    return [root, *(c for child in root.__subclasses__() for c in _subclasses(child))]


def _rebuild(cls: type[WeightlineError], message: str, fields: dict[str, Any]) -> WeightlineError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(fields)
    return error


def from_dict(data: dict[str, Any]) -> WeightlineError:
    """The error that `WeightlineError.to_dict` described; an unknown kind becomes a `WeightlineError`."""
    known = {c.kind: c for c in _subclasses(WeightlineError)}
    cls = known.get(str(data.get("kind")), WeightlineError)
    fields = {k: v for k, v in data.items() if k not in ("kind", "retryable")}
    fields.setdefault("hint", "")
    if cls is RefitError:
        fields.setdefault("engine_state", "unknown")
    return _rebuild(cls, str(fields.setdefault("message", "unknown error")), fields)
