from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from weightline.codec import bits_of
from weightline.store import Store

Weights = dict[str, Any]


class Clock:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    opened = Store.open(tmp_path / "store", create=True, clock=clock)
    yield opened
    opened.close()


@pytest.fixture
def weights() -> Weights:
    rng = np.random.default_rng(0)
    return {
        "embed.weight": rng.standard_normal((16, 8)).astype(ml_dtypes.bfloat16),
        "norm.weight": np.ones(8, np.float32),
        "scale": np.array(0.5, np.float32),
    }


@pytest.fixture
def changed() -> Callable[..., Weights]:
    """`changed(weights, k)`: a copy in which k elements of embed.weight differ."""

    def change(weights: Weights, count: int = 1, seed: int = 1) -> Weights:
        out = {name: array.copy() for name, array in weights.items()}
        flat = out["embed.weight"].reshape(-1).view(np.uint16)
        where = np.random.default_rng(seed).choice(flat.size, count, replace=False)
        flat[where] ^= 1
        return out

    return change


@pytest.fixture
def same() -> Callable[[Any, Any], bool]:
    """Bit-equality of two sets of weights, names, dtypes and shapes included."""

    def equal(a: Weights, b: Weights) -> bool:
        return a.keys() == b.keys() and all(
            a[n].dtype == b[n].dtype
            and a[n].shape == b[n].shape
            and bits_of(a[n]).tobytes() == bits_of(b[n]).tobytes()
            for n in a
        )

    return equal
