"""The public surface: exactly these names, cheap to import, nothing heavy behind them until they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import weightline
import weightline.service

PUBLIC = {
    "AlreadyServing",
    "CheckpointEngine",
    "ConflictError",
    "FormatError",
    "IntegrityError",
    "InvalidInput",
    "RefitError",
    "StorageFull",
    "StoreNotFound",
    "Unavailable",
    "VersionGone",
    "VersionNotFound",
    "WeightVersionSpan",
    "WeightlineError",
    "WriterFenced",
    "__version__",
    "compute_delta",
    "connect",
    "errors",
    "generate",
    "spans",
}


def test_all_is_the_promised_surface():
    assert set(weightline.__all__) == PUBLIC
    assert dir(weightline) == sorted(PUBLIC)


def test_every_public_name_resolves_to_what_its_name_says():
    for name in PUBLIC:
        assert getattr(weightline, name) is not None
    assert weightline.CheckpointEngine.__name__ == "CheckpointEngine"
    assert weightline.spans.__name__ == "weightline.spans"
    assert weightline.WeightVersionSpan("7@3f9c2d1e", 0, 57).end == 57


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = weightline.no_such_name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = weightline.service.no_such_name


PROBE = """
import sys, time
started = time.perf_counter()
import weightline
took = time.perf_counter() - started
heavy = {"torch", "numba", "grpc", "transformers", "numpy"} & set(sys.modules)
print(took, ",".join(sorted(heavy)))
"""


def test_import_is_quick_and_loads_nothing_heavy():
    # The best of three: another process may hold both cores for a moment.
    takes = []
    for _ in range(3):
        ran = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
        seconds, _, heavy = ran.stdout.strip().partition(" ")
        assert heavy == ""
        takes.append(float(seconds))
    assert min(takes) < 0.5


def test_the_doors_load_without_torch_numba_or_grpc():
    code = (
        "import sys, weightline as wl; wl.CheckpointEngine, wl.connect, wl.spans, wl.compute_delta;"
        "print(sorted({'torch', 'numba', 'grpc', 'transformers'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
