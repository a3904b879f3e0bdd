"""Fixtures for the engine's tests: small real models, engines over them, and marker versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from generate_world import build_model, open_engine


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A model folder of the given kind, built once a run: `models("qwen3", tie=True, marker=True)`."""
    made: dict[tuple[Any, ...], Path] = {}

    def make(arch: str = "qwen3", **options: Any) -> Path:
        key = (arch, *sorted(options.items()))
        if key not in made:
            made[key] = build_model(tmp_path_factory.mktemp("model"), arch, **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer and a chat template: the one that vLLM's answers were recorded with."""
    from weightline.demo.models import tiny_model

    return tiny_model(tmp_path_factory.mktemp("tiny") / "model", arch="qwen3")


@pytest.fixture
def engines(models: Callable[..., Path]) -> Iterator[Callable[..., Any]]:
    """Started engines, stopped at the end: `engines(folder, max_num_seqs=4)`."""
    opened: list[Any] = []

    def start(folder: Path, **options: Any) -> Any:
        opened.append(open_engine(folder, **options).start())
        return opened[-1]

    yield start
    for engine in opened:
        engine.stop()
