"""A coded delta is written while it is decoded: a failure late in the pass leaves nothing of it behind."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from conftest_codec import array_of, changed, same_bits

from weightline import codec
from weightline.codec import backend, coded, coding, kernels, native
from weightline.errors import IntegrityError

LEVELS = ("fast", "dense")


@pytest.fixture(params=["numba", "c"])
def engine(request, monkeypatch):
    chosen = native if request.param == "c" else kernels
    monkeypatch.setattr(backend, "engine", lambda: chosen)
    return chosen


def weights(count, seed):
    rng = np.random.default_rng(seed)
    return codec.bits_of((rng.normal(size=count) * 0.05).astype(codec.numpy_dtype("BF16"))).copy()


def a_model(tensors=6, count=40_000):
    old = {f"layer.{i}": weights(count, i) for i in range(tensors)}
    new = {name: changed(bits, 0.02, 7, 2) for name, bits in old.items()}
    return (
        {name: array_of(bits, "BF16", (count,)) for name, bits in old.items()},
        {name: array_of(bits, "BF16", (count,)) for name, bits in new.items()},
    )


def written(old, new, path, level):
    codec.write_delta(codec.diff(old, new, level=level), path, level=level)
    return codec.read_delta(path)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("at", [0, 3, 5])
def test_a_base_that_turns_out_wrong_in_the_last_tensor_leaves_all_as_they_were(
    level, at, engine, monkeypatch, tmp_path
):
    monkeypatch.setattr(coded, "BATCH", 1 << 16)
    old, new = a_model()
    delta = written(old, new, tmp_path / "d", level)
    digests = {name: codec.digest_of(codec.bits_of(array)) for name, array in old.items()}
    # The carried digest says that the base is right; its bytes have rotted since.
    wrong = {name: array.copy() for name, array in old.items()}
    bits = wrong[f"layer.{at}"].view(np.uint16)
    bits[:] = np.roll(bits, 1)
    before = {name: array.copy() for name, array in wrong.items()}
    with pytest.raises(IntegrityError):
        delta.apply_(wrong, digests=digests)
    for name, array in wrong.items():
        assert same_bits(array, before[name]), name


@pytest.mark.parametrize("level", LEVELS)
def test_an_interrupt_between_two_batches_leaves_all_as_they_were(level, engine, monkeypatch, tmp_path):
    monkeypatch.setattr(coding, "BATCH_ROWS", 2)
    backend.set_threads(1)
    old, new = a_model()
    delta = written(old, new, tmp_path / "d", level)
    target = {name: array.copy() for name, array in old.items()}
    calls = []
    decode = engine.decode

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return decode(*arguments)

    monkeypatch.setattr(engine, "decode", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            delta.apply_(target)
    finally:
        backend.set_threads(None)
    assert len(calls) == 3
    for name, array in target.items():
        assert same_bits(array, old[name]), name


@pytest.mark.parametrize("level", LEVELS)
def test_two_names_of_one_memory_are_written_once(level, engine, tmp_path):
    old, new = a_model(2)
    old["head"], new["head"] = old["layer.1"], new["layer.1"]
    delta = written(old, new, tmp_path / "d", level)
    target = {name: array.copy() for name, array in old.items()}
    target["head"] = target["layer.1"]
    undo = delta.apply_(target)
    assert all(same_bits(target[name], new[name]) for name in new)
    undo.restore()
    assert all(same_bits(target[name], old[name]) for name in old)


@pytest.mark.parametrize("level", LEVELS)
def test_the_inverse_of_a_coded_delta_goes_back(level, engine, tmp_path):
    old, new = a_model(3)
    target = {name: array.copy() for name, array in old.items()}
    undo = written(old, new, tmp_path / "d", level).apply_(target)
    undo.inverse.apply_(target, digests=undo.digests)
    assert all(same_bits(target[name], old[name]) for name in old)


@pytest.mark.parametrize("level", LEVELS)
def test_an_undo_keeps_the_memory_it_would_write_to(engine, tmp_path, level):
    old, new = a_model()
    delta = written(old, new, tmp_path / "d", level)
    target = {name: array.copy() for name, array in old.items()}
    held = {name: weakref.ref(array) for name, array in target.items()}
    undo = delta.apply_(target)
    target.clear()
    gc.collect()
    assert all(reference() is not None for reference in held.values())
    undo.restore()
    assert all(same_bits(reference(), old[name]) for name, reference in held.items())
    del undo
    gc.collect()
    assert all(reference() is None for reference in held.values())


@pytest.mark.parametrize("layout", ["read-only", "empty", "bfloat16", "plain"])
def test_addresses_are_those_of_the_memory(layout):
    array = np.zeros((4, 8), codec.numpy_dtype("BF16") if layout == "bfloat16" else np.uint16)
    array = array[:0] if layout == "empty" else array
    array.flags.writeable = layout != "read-only"
    assert coding.address_of(array) == array.ctypes.data
