"""The engine port: what a follower needs of one live rollout engine, whatever its kind.

The follower owns the order (`prepare` while serving -> `pause` -> `apply` -> `verify` -> `invalidate` ->
`label` -> `resume`) and the exit paths; an adapter owns how each verb is done on its engine. Every verb may
raise `RefitError` or `Unavailable`, is bounded in time, and is idempotent within one session, so that a
follower may repeat it after a lost answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from msgspec import Struct

from weightline.types import TensorSpec, Verification

if TYPE_CHECKING:
    from weightline.codec import Delta


class Hold(Struct, frozen=True):
    """Somebody decided that an engine stays at this version of this run until it is told otherwise."""

    run: str
    version: int


class EngineDescription(Struct, frozen=True, kw_only=True):
    """What an engine says of itself while it serves."""

    kind: str
    label: str
    """The label that new tokens carry now; "default" after a restart."""
    version: int | None
    """The version behind `label` as the engine was told by a follower; None when it was never told (a
    restart)."""
    run: str | None
    """The run that `version` belongs to."""
    instance: str
    """Changes with every start of the engine process."""
    paused: bool
    quarantined: bool
    """Its weights are in an unknown state; it must take a full refit before it serves."""
    tensors: tuple[TensorSpec, ...]
    """Every name the engine can take, tied aliases included, in the dtype it computes in."""
    aliases: dict[str, str] = {}
    """Tied name -> the name that owns the storage."""
    proves_digests: bool = False
    """It knows the digests of its live tensors, so a full refit may leave out those that need no change."""
    groups: dict[str, int] = {}
    """Tensors of modules that take no changes -> number of a group that must be given together, in full."""
    hold: Hold | None = None
    """Every follower brings it to that version and lets it stay there (`weightline rollback`)."""


class WholeTensor(Struct, frozen=True, kw_only=True):
    """A tensor in full, for a module that takes no changes: a file of its bits alone (`rollout/host.py`)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    path: str
    old_path: str | None
    """The same of the version that is live, for the way back; None when no file is known to hold it."""
    old_digest: str | None


class Refit(Struct, frozen=True, kw_only=True):
    """One step of an engine from the bytes of `have` to those of `version`."""

    run: str
    version: int
    label: str
    have: int | None
    """The version that must be live now for `file` to be right; None: `file` is full, any state will do."""
    have_label: str | None
    file: Path
    """A delta file whose every change is an absolute value (`codec`, absolute level), or what the port itself
    wrote (`WritingPort`); full tensors when `have` is None."""
    digests: dict[str, str]
    """Additive digest that each tensor must have afterwards, by the engine's name: of those in `file` and,
    when `have` is None, of all (see `EngineDescription.proves_digests`)."""
    whole: tuple[WholeTensor, ...] = ()
    """Every tensor of every group that the refit touches (`EngineDescription.groups`); `file` leaves them
    out."""


class Prepared(Struct, frozen=True, kw_only=True):
    """The engine has validated a refit and holds all it needs to apply it."""

    session: str
    elements: int


class EnginePort(Protocol):
    """One live engine. Not thread-safe: one follower owns it."""

    def describe(self) -> EngineDescription:
        """What the engine serves now. Raises `Unavailable` while it is not up."""
        ...

    def prepare(self, refit: Refit) -> Prepared:
        """Validate names, shapes and dtypes and decode, while the engine serves. Raises `RefitError("old")`
        and lists all misses."""
        ...

    def pause(self, prepared: Prepared) -> None:
        """Freeze running requests between two steps (keep), so that no step is in flight."""
        ...

    def apply(self, prepared: Prepared) -> None:
        """Write the new bits; the engine keeps the old ones until `close`."""
        ...

    def verify(self, prepared: Prepared) -> Verification:
        """Read back what was written and compare it with the digests. Raises `RefitError` on a difference."""
        ...

    def invalidate(self, prepared: Prepared) -> None:
        """See to it that no new request reads KV that older weights computed."""
        ...

    def label(self, prepared: Prepared) -> None:
        """From the next step on tokens carry the new label. Only after `verify`."""
        ...

    def resume(self) -> None:
        """Let generation go on. Idempotent."""
        ...

    def rollback(self, prepared: Prepared) -> None:
        """Put the old bits and the old label back. Raises `RefitError("unknown")` when it cannot."""
        ...

    def close_session(self, prepared: Prepared) -> None:
        """Drop the session and its undo log."""
        ...

    def digests(self, names: tuple[str, ...] | None = None) -> dict[str, str]:
        """Additive digest of live tensors in the stored dtypes, recomputed in full (the work behind
        `weightline check`)."""
        ...

    def close(self) -> None:
        """Close connections. The engine goes on serving."""
        ...


@runtime_checkable
class WritingPort(EnginePort, Protocol):
    """An engine that reads refits in a form of its own."""

    def write_refit(self, delta: Delta, path: Path) -> int:
        """Write the changes of `delta`, all absolute and under the engine's names, for `Refit.file`. Returns
        the size in bytes. Raises `OSError`."""
        ...


@runtime_checkable
class HoldingPort(EnginePort, Protocol):
    """An engine that remembers a hold, so that all its followers see it."""

    def set_hold(self, hold: Hold | None) -> None:
        """Remember it until the engine ends, or until it is replaced; None releases. Idempotent."""
        ...
