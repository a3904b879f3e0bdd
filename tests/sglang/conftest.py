"""Tests on the real SGLang, run by `make test-sglang` in a virtual environment of its own; in any other one
this folder holds no tests."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    # Not `find_spec`: pytest puts `tests` on the path, and this very folder is then a package named sglang.
    HERE = bool(version("sglang"))
except PackageNotFoundError:
    HERE = False

if not HERE:
    collect_ignore_glob = ["test_*.py"]
else:
    from real_fixtures import runtime, tiny, with_weights

    __all__ = ["runtime", "tiny", "with_weights"]
