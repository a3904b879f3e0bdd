"""Engine kinds a follower can drive, and how `KIND=URL` is read."""

from __future__ import annotations

from pathlib import Path

from weightline.errors import InvalidInput
from weightline.rollout.engines.base import EngineDescription, EnginePort, Hold, HoldingPort, Prepared, Refit
from weightline.rollout.engines.embedded import EmbeddedEngine

KINDS = ("embedded", "vllm", "sglang")

__all__ = [
    "KINDS",
    "EmbeddedEngine",
    "EngineDescription",
    "EnginePort",
    "Hold",
    "HoldingPort",
    "Prepared",
    "Refit",
    "open_engine",
]


def open_engine(engine: str, *, holder: str, runtime_dir: Path | None = None) -> EnginePort:
    """The port on the engine that `KIND=URL` names. Connects on first use.

    `runtime_dir`: a folder that the engine sees under the same path, for what it is handed as a file.

    Raises `InvalidInput` for a kind that is unknown and for a malformed URL.
    """
    kind, separator, url = engine.partition("=")
    hint = f"write KIND=URL with one of {', '.join(KINDS)}, for example embedded=http://127.0.0.1:8000"
    if not separator or not url:
        raise InvalidInput(f"engine {engine!r} is not KIND=URL", hint=hint)
    if kind not in KINDS:
        raise InvalidInput(f"engine kind {kind!r} is unknown", hint=hint)
    if kind == "vllm":
        from weightline.rollout.engines.vllm import VllmEngine

        return VllmEngine(url, holder=holder, runtime_dir=runtime_dir)
    if kind == "sglang":
        from weightline.rollout.engines.sglang import SglangEngine

        return SglangEngine(url, holder=holder, runtime_dir=runtime_dir)
    return EmbeddedEngine(url, holder=holder)
