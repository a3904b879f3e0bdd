"""Registration: by the entry point, once, without moving anything of the engine's environment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

VENV = Path(sys.prefix)
ADDED = {"ml_dtypes", "iniconfig", "pluggy", "pytest", "pytest-timeout", "weightline"}
"""What `install.sh` adds after vLLM: one dependency, the package, and pytest for this suite."""


def _pip(*arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False
    )
    return [line for line in done.stdout.splitlines() if line and not line.startswith("#")]


def test_no_pinned_package_of_the_engine_is_moved() -> None:
    before = set((VENV / ".freeze").read_text().splitlines())
    now = set(_pip("freeze"))
    assert {line for line in before - now if not line.startswith("#")} == set()
    names = {line.split("==")[0].split(" @ ")[0].removeprefix("-e ") for line in now - before}
    editable = {name for name in names if "/" in name}
    assert names - editable <= ADDED
    assert len(editable) <= 1


def test_pip_check_says_nothing_new() -> None:
    before = set((VENV / ".check").read_text().splitlines())
    assert set(_pip("check")) <= before


def test_the_entry_point_registers_once_however_often_it_is_called() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
    from vllm.plugins import load_general_plugins

    from weightline.plugins.vllm import register

    load_general_plugins()
    registered = Factory._registry["weightline"]
    register()
    register()
    assert Factory._registry["weightline"] is registered
    assert registered().__name__ == "WeightlineTransferEngine"


@pytest.mark.parametrize("version", ["0.32.0+cpu", "0.32.1", "0.31.2", "0.33.0rc1"])
def test_versions_that_are_accepted(version: str) -> None:
    from weightline.plugins.vllm import unsupported

    assert unsupported(version) is None


@pytest.mark.parametrize("version", ["0.30.0", "0.34.0", "1.0.0"])
def test_other_versions_are_refused_by_name_when_the_engine_is_made(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.metadata

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    from weightline.plugins.vllm import register

    monkeypatch.setattr(Factory, "_registry", {})
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: version)
    register()
    with pytest.raises(RuntimeError, match=f"weightline supports vLLM 0.31, 0.32, 0.33, this is {version}"):
        Factory._registry["weightline"]()


def test_a_vllm_without_a_needed_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    from weightline.plugins.vllm import unsupported

    monkeypatch.delattr(WeightTransferEngine, "finish_weight_update")
    assert unsupported("0.33.0") == "this vLLM (0.33.0) lacks WeightTransferEngine.finish_weight_update"


def test_registering_imports_nothing_heavy_and_the_plugin_only_torch_and_numpy() -> None:
    """In a fresh process without vLLM's own imports: what the plugin's modules pull in."""
    code = (
        "import sys\n"
        "import weightline\n"
        "before = set(sys.modules)\n"
        "import weightline.plugins.vllm\n"
        "light = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "assert light <= {'weightline', 'logging', '__future__'} | set(sys.stdlib_module_names), light\n"
        "import weightline.plugins.session, weightline.plugins.watchdog\n"
        "ours = {m for m in sys.modules if m.startswith('weightline.')}\n"
        "allowed = ('weightline.plugins', 'weightline.errors')\n"
        "assert all(m.startswith(allowed) for m in ours), ours\n"
        "assert not {'numba', 'grpc', 'ml_dtypes', 'httpx', 'safetensors', 'msgspec'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_configurations_that_refits_are_not_offered_for_are_all_named(
    tiny: Callable[..., Path], runtime: Path
) -> None:
    """The engine serves all the same, and says why when a follower asks."""
    from vllm_driver import Driver
    from vllm_models import configure, loaded

    from weightline.errors import InvalidInput
    from weightline.plugins.vllm.engine import unsupported_parts

    config = configure(tiny("qwen3"))
    assert unsupported_parts(config) == []
    config.parallel_config.tensor_parallel_size = 2
    config.parallel_config.data_parallel_size = 3
    config.kv_transfer_config = object()
    config.ec_transfer_config = object()
    found = unsupported_parts(config)
    assert [reason.split(":")[0] for reason in found] == [
        "tensor-parallel size 2 is not supported",
        "data-parallel size 3 is not supported",
        "a KV connector is configured",
        "an encoder-cache connector is configured",
    ]
    with loaded(tiny("qwen3")) as live:
        live.engine.front.refusals += found
        with pytest.raises(InvalidInput, match="tensor-parallel size 2 is not supported; data-parallel"):
            Driver(live.engine, runtime).ask("hello")
