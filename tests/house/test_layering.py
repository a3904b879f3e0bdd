"""What the project promises about its imports."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "numba", "grpc", "starlette", "uvicorn", "typer", "rich", "httpx")


def _loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    command = [sys.executable, "-W", "error", "-c", code]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(out.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import weightline",
        "import weightline.service, weightline.store, weightline.codec, weightline.core.spans",
        "import weightline.rollout, weightline.generate, weightline.trainer, weightline.audit",
        "import weightline.demo",
    ],
)
def test_imports_load_nothing_heavy(statement):
    assert _loaded_after(statement) == set()


def test_modules_have_telling_names():
    package = Path(__file__).parents[2] / "src" / "weightline"
    nothing = {"utils", "util", "helpers", "common", "misc", "manager"}
    assert [p for p in package.rglob("*.py") if p.stem in nothing] == []
