"""The packing trap on CPUs: vLLM's oneDNN path keeps packed copies of linear weights.

A packed linear has an emptied `weight`; a tied head keeps a live-looking `weight` and computes with a stale
copy. While a model is loaded for an engine that was asked for `{"backend": "weightline"}`, the oneDNN path is
reported as unsupported, so that every linear computes with its own live weight. All other engines of the
process see what they saw before.
"""

from __future__ import annotations

import os
from typing import Any

KEEP_PACKED = "WEIGHTLINE_VLLM_PACKED"
"""Environment variable: "1" leaves vLLM's packing as it is. Linears are faster then on some CPUs, and every
refit gives them in full, as whole modules."""


class _UnlessWeightline:
    """Truth of `original`, but False while a weightline engine is being loaded."""

    def __init__(self, original: bool) -> None:
        self.original = original

    def __bool__(self) -> bool:
        return self.original and not _loading_for_weightline()


def _loading_for_weightline() -> bool:
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    transfer = getattr(config, "weight_transfer_config", None)
    return getattr(transfer, "backend", None) == "weightline"


def spring() -> bool:
    """Take the trap out of the way; idempotent. False when this vLLM has no such switch, or when it was asked
    to leave it."""
    if os.environ.get(KEEP_PACKED) == "1":
        return False
    import vllm._custom_ops as ops

    switch: Any = getattr(ops, "_supports_onednn", None)
    if isinstance(switch, _UnlessWeightline):
        return True
    if not isinstance(switch, bool):
        return False
    ops._supports_onednn = _UnlessWeightline(switch)
    return True
