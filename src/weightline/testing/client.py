"""The client port: what the suite needs of one live engine, whatever its kind, and how answers are recorded.

An adapter is one small module a kind; it translates requests and answers, and judges nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from msgspec import Struct, field

from weightline.errors import InvalidInput
from weightline.types import WeightVersionSpan

Kv = Literal["kept", "recomputed", "ended"]
"""What a pause does to the keys and values of running requests."""
OutputMode = Literal["tokens", "text"]
ABORT_WHILE_PAUSED = "abort during a pause"
"""In `Client.not_offered`: a request that came during a pause cannot be aborted before the pause ends."""


class Pause(Struct, frozen=True):
    """One way to pause, in the engine's own words."""

    name: str
    """As it appears in check ids, e.g. "keep", "keep-clear", "abort", "wait", "retract"."""
    kv: Kv
    aborts: bool = False
    """Running requests end with what they have."""
    drains: bool = False
    """Running requests run to their end first."""


class Ask(Struct, frozen=True, kw_only=True):
    """One greedy request, without an end token."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    stream: bool = False
    n: int = 1
    mode: OutputMode = "tokens"
    stop_token_ids: tuple[int, ...] = ()
    disconnect_after: int | None = None
    """A stream is left after so many events; any other request after so many hundredths of a second."""


class Output(Struct, kw_only=True):
    """What one sequence of a request brought."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    """Tokens in each event of a stream; empty for an answer in one piece."""
    finish: list[str] = field(default_factory=list)
    """Every finish reason that came; exactly one when all is well."""
    spans: list[dict[str, Any]] | None = None
    """`weight_versions` of the final output, as it came."""
    early_spans: int = 0
    """Events with spans before the final one."""
    after_final: int = 0
    """Events after the final one."""
    kv_spans: list[dict[str, Any]] | None = None
    """`kv_weight_versions`, for engines that have it."""
    text: str | None = None

    def versions(self) -> tuple[WeightVersionSpan, ...]:
        """The spans, typed. Raises `InvalidInput` for one that cannot be."""
        if not isinstance(self.spans, list):
            raise InvalidInput(f"weight_versions is {self.spans!r}", hint="a list on every final output")
        try:
            return tuple(WeightVersionSpan(s["version"], s["start"], s["end"]) for s in self.spans)
        except (KeyError, TypeError):
            raise InvalidInput(
                f"weight_versions is {self.spans!r}", hint='[{"version": str, "start": int, "end": int}]'
            ) from None


class Reply(Struct, kw_only=True):
    """All that came back for one request."""

    ask: Ask
    status: int = 0
    """HTTP status; 0 when no answer came."""
    outputs: dict[int, Output] = field(default_factory=dict)
    ends: int = 0
    """End marks of a stream ("[DONE]"); 1 for an answer in one piece."""
    left: bool = False
    """We went away ourselves."""
    error: str = ""

    @property
    def single(self) -> Output:
        """Sequence 0 (an empty one when nothing came)."""
        return self.outputs.get(0) or Output(index=0)

    def output(self, index: int) -> Output:
        """The record of sequence `index`, made on first use."""
        return self.outputs.setdefault(index, Output(index=index))


OnEvent = Callable[[int], None]
"""Called with the number of tokens so far, after each event of a stream."""


class Client(Protocol):
    """One live engine. Safe to use from several threads."""

    kind: str
    url: str
    not_offered: dict[str, str]
    """What this kind does not have -> why; goes into the report."""

    @property
    def output_modes(self) -> tuple[OutputMode, ...]:
        """What it answers in."""
        ...

    @property
    def pauses(self) -> tuple[Pause, ...]:
        """Every way to pause that keeps the engine's own promise of exact labels."""
        ...

    def generate(self, ask: Ask, on_event: OnEvent | None = None) -> Reply:
        """Send a request and read it to its end. Never raises for what the engine does."""
        ...

    def abort(self, id: str) -> None:
        """End a request by the id it was sent with; unknown ids do nothing."""
        ...

    def pause(self, pause: Pause) -> None:
        """Returns when no step runs any more. Idempotent."""
        ...

    def resume(self) -> None:
        """Idempotent."""
        ...

    def paused(self) -> bool:
        """Whether no step runs until `resume`."""
        ...

    def label(self) -> str:
        """The label of the next token."""
        ...

    def set_label(self, label: str) -> None:
        """Change the label and nothing else."""
        ...

    def live_requests(self) -> int:
        """Requests that run or wait now."""
        ...

    def model_folder(self) -> Path:
        """The folder that the engine was started with. Raises `InvalidInput` when it does not tell."""
        ...

    def surface(self) -> list[tuple[str, str, bool, str]]:
        """Checks of the control routes that only this kind has: (id, what, ok, evidence). Leaves the engine
        as it was."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...


def open_client(engine: str) -> Client:
    """The client of `KIND=URL`. Raises `InvalidInput` for a kind without one."""
    kind, separator, url = engine.partition("=")
    if not separator or not url:
        raise InvalidInput(f"engine {engine!r} is not KIND=URL", hint="e.g. embedded=http://127.0.0.1:8001")
    if kind == "embedded":
        from weightline.testing.client_embedded import EmbeddedClient

        return EmbeddedClient(url)
    if kind == "vllm":
        from weightline.testing.client_vllm import VllmClient

        return VllmClient(url)
    if kind == "sglang":
        from weightline.testing.client_sglang import SglangClient

        return SglangClient(url)
    raise InvalidInput(
        f"engine kind {kind!r} has no conformance client", hint="these have: embedded, sglang, vllm"
    )
