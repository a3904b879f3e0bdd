"""Places that a whole model of one rank does not have: tensor-parallel shards of vLLM's own layers, packed
experts, multi-query attention, absorbed MLA."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_weights import nudged, read_folder, state
from vllm_driver import Driver
from vllm_models import configure, groups, loaded

from weightline import codec
from weightline.errors import RefitError
from weightline.plugins import sums
from weightline.plugins.places import Live, Place, read_box, sources
from weightline.plugins.trace import trace_loaders

pytestmark = pytest.mark.vllm

HIDDEN, HEADS, HEAD = 48, 4, 16


class _Stacked(torch.nn.Module):
    """vLLM's own parallel layers, as one rank of several sees them, loaded the way its models load them."""

    STACKED = (
        ("qkv", "q", "q"),
        ("qkv", "k", "k"),
        ("qkv", "v", "v"),
        ("gate_up", "gate", 0),
        ("gate_up", "up", 1),
    )

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        from vllm.model_executor.layers.linear import (
            MergedColumnParallelLinear,
            QKVParallelLinear,
            RowParallelLinear,
        )
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        self.qkv = QKVParallelLinear(HIDDEN, HEAD, HEADS, kv_heads, bias=True)
        self.gate_up = MergedColumnParallelLinear(HIDDEN, [64, 64], bias=False)
        self.down = RowParallelLinear(64, HIDDEN, bias=False)
        self.embed = VocabParallelEmbedding(150, HIDDEN)

    def load_weights(self, weights: Any) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            module, leaf = name.split(".")
            for target, source, shard in self.STACKED:
                if module == source:
                    parameter = parameters[f"{target}.{leaf}"]
                    parameter.weight_loader(parameter, tensor, shard)
                    break
            else:
                parameter = parameters[name]
                parameter.weight_loader(parameter, tensor)


def _weights(kv_heads: int) -> dict[str, torch.Tensor]:
    rows = {"q": HEADS * HEAD, "k": kv_heads * HEAD, "v": kv_heads * HEAD, "gate": 64, "up": 64, "embed": 150}
    made = {f"{name}.weight": torch.randn(count, HIDDEN) for name, count in rows.items()}
    made |= {f"{name}.bias": torch.randn(rows[name]) for name in "qkv"}
    made["down.weight"] = torch.randn(HIDDEN, 64)
    return made


@pytest.fixture
def as_rank(
    monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Path]
) -> Iterator[Callable[[int, int], None]]:
    """Make vLLM's layers believe that they are one of several tensor-parallel ranks."""
    from vllm.config import set_current_vllm_config

    def become(rank: int, size: int) -> None:
        from vllm.distributed import parallel_state

        monkeypatch.setattr(parallel_state.get_tp_group(), "rank_in_group", rank)
        monkeypatch.setattr(parallel_state.get_tp_group(), "world_size", size)

    with set_current_vllm_config(configure(tiny("qwen3"))):
        groups()
        yield become
        become(0, 1)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_the_boxes_of_all_ranks_hold_each_element_of_the_checkpoint_where_vllm_put_it(
    as_rank: Callable[[int, int], None], kv_heads: int
) -> None:
    """Each rank is traced and loaded for real; digests of the parts add up to those of the whole tensors."""
    torch.manual_seed(kv_heads)
    weights = _weights(kv_heads)
    total: dict[str, dict[tuple[int, ...], sums.Lanes]] = {name: {} for name in weights}
    for rank in (0, 1):
        as_rank(rank, 2)
        model = _Stacked(kv_heads)
        traced = trace_loaders(model, [(n, "F32", tuple(t.shape)) for n, t in weights.items()])
        assert (traced.opaque, traced.faults) == ({}, {})
        model.load_weights(weights.items())
        parameters = dict(model.named_parameters())
        for name, boxes in traced.boxes.items():
            flat = codec.bits_of(weights[name])
            for box in boxes:
                live = Live(box.parameter, parameters[box.parameter])
                found, index = read_box(box, live), sources(box)
                assert np.array_equal(found, flat[index])
                total[name][(box.source, *box.sizes)] = sums.of_elements(index, found)
                _scatter_and_compare(Place(name, "F32", tuple(weights[name].shape), (box,)), live, index)
    for name, parts in total.items():
        # A key/value head that both ranks hold is one part: it has the same box on each.
        lanes = sums.ZERO
        for part in parts.values():
            lanes = sums.add(lanes, part)
        assert sums.render(lanes) == codec.digest_of(codec.bits_of(weights[name]))


def _scatter_and_compare(place: Place, live: Live, index: np.ndarray) -> None:
    """Single elements are found where the whole box is."""
    count = place.count
    asked = np.arange(0, count, 3, dtype=np.int64)
    where = dict(zip(index.tolist(), read_box(place.boxes[0], live).tolist(), strict=True))
    seen = 0
    for _, targets, part in place.locate(asked):
        got = live.host(live.flat[torch.from_numpy(targets)])
        assert [where[i] for i in asked[part].tolist()] == got.tolist()
        seen += len(got)
    assert seen == len(set(asked.tolist()) & where.keys())


@pytest.mark.parametrize("arch", ["qwen3_moe", "llama"])
def test_two_ranks_of_a_whole_model_hold_every_element_of_the_checkpoint(
    as_rank: Callable[[int, int], None], tiny: Callable[..., Path], arch: str
) -> None:
    """vLLM's own model built as each of two ranks, experts included, and loaded with its own loader."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    folder = tiny(arch)
    weights = {name: tensor.float() for name, tensor in read_folder(folder).items()}
    total: dict[str, dict[tuple[int, ...], sums.Lanes]] = {name: {} for name in weights}
    shared = 0
    for rank in (0, 1):
        config = configure(folder)
        with set_current_vllm_config(config):
            groups()  # experts need one of their own
            as_rank(rank, 2)
            model = initialize_model(vllm_config=config)
            traced = trace_loaders(model, [(n, "F32", tuple(t.shape)) for n, t in weights.items()])
            assert (traced.opaque, traced.faults) == ({}, {})
            model.load_weights(weights.items())
        parameters = dict(model.named_parameters())
        shared += sum(parameter.numel() for parameter in parameters.values())
        for name, boxes in traced.boxes.items():
            flat = codec.bits_of(weights[name])
            for box in boxes:
                found = read_box(box, Live(box.parameter, parameters[box.parameter]))
                index = sources(box)
                assert np.array_equal(found, flat[index])
                total[name][(box.source, *box.sizes)] = sums.of_elements(index, found)
    for name, parts in total.items():
        lanes = sums.ZERO
        for part in parts.values():
            lanes = sums.add(lanes, part)
        assert sums.render(lanes) == codec.digest_of(codec.bits_of(weights[name])), name
    whole = sum(tensor.numel() for tensor in weights.values())
    assert shared < 1.3 * whole  # the ranks share the model: they are no copies of it


def test_packed_three_dimensional_experts_are_placed_like_single_ones(
    tiny: Callable[..., Path], runtime: Path, with_weights: Any
) -> None:
    """A checkpoint with `experts.gate_up_proj` and `experts.down_proj` ends in the same parameters."""
    folder = tiny("qwen3_moe")
    single = read_folder(folder)
    packed = {name: t for name, t in single.items() if ".experts." not in name}
    for layer in (0, 1):
        stem = f"model.layers.{layer}.mlp.experts"
        parts = {
            kind: [single[f"{stem}.{e}.{kind}_proj.weight"] for e in range(4)]
            for kind in ("gate", "up", "down")
        }
        fused = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        packed[f"{stem}.gate_up_proj"] = torch.stack(fused)
        packed[f"{stem}.down_proj"] = torch.stack(parts["down"])
    with loaded(folder) as live:
        wanted = state(live.model)
    copy = with_weights(folder, packed)
    with loaded(copy) as live:
        places = live.engine.front.weights.places
        live.engine.front.weights.proved.wait()
        assert {name: p.refusal for name, p in places.items() if p.refusal} == {}
        assert set(places) == set(packed)
        assert all(torch.equal(state(live.model)[n], t) for n, t in wanted.items() if "experts" in n)
        driver = Driver(live.engine, runtime)
        new = nudged(packed, 1)
        driver.refit(codec.full(new), 1, None)
        names = sorted(packed)
        found = driver.ask("digests", names=names)["digests"]
        assert found == {name: codec.digest_of(codec.bits_of(new[name])) for name in names}


def test_absorbed_mla_is_refused_by_name_and_nothing_is_touched(
    tiny: Callable[..., Path], runtime: Path, tmp_path: Path
) -> None:
    """A DeepSeek-style attention computes with products of kv_b_proj that it made after loading."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=64,
        qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, moe_intermediate_size=64, first_k_dense_replace=2, max_position_embeddings=512,
        topk_method="greedy", n_group=1, topk_group=1,
    )  # fmt: skip
    folder = tmp_path / "mla"
    torch.manual_seed(0)
    DeepseekV2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for path in tiny("qwen3").iterdir():
        if path.name.startswith(("tok", "chat")):
            shutil.copy(path, folder)
    weights = read_folder(folder)
    with loaded(folder, dtype="bfloat16") as live:
        before = state(live.model)
        with pytest.raises(RefitError) as caught:
            Driver(live.engine, runtime).prepare(codec.full(nudged(weights, 1)), 1, None)
        names = [name for name in weights if "kv_b_proj" in name]
        assert len(names) == 2
        assert all(name in caught.value.message for name in names)
        assert "MLAAttention" in caught.value.message
        assert all(torch.equal(tensor, before[name]) for name, tensor in state(live.model).items())


def test_multi_query_attention_is_refitted(tiny: Callable[..., Path], runtime: Path, tmp_path: Path) -> None:
    """One key/value head for all query heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, max_position_embeddings=512, attention_bias=True,
    )  # fmt: skip
    folder = tmp_path / "mqa"
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for path in tiny("llama").iterdir():
        if path.name.startswith(("tok", "chat")):
            shutil.copy(path, folder)
    new = nudged(read_folder(folder), 1)
    with loaded(folder) as live:
        driver = Driver(live.engine, runtime)
        driver.refit(codec.full(new), 1, None)
        fused = live.model.model.layers[1].self_attn.qkv_proj
        stem = "model.layers.1.self_attn"
        parts = [new[f"{stem}.{kind}_proj.weight"].float() for kind in "qkv"]
        assert torch.equal(fused.weight, torch.cat(parts))
        biases = [new[f"{stem}.{kind}_proj.bias"].float() for kind in "qkv"]
        assert torch.equal(fused.bias, torch.cat(biases))
