"""The doors to a store: embedded (`CheckpointEngine`), `connect(url)`, and the resident server (`serve`).
Loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from weightline.service.line import Line, Weights

if TYPE_CHECKING:
    from weightline.service.client import ServedLine, connect
    from weightline.service.direct import DirectLine
    from weightline.service.embedded import CheckpointEngine, compute_delta
    from weightline.service.presence import ServerInfo, serving
    from weightline.service.server import serve

__all__ = [
    "CheckpointEngine",
    "DirectLine",
    "Line",
    "ServedLine",
    "ServerInfo",
    "Weights",
    "compute_delta",
    "connect",
    "serve",
    "serving",
]

_LATE = {
    "CheckpointEngine": "embedded",
    "DirectLine": "direct",
    "ServedLine": "client",
    "ServerInfo": "presence",
    "compute_delta": "embedded",
    "connect": "client",
    "serve": "server",
    "serving": "presence",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'weightline.service' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"weightline.service.{_LATE[name]}"), name)
    globals()[name] = value
    return value
