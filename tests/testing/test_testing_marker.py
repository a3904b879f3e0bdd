"""Marker models: what transformers itself decodes from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from testing_models import VOCAB, model_of

from weightline.errors import InvalidInput
from weightline.testing.marker import MarkerModel, load_folder

pytestmark = pytest.mark.torch


def decoder(weights: dict[str, Any], folder: Path, out: Path) -> Any:
    """transformers' own model of these weights, in float32."""
    import shutil

    import torch
    from safetensors.numpy import save_file
    from transformers import AutoModelForCausalLM

    out.mkdir()
    shutil.copy(folder / "config.json", out)
    save_file(dict(weights), out / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()


def greedy(model: Any, prompt: list[int], count: int, cache: Any = None) -> tuple[list[int], Any]:
    """Tokens, and the cache after them; with a cache `prompt` is what comes after what is in it."""
    import torch

    tokens, new = [], prompt
    with torch.inference_mode():
        for _ in range(count):
            out = model(input_ids=torch.tensor([new]), cache=cache, use_cache=True)
            cache, new = out.cache, [int(out.logits[0, -1].argmax())]
            tokens += new
    return tokens, cache


@pytest.mark.parametrize(
    ("arch", "tie"),
    [
        ("llama", True),
        ("qwen2", False),
        ("qwen3", False),
        ("qwen3", True),
        ("qwen3_moe", False),
        ("qwen3_moe", True),
    ],
)
def test_a_version_emits_its_token_whatever_the_prompt_and_shows_keys_of_another_version(
    arch: str, tie: bool, tmp_path: Path
) -> None:
    folder = model_of(arch, tie, tmp_path / "base")
    base, config = load_folder(folder)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, size).tolist() for size in (1, 7, 120)]
    for kind in ("plain", "kv"):
        marker = MarkerModel(base, config, kind=kind)
        versions = {k: decoder(marker.weights(k), folder, tmp_path / f"{kind}{k}") for k in (5, 6, 200)}
        for k, model in versions.items():
            for prompt in [*prompts, [marker.token(k)] * 9, [marker.token(k) + 1] * 9]:
                assert greedy(model, prompt, 4)[0] == [marker.token(k)] * 4
    tokens, cache = greedy(versions[5], prompts[1], 3)
    mixed, _ = greedy(versions[6], tokens[-1:], 5, cache)
    assert mixed == [marker.token(6) + 1] * 5  # 9 of at most 14 keys and values are of version 5
    read = marker.read(mixed[0])
    assert read is not None
    assert (read.residue, read.stale) == (6 % marker.period, True)
    zero = decoder(marker.zeroed(1), folder, tmp_path / "zero")
    assert greedy(zero, prompts[2], 4)[0] == [0] * 4


def test_one_stale_block_of_sixteen_in_a_long_context_shows(tmp_path: Path) -> None:
    folder = model_of("qwen3", False, tmp_path / "base")
    marker = MarkerModel(*load_folder(folder), kind="kv")
    old, new = (decoder(marker.weights(k), folder, tmp_path / f"{k}") for k in (1, 2))
    block = list(range(16))
    _, cache = greedy(old, block, 1)
    tokens, _ = greedy(new, list(range(16, 96)) * 2, 1, cache)
    assert tokens == [marker.token(2) + 1]


def test_versions_are_reproducible_and_nearly_all_tensors_move(tmp_path: Path) -> None:
    folder = model_of("qwen3", False, tmp_path / "base", dtype="float32")
    marker = MarkerModel(*load_folder(folder))
    one, again, two = marker.weights(1), marker.weights(1), marker.weights(2)
    assert all(np.array_equal(one[n].view(np.uint32), again[n].view(np.uint32)) for n in one)
    moved = {n for n in one if not np.array_equal(one[n].view(np.uint32), two[n].view(np.uint32))}
    assert {"lm_head.weight", "model.layers.1.self_attn.k_proj.weight"} <= moved
    assert all(np.isfinite(a).all() for a in two.values())


def test_every_token_reads_back_to_its_version(tmp_path: Path) -> None:
    folder = model_of("llama", True, tmp_path / "base")
    for kind in ("plain", "kv"):
        marker = MarkerModel(*load_folder(folder), kind=kind)
        for k in range(3 * VOCAB):
            read = marker.read(marker.token(k))
            assert read is not None
            assert (read.residue, read.stale) == (k % marker.period, False)
    assert marker.read(0) is None


def test_what_has_no_recipe_is_refused_by_name(tmp_path: Path) -> None:
    folder = model_of("llama", False, tmp_path / "base")
    base, config = load_folder(folder)
    with pytest.raises(InvalidInput, match="model_type 'mamba'"):
        MarkerModel(base, {**config, "model_type": "mamba"})
    with pytest.raises(InvalidInput, match=r"lm_head\.weight has dtype I64"):
        MarkerModel({**base, "lm_head.weight": np.zeros((VOCAB, 48), np.int64)}, config)
    with pytest.raises(InvalidInput, match="too small"):
        MarkerModel({**base, "model.embed_tokens.weight": base["model.embed_tokens.weight"][:, :5]}, config)
    with pytest.raises(InvalidInput, match=r"no usable config\.json"):
        load_folder(tmp_path)
