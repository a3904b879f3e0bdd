"""How a module of this plugin says where in SGLang it steps in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Hook(NamedTuple):
    """`around(original, *args, **kwargs)` runs in place of the function or method at the dotted path
    `target`."""

    target: str
    around: Callable[..., Any]
