"""The vLLM plugin: registers the weight transfer engine `weightline` from the entry point
`vllm.general_plugins`.

vLLM loads it in every process of an engine; registration is idempotent and imports nothing of ours but this
module. What the engine does is in `engine`.
"""

from __future__ import annotations

import logging

log = logging.getLogger("vllm.weightline")

NAME = "weightline"
TESTED = ("0.32",)
NEVER_RUN = ("0.31", "0.33")
"""Accepted when every feature that the plugin needs is there."""


def missing_features() -> list[str]:
    """What this vLLM lacks that the plugin needs, by looking at its own classes."""
    missing = []
    try:
        from vllm.distributed.weight_transfer.base import WeightTransferEngine
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
    except ImportError as error:
        return [str(error)]
    for verb in ("init_transfer_engine", "start_weight_update", "finish_weight_update", "receive_weights",
                 "update_weights", "parse_init_info", "parse_update_info", "shutdown"):  # fmt: skip
        if not hasattr(WeightTransferEngine, verb):
            missing.append(f"WeightTransferEngine.{verb}")
    if not hasattr(Factory, "register_engine") or not hasattr(Factory, "_registry"):
        missing.append("WeightTransferEngineFactory.register_engine")
    return missing


def unsupported(version: str) -> str | None:
    """Why the plugin does not run on this vLLM version; None when it does."""
    short = ".".join(version.split("+")[0].split(".")[:2])
    if short not in (*TESTED, *NEVER_RUN):
        return f"weightline supports vLLM {', '.join(sorted((*TESTED, *NEVER_RUN)))}, this is {version}"
    missing = missing_features()
    if missing:
        return f"this vLLM ({version}) lacks {', '.join(missing)}"
    return None


def register() -> None:
    """Entry point. On a vLLM that it does not support, the name is registered all the same, and creating the
    engine raises what is the matter: an engine that does not ask for weightline never notices.
    """
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
    except ImportError:
        log.warning("weightline: this vLLM has no weight transfer engines; the plugin is not registered")
        return
    if NAME in Factory._registry:
        return
    try:
        reason = unsupported(installed("vllm"))
    except PackageNotFoundError:
        reason = "vLLM's version cannot be told: its package metadata is missing"
    if reason is not None:
        Factory._registry[NAME] = _refusing(reason)
        return
    from weightline.plugins.vllm.trap import spring

    spring()
    Factory.register_engine(NAME, "weightline.plugins.vllm.engine", "WeightlineTransferEngine")


def _refusing(reason: str) -> object:
    def refuse() -> None:
        raise RuntimeError(f"weight transfer backend 'weightline': {reason}")

    return refuse
