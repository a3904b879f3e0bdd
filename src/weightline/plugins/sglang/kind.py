"""SGLang's answers to the questions of `plugins/kind.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from weightline.plugins import calls
from weightline.plugins.exchange import Refused

if TYPE_CHECKING:
    from weightline.plugins.groups import Group
    from weightline.plugins.places import Packing

PREFIX = "weightline:"
"""What a request of ours begins with, in the `action` of SGLang's `/weights_checker`."""


class NoLoader:
    """Whole modules are not loaded from in here: SGLang cannot restore every packed layout, and has no way to
    limit a load to some modules and be asked whether it took."""

    missing = "this module processes its weights after loading, and takes no changes"

    def dtypes(self, group: Group) -> set[str]:  # noqa: ARG002
        return set()

    def load(self, groups: list[Group], tensors: Mapping[str, torch.Tensor]) -> None:  # noqa: ARG002
        raise Refused(self.missing)


class SglangKind:
    """`Kind` of a scheduler process of SGLang."""

    name = "sglang"

    def loader(self, model: Any) -> NoLoader:  # noqa: ARG002
        return NoLoader()

    def packing(self, module: Any, attribute: str) -> Packing | None:  # noqa: ARG002
        return None

    def deferred(self, module: Any) -> bool:  # noqa: ARG002
        return False

    def is_embedding(self, module: Any) -> bool:
        from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        return isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)

    def is_norm(self, module: Any) -> bool:
        from sglang.srt.layers import layernorm

        names = ("RMSNorm", "GemmaRMSNorm", "Gemma3RMSNorm", "LayerNorm")
        kinds = tuple(getattr(layernorm, name) for name in names if hasattr(layernorm, name))
        return isinstance(module, (*kinds, torch.nn.LayerNorm))

    def route(self, module: Any, x: torch.Tensor, expert: int) -> torch.Tensor:
        from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        scores = torch.ones(1, 1, dtype=torch.float32, device=x.device)
        chosen = torch.full((1, 1), expert, dtype=torch.int32, device=x.device)
        topk = StandardTopKOutput(scores, chosen, scores)
        answer = module.quant_method.apply(module, StandardDispatchOutput(x.clone(), None, topk))
        hidden: torch.Tensor = answer.hidden_states
        return hidden


class SglangDoor:
    """`Door` of an SGLang server."""

    def ask(self, url: str, request: Mapping[str, Any]) -> None:
        calls.post(url + "/weights_checker", {"action": PREFIX + json.dumps(dict(request))})

    def finish(self, url: str) -> None:
        """The plugin's writes need no session of SGLang's own."""

    def label(self, url: str) -> str:
        return str(calls.get(url + "/model_info").get("weight_version"))

    def set_label(self, url: str, label: str) -> None:
        calls.post(url + "/update_weight_version", {"new_version": label, "abort_all_requests": False})

    def resume(self, url: str) -> None:
        calls.post(url + "/continue_generation", {"torch_empty_cache": False})
