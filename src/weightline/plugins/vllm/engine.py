"""The weight transfer engine `weightline`: vLLM's verbs in, refits out.

`POST /init_weight_transfer_engine {"init_info": {...}}` carries everything that may happen at any time
(hello, prepare, digests, rollback, close); `POST /update_weights` carries `apply`, inside vLLM's own session
(`/start_weight_update` … `/finish_weight_update`), whose end commits. vLLM's routes return nothing: answers
are files (`plugins/front.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version as installed
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine

from weightline.plugins.front import Front
from weightline.plugins.vllm.kind import VllmDoor, VllmKind


@dataclass
class Request:
    """One request of a follower, as vLLM hands it over."""

    body: dict[str, Any]


class WeightlineTransferEngine(WeightTransferEngine[Request, Request]):  # type: ignore[misc]
    """Created once in each worker, after the model was loaded and before it serves."""

    init_info_cls = Request
    update_info_cls = Request
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        facts = {
            "vllm": installed("vllm"),
            "prefix_caching": bool(vllm_config.cache_config.enable_prefix_caching),
        }
        self.front = Front(VllmKind(vllm_config), VllmDoor(), facts=lambda: facts)
        self.front.refusals += unsupported_parts(vllm_config)
        self.front.open(model, vllm_config.model_config.model, vllm_config.model_config.revision)

    def parse_init_info(self, init_dict: dict[str, Any]) -> Request:
        return Request(dict(init_dict))

    def parse_update_info(self, update_dict: dict[str, Any]) -> Request:
        return Request(dict(update_dict))

    def init_transfer_engine(self, init_info: Request) -> None:
        if init_info.body:
            self.front.serve(init_info.body)

    def receive_weights(self, update_info: Request) -> None:
        self.front.serve(update_info.body)

    def start_weight_update(self) -> None:
        """Nothing to do: writes go into the live storage."""

    def finish_weight_update(self) -> None:
        """vLLM's session ends, and sets the label next: an applied refit is committed."""
        self.front.commit()

    def shutdown(self) -> None:
        self.front.close()


def unsupported_parts(vllm_config: Any) -> list[str]:
    """What of this engine's configuration refits are not offered for."""
    found = []
    parallel = vllm_config.parallel_config
    for name, size in (
        ("tensor-parallel", parallel.tensor_parallel_size),
        ("pipeline-parallel", parallel.pipeline_parallel_size),
        ("data-parallel", parallel.data_parallel_size),
    ):
        if size > 1:
            found.append(f"{name} size {size} is not supported")
    if getattr(vllm_config, "kv_transfer_config", None) is not None:
        found.append("a KV connector is configured: its cache may survive a refit")
    if getattr(vllm_config, "ec_transfer_config", None) is not None:
        found.append("an encoder-cache connector is configured: its cache may survive a refit")
    if getattr(vllm_config, "lora_config", None) is not None:
        found.append("LoRA adapters are enabled: they wrap the modules that a refit writes to")
    return found
