"""Tests on the real vLLM, run by `make test-vllm` in a virtual environment of its own; in any other one this
folder holds no tests."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest

try:
    # Not `find_spec`: pytest puts `tests` on the path, and this very folder is then a package named vllm.
    HERE = bool(version("vllm"))
except PackageNotFoundError:
    HERE = False

if not HERE:
    collect_ignore_glob = ["test_*.py"]
else:
    import os

    from real_fixtures import runtime, tiny, with_weights
    from vllm_models import ENVIRONMENT

    __all__ = ["runtime", "tiny", "with_weights"]
    os.environ.update(ENVIRONMENT)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What does not depend on the scheduling of the server runs on the first one only, unless under soak."""
    for item in items:
        if item.get_closest_marker("once") and "[plain" in item.name:
            item.add_marker(pytest.mark.soak)
