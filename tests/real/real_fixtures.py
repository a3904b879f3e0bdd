"""Fixtures that the suites of all real engines share."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Tiny Hugging Face folders by architecture, made once."""
    from weightline.demo.models import tiny_model

    made: dict[Any, Path] = {}

    def make(arch: str, *, tie: bool = False, dtype: str = "BF16", vocab: int = 512) -> Path:
        key = (arch, tie, dtype, vocab)
        if key not in made:
            folder = (
                tmp_path_factory.mktemp("models") / f"{arch}-{'tied' if tie else 'untied'}-{dtype}-{vocab}"
            )
            made[key] = tiny_model(folder, arch=arch, tie=tie, dtype=dtype, vocab=vocab)
        return made[key]

    return make


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    """A follower's runtime folder."""
    folder = tmp_path / "runtime"
    folder.mkdir()
    (folder / "owner.json").write_text(json.dumps({}))
    return folder


@pytest.fixture
def with_weights(tmp_path: Path) -> Callable[[Path, dict[str, Any]], Path]:
    """A copy of a model folder that holds other weights."""

    def make(folder: Path, weights: dict[str, Any]) -> Path:
        from safetensors.torch import save_file

        out = tmp_path / f"copy-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(folder, out)
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
        return out

    return make
