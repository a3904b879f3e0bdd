"""torch tensors in, torch tensors out, and anchors that transformers opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from weightline.store import Store

pytestmark = pytest.mark.torch


def test_torch_tensors_come_back_bit_for_bit(store: Store) -> None:
    dtypes = [
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int8,
    ]
    weights = {str(d): torch.randint(0, 255, (4, 8), dtype=torch.uint8).view(d) for d in dtypes}
    weights["bool"] = torch.tensor([True, False])
    weights["scalar"] = torch.tensor(1.5, dtype=torch.bfloat16)
    weights["odd"] = torch.arange(12, dtype=torch.float32).reshape(3, 4).t()
    store.writer().commit(weights)
    loaded = store.load(1, like="torch")
    for name, tensor in weights.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(loaded[name].reshape(-1).view(torch.uint8), flat)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_nbytes", [4 << 30, 20_000], ids=["one_file", "shards"])
def test_transformers_opens_every_version(tmp_path: Path, tied: bool, shard_nbytes: int) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    config.save_pretrained(tmp_path / "config")
    store = Store.open(tmp_path / "s", create=True, shard_nbytes=shard_nbytes)
    writer = store.writer()
    states: list[dict[str, Any]] = []
    for k in range(3):
        with torch.no_grad():
            model.model.embed_tokens.weight[k] += 1
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        writer.commit(model.state_dict(), model_files=tmp_path / "config" if k == 0 else None, anchor=k == 2)
    for version, state in enumerate(states, 1):
        out = tmp_path / f"v{version}"
        store.checkout(version, out)
        loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).state_dict()
        assert loaded.keys() == state.keys()
        assert all(torch.equal(loaded[name], state[name]) for name in state)
    anchor = AutoModelForCausalLM.from_pretrained(store.root / store.record(3).folder, dtype=torch.bfloat16)
    assert torch.equal(anchor.state_dict()["lm_head.weight"], states[2]["lm_head.weight"])
    store.close()
