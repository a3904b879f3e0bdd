"""Real vLLM models in this process: built by vLLM's own loader, one after another, without a server."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


@dataclass
class Loaded:
    """One model and the transfer engine that vLLM's factory made for it."""

    model: Any
    config: Any
    engine: Any


_world: list[Path] = []


def groups() -> None:
    """vLLM's distributed state: the world once a process, the groups anew for every model (experts need one
    of their own)."""
    from vllm.distributed import (
        destroy_model_parallel,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    if not _world:
        _world.append(Path(tempfile.mkdtemp()) / "init")
        init_distributed_environment(1, 0, f"file://{_world[0]}", 0, "gloo")
    destroy_model_parallel()
    ensure_model_parallel_initialized(1, 1)


def configure(folder: Path, *, dtype: str = "float32", backend: str | None = "weightline") -> Any:
    """vLLM's configuration for a model folder."""
    os.environ.update(ENVIRONMENT)
    from vllm.engine.arg_utils import EngineArgs

    extra = {"weight_transfer_config": {"backend": backend}} if backend else {}
    arguments = EngineArgs(
        model=str(folder), dtype=dtype, enforce_eager=True, max_model_len=256, max_num_seqs=4, **extra
    )
    return arguments.create_engine_config()


@contextmanager
def loaded(folder: Path, *, dtype: str = "float32", backend: str | None = "weightline") -> Iterator[Loaded]:
    """Load `folder` as a worker does, and make the transfer engine that the configuration asks for."""
    config = configure(folder, dtype=dtype, backend=backend)
    import torch
    import vllm.v1.worker.cpu_worker  # noqa: F401  (as a CPU worker starts: it prepares torch for a machine without GPU)
    from vllm.config import set_current_vllm_config
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import get_model

    with set_current_vllm_config(config):
        groups()
        model = get_model(vllm_config=config)
        engine = None
        if backend is not None:
            engine = WeightTransferEngineFactory.create_engine(
                config.weight_transfer_config, config, torch.device("cpu"), model
            )
        try:
            yield Loaded(model, config, engine)
        finally:
            if engine is not None:
                engine.shutdown()
