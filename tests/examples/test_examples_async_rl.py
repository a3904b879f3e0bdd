"""The examples run as they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_asynchronous_rl_finds_the_swap_points_and_the_tokens_after_them_agree() -> None:
    command = [sys.executable, EXAMPLES / "async_rl.py", "--steps", "2", "--requests", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=110, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    last = re.fullmatch(
        r"(\d+) swap points, (\d+) tokens after them: all equal .*", ran.stdout.splitlines()[-1]
    )
    assert last is not None, ran.stdout
    assert int(last[1]) >= 2
    assert int(last[2]) >= 20
