"""Weightline: the weight line for RL post-training.

Commit every version of a policy once, ship it as a lossless delta, swap it into live engines, and know which
weights sampled every token. The names below are the public surface; all but the errors are
loaded on first use, so that `import weightline` costs milliseconds and needs neither torch nor numba nor
grpc.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from weightline import errors
from weightline.errors import (
    AlreadyServing,
    ConflictError,
    FormatError,
    IntegrityError,
    InvalidInput,
    RefitError,
    StorageFull,
    StoreNotFound,
    Unavailable,
    VersionGone,
    VersionNotFound,
    WeightlineError,
    WriterFenced,
)

if TYPE_CHECKING:
    from weightline import generate, spans
    from weightline.service.client import connect
    from weightline.service.embedded import CheckpointEngine, compute_delta
    from weightline.types import WeightVersionSpan

__version__ = "0.1.0"

__all__ = [
    "AlreadyServing",
    "CheckpointEngine",
    "ConflictError",
    "FormatError",
    "IntegrityError",
    "InvalidInput",
    "RefitError",
    "StorageFull",
    "StoreNotFound",
    "Unavailable",
    "VersionGone",
    "VersionNotFound",
    "WeightVersionSpan",
    "WeightlineError",
    "WriterFenced",
    "__version__",
    "compute_delta",
    "connect",
    "errors",
    "generate",
    "spans",
]

_LATE = {
    "WeightVersionSpan": ("weightline.types", "WeightVersionSpan"),
    "CheckpointEngine": ("weightline.service.embedded", "CheckpointEngine"),
    "compute_delta": ("weightline.service.embedded", "compute_delta"),
    "connect": ("weightline.service.client", "connect"),
    "generate": ("weightline.generate", None),
    "spans": ("weightline.spans", None),
}


def __getattr__(name: str) -> Any:
    try:
        module, attribute = _LATE[name]
    except KeyError:
        raise AttributeError(f"module 'weightline' has no attribute {name!r}") from None
    loaded = importlib.import_module(module)
    value = loaded if attribute is None else getattr(loaded, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
