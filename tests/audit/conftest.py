"""A store with three versions that differ a lot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from audit_world import World


def _models(folder: Path) -> Iterator[tuple[int, Any, dict[str, Any]]]:
    """Version, float32 model, bf16 weights: each version is the one before plus noise that changes what
    greedy decoding says.
    """
    import torch
    from transformers import AutoModelForCausalLM

    weights = {
        name: tensor.clone()
        for name, tensor in AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        .state_dict()
        .items()
    }
    noise = torch.Generator().manual_seed(7)
    for version in (1, 2, 3):
        if version > 1:
            weights = {
                name: (t.float() + 0.05 * torch.randn(t.shape, generator=noise)).bfloat16()
                if t.ndim > 1
                else t.clone()
                for name, t in weights.items()
            }
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.load_state_dict({name: t.float() for name, t in weights.items()})
        yield version, model.eval(), weights


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    import weightline as wl
    from weightline.demo.models import tiny_model

    root = tmp_path_factory.mktemp("audit")
    folder = tiny_model(root / "model")
    with wl.CheckpointEngine(storage_path=root / "store") as line:
        models = {}
        for version, model, weights in _models(folder):
            assert line.commit(weights, step=version) == version
            models[version] = model
        labels = {r.version: r.label for r in line.versions()}
        yield World(line, folder, models, labels)
