"""Names and ties of what is committed are those of the Hugging Face file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weightline.demo.models import stored_tensors, tiny_model
from weightline.errors import InvalidInput
from weightline.rollout.mapping import WRAPPERS as RECEIVED
from weightline.rollout.mapping import strip_wrappers
from weightline.trainer import load_state, named_tensors, plain_name, save_state
from weightline.trainer.names import WRAPPERS, innermost

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("module._orig_mod.layers.0.w", "layers.0.w"),
        ("_orig_mod.module.layers.0.w", "layers.0.w"),
        ("layers._orig_mod.0.w", "layers.0.w"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.w", "layers.0.w"),
        ("model.layers.0._checkpoint_wrapped_module.mlp.w", "model.layers.0.mlp.w"),
        (
            "base_model.model._fsdp_wrapped_module.model.layers.0.self_attn.q_proj.base_layer.weight",
            "model.layers.0.self_attn.q_proj.weight",
        ),
        ("_fsdp_wrapped_module.base_model.model.lm_head.weight", "lm_head.weight"),
        ("base_model.layers.0.w", "base_model.layers.0.w"),
        ("base_model.model", "base_model.model"),
        ("encoder.base_model.model.w", "encoder.base_model.model.w"),
        ("my_base_layer.w", "my_base_layer.w"),
        ("layers.0.w", "layers.0.w"),
        ("my_module.w", "my_module.w"),
        ("module_list.0.w", "module_list.0.w"),
        ("layers.module", "layers.module"),
        ("module", "module"),
    ],
)
def test_wrapper_components_go_and_others_stay(wrapped: str, plain: str) -> None:
    assert plain_name(wrapped) == plain
    assert plain_name(plain) == plain
    assert strip_wrappers(wrapped) == plain, "the receiving side has another rule"


def test_both_sides_of_the_line_know_the_same_wrappers() -> None:
    assert WRAPPERS == RECEIVED


class LoraLinear(torch.nn.Module):
    """The children and the `merged` flag that PEFT's LoRA layer has; delta W = B A, in place."""

    def __init__(self, inner: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = inner
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(4, 1, bias=False)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(1, 3, bias=False)})
        self.merged = False

    def merge(self) -> None:
        a, b = self.lora_A["default"].weight, self.lora_B["default"].weight
        with torch.no_grad():
            self.base_layer.weight += b @ a  # type: ignore[operator]
        self.merged = True


def adapted() -> tuple[torch.nn.Module, list[LoraLinear]]:
    """A model under the names of a PEFT model: base_model.model.{0,1}.…"""
    layers = [LoraLinear(torch.nn.Linear(4, 3)), LoraLinear(torch.nn.Linear(4, 3))]
    tuner, outer = torch.nn.Module(), torch.nn.Module()
    tuner.model = torch.nn.ModuleDict({"q_proj": layers[0], "v_proj": layers[1]})
    outer.base_model = tuner
    return outer, layers


def test_adapters_that_are_not_merged_are_refused() -> None:
    model, (first, _) = adapted()
    with pytest.raises(InvalidInput, match=r"q_proj\.lora_A\.default\.weight .* PEFT adapter .* not merged"):
        named_tensors(model)
    first.merge()
    with pytest.raises(InvalidInput, match=r"v_proj\.lora_A"):
        named_tensors(model)
    with pytest.raises(InvalidInput, match=r"q_proj\.lora_A"):
        named_tensors(dict(model.named_parameters()))
    with pytest.raises(InvalidInput, match="modules_to_save"):
        named_tensors({"base_model.model.lm_head.modules_to_save.default.weight": torch.zeros(1)})


def test_merged_adapters_give_the_merged_weights_under_plain_names() -> None:
    model, layers = adapted()
    for layer in layers:
        layer.merge()
    for wrapped in (model, torch.nn.DataParallel(model)):
        tensors = named_tensors(wrapped)
        assert set(tensors) == {f"{p}_proj.{leaf}" for p in "qv" for leaf in ("weight", "bias")}
        assert tensors["q_proj.weight"].data_ptr() == layers[0].base_layer.weight.data_ptr()
    assert innermost(torch.nn.DataParallel(model)) is model.base_model.model  # type: ignore[union-attr]


def test_the_masters_of_a_trainer_state_keep_the_adapters(tmp_path: Path) -> None:
    model, layers = adapted()
    layers[0].merge()
    with torch.no_grad():
        layers[1].lora_A["default"].weight.fill_(0.5)  # type: ignore[operator]
    save_state(tmp_path / "state", step=1, model=model)
    again, _ = adapted()
    load_state(tmp_path / "state", model=again)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_two_sources_of_one_name_are_refused() -> None:
    tensors = {"module.w": torch.zeros(1), "_orig_mod.w": torch.ones(1)}
    with pytest.raises(InvalidInput, match=r"both module\.w and _orig_mod\.w"):
        named_tensors(tensors)


@pytest.mark.parametrize("arch", ["qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("tie", [False, True])
def test_names_shapes_and_values_are_those_of_the_file(tmp_path: Path, arch: str, tie: bool) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder = tiny_model(tmp_path / "m", arch=arch, tie=tie)  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = named_tensors(model)
    assert tensors.keys() == stored_tensors(folder).keys()
    for name, stored in load_file(folder / "model.safetensors").items():
        assert torch.equal(tensors[name].to(torch.bfloat16), stored), name


@pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning"
)  # torch's own, when its compiler is imported
def test_wrapped_models_give_the_names_of_the_bare_one(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_model(tmp_path / "m", tie=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    bare = named_tensors(model)
    for wrapped in (
        torch.nn.DataParallel(model),
        torch.compile(model),
        torch.compile(torch.nn.DataParallel(model)),
    ):
        tensors = named_tensors(wrapped)
        assert tensors.keys() == bare.keys()
        assert all(tensors[name].data_ptr() == bare[name].data_ptr() for name in bare)


def test_shared_storage_is_one_tensor_and_disjoint_views_are_two() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Parameter(torch.ones(4, 3))
            self.lm_head = self.embed
            buffer = torch.zeros(8)
            self.register_buffer("low", buffer[:4])
            self.register_buffer("high", buffer[4:])
            self.register_buffer("table", torch.zeros(2), persistent=False)

    assert set(named_tensors(Tied())) == {"embed", "low", "high"}


@pytest.mark.parametrize("source", [None, 3, {"w": 1.0}, {"w": [1.0]}])
def test_what_is_no_model_is_refused(source: object) -> None:
    with pytest.raises(InvalidInput):
        named_tensors(source)
