"""The records of the control routes, as JSON. `EngineState` and `RefitOrder` mirror `EngineDescription` and
`Refit` of the engine port, which lives in a layer above and cannot be imported here; a test holds the two
together.
"""

from __future__ import annotations

from msgspec import Struct

from weightline.types import TensorSpec


class HeldAt(Struct, frozen=True):
    """As the engine port's `Hold`."""

    run: str
    version: int


class EngineState(Struct, frozen=True, kw_only=True):
    """`GET /weightline/describe`."""

    kind: str = "embedded"
    label: str
    version: int | None
    run: str | None
    instance: str
    paused: bool
    quarantined: bool
    tensors: tuple[TensorSpec, ...]
    aliases: dict[str, str] = {}
    proves_digests: bool = True
    hold: HeldAt | None = None
    model: str = ""
    """The folder the engine was started from."""
    running: int = 0
    """Sequences in a cache row."""
    waiting: int = 0
    """Requests in the queue."""
    session: str | None = None
    """The refit session that is open, and who holds it."""
    holder: str | None = None


class RefitOrder(Struct, frozen=True, kw_only=True):
    """Body of `POST /weightline/prepare`; fields as in the engine port's `Refit`."""

    run: str
    version: int
    label: str
    have: int | None
    have_label: str | None
    file: str
    digests: dict[str, str]
    holder: str = ""
    """Who asks: the same holder may prepare again, another one is refused while a session is open."""


class SessionBody(Struct, frozen=True, kw_only=True):
    """Body of the other session routes."""

    session: str


class SwitchBody(Struct, frozen=True, kw_only=True):
    """Body of `POST /weightline/switch`. With `clear_cache` running requests compute their keys and values
    anew under the new weights.
    """

    session: str
    clear_cache: bool = False


class DigestsBody(Struct, frozen=True, kw_only=True):
    """Body of `POST /weightline/digests`."""

    names: list[str] | None = None


class HoldBody(Struct, frozen=True, kw_only=True):
    """Body of `POST /weightline/hold`; null releases."""

    hold: HeldAt | None


class LabelBody(Struct, frozen=True, kw_only=True):
    """Body of `POST /update_weight_version`."""

    new_version: str
