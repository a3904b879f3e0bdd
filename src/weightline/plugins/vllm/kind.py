"""vLLM's answers to the questions of `plugins/kind.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from weightline.plugins import calls
from weightline.plugins.vllm import packing
from weightline.plugins.vllm.loading import WholeLoader

if TYPE_CHECKING:
    from weightline.plugins.places import Packing


class VllmKind:
    """`Kind` of a worker of vLLM."""

    name = "vllm"

    def __init__(self, vllm_config: Any) -> None:
        self._config = vllm_config

    def loader(self, model: Any) -> WholeLoader:
        return WholeLoader(model, self._config)

    def packing(self, module: Any, attribute: str) -> Packing | None:
        return packing.learn(module, attribute)

    def deferred(self, module: Any) -> bool:
        from vllm.model_executor.layers.attention import is_deferred_attention_layer

        return bool(is_deferred_attention_layer(module))

    def is_embedding(self, module: Any) -> bool:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        return isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)

    def is_norm(self, module: Any) -> bool:
        from vllm.model_executor.layers import layernorm

        names = ("RMSNorm", "GemmaRMSNorm", "LayerNorm")
        kinds = tuple(getattr(layernorm, name) for name in names if hasattr(layernorm, name))
        return isinstance(module, (*kinds, torch.nn.LayerNorm))

    def route(self, module: Any, x: torch.Tensor, expert: int) -> torch.Tensor:
        scores = torch.ones(1, 1, dtype=torch.float32, device=x.device)
        chosen = torch.full((1, 1), expert, dtype=torch.int32, device=x.device)
        answer: torch.Tensor = module.quant_method.apply(module, x.clone(), scores, chosen, None, None)
        return answer


class VllmDoor:
    """`Door` of a vLLM server."""

    def ask(self, url: str, request: Mapping[str, Any]) -> None:
        calls.post(url + "/init_weight_transfer_engine", {"init_info": dict(request)})

    def finish(self, url: str) -> None:
        # There is no way to ask whether one is open; ending none is a 500.
        calls.post(url + "/finish_weight_update", {}, tolerate=True)

    def label(self, url: str) -> str:
        return str(calls.get(url + "/weight_info").get("weight_version"))

    def set_label(self, url: str, label: str) -> None:
        calls.post(url + "/update_weight_version", {"new_version": label})

    def resume(self, url: str) -> None:
        calls.post(url + "/resume", {})
