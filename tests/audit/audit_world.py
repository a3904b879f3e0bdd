"""What the audit tests share: a store of versions, and outputs sampled token by token under known swaps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPT = (5, 17, 200, 33, 90, 411, 8)


@dataclass(frozen=True)
class World:
    """A real store, the model folder, and for each version its model in float32."""

    line: Any
    folder: Path
    models: dict[int, Any]
    labels: dict[int, str]


def sample_greedily(
    world: World, prompt: tuple[int, ...], versions: list[int], *, rebuild_at: tuple[int, ...] = ()
) -> dict[str, Any]:
    """One choice as an engine would report it: output token i is sampled by `versions[i]`, one position a
    pass.

    Every swap keeps the KV, but those before the output indexes in `rebuild_at`. Written without the code
    under test.
    """
    import torch
    from transformers import DynamicCache

    context, cache, kv, logprobs = list(prompt), DynamicCache(), [], []
    with torch.inference_mode():
        for i, version in enumerate(versions):
            if i in rebuild_at:
                cache, kv = DynamicCache(), []
            for position in range(len(kv), len(context)):
                ids = torch.tensor([[context[position]]])
                logits = world.models[version](ids, cache=cache, use_cache=True).logits[0, -1]
                kv.append(version)
            context.append(int(logits.argmax()))
            logprobs.append(float(logits.log_softmax(0)[context[-1]]))
    return {
        "token_ids": context[len(prompt) :],
        "logprobs": logprobs,
        "finish_reason": "length",
        "weight_versions": spans_of([world.labels[v] for v in versions]),
        "kv_weight_versions": spans_of([world.labels[v] for v in kv]),
        "kv_recomputed_at": list(rebuild_at),
    }


def spans_of(labels: list[str]) -> list[dict[str, Any]]:
    """Canonical spans of one label a token."""
    out: list[dict[str, Any]] = []
    for i, label in enumerate(labels):
        if out and out[-1]["version"] == label:
            out[-1]["end"] = i + 1
        else:
            out.append({"version": label, "start": i, "end": i + 1})
    return out


def request_of(world: World, name: str, *choices: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """One line of a rollout file."""
    return {
        "run": world.line.run,
        "request_id": name,
        "prompt_token_ids": list(PROMPT),
        "sampling": {"temperature": 0.0},
        "logprobs_mode": "raw",
        "choices": list(choices),
        **fields,
    }
