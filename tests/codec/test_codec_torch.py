"""torch tensors on the CPU go through the codec like arrays."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from weightline import codec
from weightline.errors import InvalidInput

pytestmark = pytest.mark.torch

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.complex64,
]  # fmt: skip


def random_tensor(dtype, shape, seed=0):
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, count).astype(np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_every_torch_dtype_and_layout(dtype):
    tensor = random_tensor(dtype, (6, 8))
    raw = tensor.view(torch.uint8).numpy().reshape(-1)
    assert codec.bits_of(tensor).tobytes() == raw.tobytes()
    assert codec.spec_of("w", tensor).dtype == codec.parse_dtype(dtype)
    for view in (tensor.T, tensor[::2], tensor[:, 1:5], tensor[0, 0], tensor[:0], tensor[:1].expand(3, 8)):
        assert (
            codec.bits_of(view).tobytes() == view.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_delta_is_applied_to_torch_tensors_in_place(dtype):
    old, new = random_tensor(dtype, (6, 8), 1), random_tensor(dtype, (6, 8), 2)
    delta = codec.diff({"w": old}, {"w": new})
    for target in (old.clone(), old.T.clone().T):
        undo = delta.apply_({"w": target})
        assert codec.bits_of(target).tobytes() == codec.bits_of(new).tobytes()
        undo.restore()
        assert codec.bits_of(target).tobytes() == codec.bits_of(old).tobytes()


def test_parameters_that_need_gradients_are_read_and_written():
    model = torch.nn.Linear(4, 3)
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    delta = codec.diff(old, dict(model.named_parameters()))
    assert delta.elements == 15
    other = torch.nn.Linear(4, 3)
    other.load_state_dict(old)
    delta.apply_(dict(other.named_parameters()))
    assert torch.equal(other.weight, model.weight)


def test_numpy_and_torch_compare_with_each_other():
    tensor = random_tensor(torch.bfloat16, (5, 5))
    array = codec.from_bits(codec.bits_of(tensor).copy(), codec.spec_of("w", tensor))
    assert codec.diff({"w": tensor}, {"w": array}).changed == ()


def test_what_has_no_dense_bits_is_refused():
    with pytest.raises(InvalidInput, match="complex128"):
        codec.spec_of("w", torch.zeros(1, dtype=torch.complex128))
    with pytest.raises(InvalidInput, match="sparse"):
        codec.bits_of(torch.zeros(2, 2).to_sparse())
    with pytest.raises(InvalidInput, match="meta"):
        codec.bits_of(torch.empty(2, device="meta"))


def test_conjugate_views_are_read_right():
    tensor = torch.tensor([1 + 2j], dtype=torch.complex64)
    assert (
        codec.bits_of(tensor.conj()).tobytes()
        == codec.bits_of(torch.tensor([1 - 2j], dtype=torch.complex64)).tobytes()
    )


def test_importing_the_codec_imports_neither_torch_nor_numba():
    code = "import sys, weightline.codec; sys.exit(any(m in sys.modules for m in ('torch', 'numba')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_refused_by_name(layout):
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)
    with pytest.raises(InvalidInput, match="'w' is a nested tensor"):
        codec.full({"w": nested})
    with pytest.raises(InvalidInput, match="nested tensor has no dense bits"):
        codec.bits_of(nested)
