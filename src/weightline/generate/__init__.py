"""The embedded rollout engine: continuous batching over transformers, with vLLM's RL routes and exact spans.

Nothing is imported here until it is used: torch and transformers take seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightline.generate.app import build_app
    from weightline.generate.engine import Engine
    from weightline.generate.model import load_model
    from weightline.generate.options import EngineOptions
    from weightline.generate.outputs import CompletionOutput, RequestOutput
    from weightline.generate.sampling import SamplingParams
    from weightline.generate.serve import serve_engine

__all__ = [
    "CompletionOutput",
    "Engine",
    "EngineOptions",
    "RequestOutput",
    "SamplingParams",
    "build_app",
    "load_model",
    "serve_engine",
]

_HOME = {
    "CompletionOutput": "outputs",
    "RequestOutput": "outputs",
    "Engine": "engine",
    "EngineOptions": "options",
    "SamplingParams": "sampling",
    "build_app": "app",
    "load_model": "model",
    "serve_engine": "serve",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
