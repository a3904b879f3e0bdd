"""Trainer state: one safetensors file, no pickle, every bit back."""

from __future__ import annotations

import json
import math
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightline.errors import FormatError, InvalidInput, StorageFull
from weightline.trainer import load_state, save_state
from weightline.trainer.tree import flatten, unflatten

pytestmark = pytest.mark.torch


class Net(torch.nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a = torch.nn.Linear(7, 5)
        self.b = torch.nn.Linear(5, 3, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
    "two_groups": lambda p: torch.optim.AdamW([{"params": list(p)[:1], "lr": 0.1}, {"params": list(p)[1:]}]),
}


def train(net: Net, optimizer: Any, scheduler: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        batch = torch.randn(4, 7) * random.random() + float(np.random.rand())
        loss = net(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    def build(seed: int) -> tuple[Net, Any, Any]:
        net = Net(seed)
        optimizer = OPTIMIZERS[name](net.parameters())
        return net, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    random.seed(1)
    np.random.seed(1)
    one = build(0)
    train(*one, steps=3)
    path = tmp_path / "state"
    size = save_state(
        path, step=3, model=one[0], optimizer=one[1], scheduler=one[2], position={"file": 2, "rows": (1, 2)}
    )
    assert size == path.stat().st_size
    expected = train(*one, steps=3)
    two = build(9)
    state = load_state(path, model=two[0], optimizer=two[1], scheduler=two[2])
    assert (state.step, state.position) == (3, {"file": 2, "rows": (1, 2)})
    assert train(*two, steps=3) == expected
    for (key, a), b in zip(one[0].state_dict().items(), two[0].state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    assert str(one[1].state_dict()) == str(two[1].state_dict())
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_state_in_a_wider_dtype_than_its_parameter_keeps_its_bits(tmp_path: Path) -> None:
    def build() -> tuple[Any, Any]:
        parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        return parameter, torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

    parameter, optimizer = build()
    optimizer.state[parameter]["momentum_buffer"] = torch.tensor([1.0001, 2.0002, 3.0003])
    save_state(tmp_path / "s", step=1, optimizer=optimizer)
    other_parameter, other = build()
    load_state(tmp_path / "s", optimizer=other)
    got = other.state[other_parameter]["momentum_buffer"]
    assert got.dtype == torch.float32
    assert torch.equal(got, optimizer.state[parameter]["momentum_buffer"])


def test_generators_of_all_three_kinds_go_on(tmp_path: Path) -> None:
    def build(seed: int) -> dict[str, Any]:
        return {
            "torch": torch.Generator().manual_seed(seed),
            "numpy": np.random.default_rng(seed),
            "python": random.Random(seed),
        }

    def draw(g: dict[str, Any]) -> tuple[Any, ...]:
        return (
            torch.randn(2, generator=g["torch"]).tolist(),
            g["numpy"].normal(size=2).tolist(),
            g["python"].gauss(0, 1),
        )

    first = build(1)
    draw(first)
    save_state(tmp_path / "s", step=0, generators=first, rng=False)
    second = build(2)
    load_state(tmp_path / "s", generators=second)
    assert draw(second) == draw(first)


TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**130), 2**130)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["$tensor", "$tuple", "$dict", "$"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            st.text(max_size=3) | st.integers() | st.sampled_from(["$tensor", "$dict"]), inner, max_size=3
        )
        | st.tuples(st.integers(), st.text(max_size=2)).map(lambda k: {k: 1})
    ),
    max_leaves=12,
)


@given(TREES)
@settings(max_examples=300, deadline=None)
def test_any_tree_of_plain_values_comes_back_through_json(tree: Any) -> None:
    node, arrays = flatten(tree, where="t")
    back = unflatten(json.loads(json.dumps(node, allow_nan=False)), arrays)
    assert repr(back) == repr(tree)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.uint32).reshape(2, 3).T,
        np.float32(1.5),
        np.int64(-3),
        np.array([], dtype=np.float64),
        np.array(True),
        np.broadcast_to(np.float64(2), (1, 1)),
        np.array(float("nan")),
    ],
)
def test_numpy_comes_back_as_numpy(tmp_path: Path, array: Any) -> None:
    save_state(tmp_path / "s", step=0, position={"a": array}, rng=False)
    back = load_state(tmp_path / "s").position["a"]
    assert type(back) is type(array)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, b"bytes", lambda: 1, np.array(["text"]), np.array([1], dtype=">i4")]
)
def test_other_objects_are_refused_by_place_and_nothing_is_written(tmp_path: Path, value: Any) -> None:
    with pytest.raises(InvalidInput, match=r"state position\.deep\.0"):
        save_state(tmp_path / "s", step=0, position={"deep": [value]})
    assert list(tmp_path.iterdir()) == []


def saved(tmp_path: Path) -> Path:
    net = Net()
    path = tmp_path / "s"
    save_state(path, step=1, model=net, optimizer=torch.optim.AdamW(net.parameters()))
    return path


def test_a_state_of_another_model_changes_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path)
    other = torch.nn.Linear(7, 5)
    before = other.weight.clone()
    with pytest.raises(InvalidInput, match="masters of another model"):
        load_state(path, model=other)
    narrow = Net().to(torch.bfloat16)
    with pytest.raises(InvalidInput, match=r"master a\.weight is F32 \[5, 7\], the model has BF16"):
        load_state(path, model=narrow)
    assert torch.equal(other.weight, before)


def test_a_state_of_another_optimizer_changes_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path)
    net = Net(5)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    groups = [{"params": [p]} for p in net.parameters()]
    with pytest.raises(InvalidInput, match="state of another optimizer"):
        load_state(path, model=net, optimizer=torch.optim.AdamW(groups))
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())


def test_a_part_that_was_not_saved_is_named(tmp_path: Path) -> None:
    save_state(tmp_path / "s", step=1, model=Net())
    with pytest.raises(InvalidInput, match="holds no optimizer"):
        load_state(tmp_path / "s", optimizer=torch.optim.SGD(Net().parameters(), lr=1.0))
    with pytest.raises(InvalidInput, match="no such file"):
        load_state(tmp_path / "nowhere")


def test_every_truncation_is_a_format_error(tmp_path: Path) -> None:
    path = saved(tmp_path)
    data = path.read_bytes()
    header = 8 + struct.unpack("<Q", data[:8])[0]
    for size in {0, 1, 7, 8, 9, header - 1, header, header + 1, len(data) - 1}:
        path.write_bytes(data[:size])
        with pytest.raises(FormatError):
            load_state(path, model=Net())
    path.write_bytes(data + b"x")
    with pytest.raises(FormatError):
        load_state(path, model=Net())


def rewritten(path: Path, change) -> None:  # type: ignore[no-untyped-def]
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.pop("__metadata__"),
        lambda h: h["__metadata__"].update({"weightline.trainer": "[]"}),
        lambda h: h["__metadata__"].update({"weightline.trainer": '{"format": 99, "step": 0, "tree": {}}'}),
        lambda h: h["masters.b.weight"].update(shape=[-3, -5]),
        lambda h: h["masters.b.weight"].update(dtype="F12"),
        lambda h: h["masters.b.weight"].update(data_offsets=[0, 10**15]),
        lambda h: h["masters.b.weight"].pop("shape"),
    ],
)
def test_hostile_headers_are_refused(tmp_path: Path, change: Any) -> None:
    path = saved(tmp_path)
    rewritten(path, change)
    with pytest.raises((FormatError, InvalidInput)):
        load_state(path, model=Net())


def test_other_readers_of_safetensors_open_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = load_file(saved(tmp_path))
    net = Net()
    assert torch.equal(tensors["masters.a.weight"], net.a.weight)
    assert tensors["masters.seen"].shape == ()


def test_no_room_leaves_the_old_state_and_no_remains(tmp_path: Path) -> None:
    import resource

    path = saved(tmp_path)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(StorageFull):
            save_state(path, step=2, model=torch.nn.Linear(1000, 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_saving_is_streamed(tmp_path: Path) -> None:
    """A file of 192 MB is written with a fraction of that in new memory."""
    import tracemalloc

    model = torch.nn.ParameterDict({f"w{i}": torch.nn.Parameter(torch.ones(4 << 20)) for i in range(12)})
    tracemalloc.start()
    size = save_state(tmp_path / "s", step=0, model=model)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 192 << 20
    assert peak < 8 << 20
    assert math.isclose(size, 192 << 20, rel_tol=0.01)
