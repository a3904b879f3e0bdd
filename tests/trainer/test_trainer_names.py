"""Names and ties of what is committed are those of the Hugging Face file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weightline.demo.models import stored_tensors, tiny_model
from weightline.errors import InvalidInput
from weightline.trainer import named_tensors, plain_name

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("module._orig_mod.layers.0.w", "layers.0.w"),
        ("_orig_mod.module.layers.0.w", "layers.0.w"),
        ("layers._orig_mod.0.w", "layers.0.w"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.w", "layers.0.w"),
        ("model.layers.0._checkpoint_wrapped_module.mlp.w", "model.layers.0.mlp.w"),
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
