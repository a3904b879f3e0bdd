"""The SGLang plugin: steps into the scheduler from the entry point `sglang.srt.plugins`.

SGLang loads it in every process of a server started with its usual command. It imports nothing of ours but
this module until a scheduler is made. `WEIGHTLINE_SGLANG=0` leaves SGLang as it is.
"""

from __future__ import annotations

import logging
import os
import pkgutil
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightline.plugins.sglang.hooks import Hook

log = logging.getLogger("sglang.weightline")

NAME = "weightline"
OFF = "WEIGHTLINE_SGLANG"
TESTED = ("0.5.23",)
NEVER_RUN = ("0.5.19", "0.5.20", "0.5.21", "0.5.22")
"""Accepted when everything that the plugin steps into is there."""
SCHEDULER = "sglang.srt.managers.scheduler"
CONTEXT = ("get_serving", "get_context", "get_parallel")
"""What the plugin asks of `sglang.srt.runtime_context`."""


def unsupported(version: str, hooks: Iterable[Hook]) -> str:
    """Why the plugin does not run on this SGLang version; empty when it does."""
    short = version.split("+")[0].split(".post")[0].split("rc")[0]
    if short not in (*TESTED, *NEVER_RUN):
        return f"weightline supports SGLang {', '.join(sorted((*TESTED, *NEVER_RUN)))}, this is {version}"
    targets = [hook.target for hook in hooks]
    targets += [f"sglang.srt.runtime_context.{name}" for name in CONTEXT]
    missing = [target for target in targets if not _there(target)]
    return f"this SGLang ({version}) lacks {', '.join(missing)}" if missing else ""


def _there(target: str) -> bool:
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    return True


def register() -> None:
    """Entry point. Does nothing in a process that makes no scheduler, and nothing on an SGLang that it does
    not support, but for a line in the log: a server that is not followed never notices."""
    if os.environ.get(OFF) == "0" or SCHEDULER not in sys.modules:
        return
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from weightline.plugins.sglang import boundary, engine, namespaces

    hooks = (*engine.HOOKS, *boundary.HOOKS, *namespaces.HOOKS)
    try:
        reason = unsupported(installed("sglang"), hooks)
    except PackageNotFoundError:
        reason = "SGLang's version cannot be told: its package metadata is missing"
    if reason:
        log.warning("weightline: %s; this server cannot be refitted through the plugin", reason)
        return
    for hook in hooks:
        HookRegistry.register(hook.target, hook.around, HookType.AROUND)
