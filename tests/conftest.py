"""What all tests share: the command line as a user runs it."""

import contextlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest_plugins = ("s3_fixtures",)


WHOLE_FILE = re.compile(r"^pytestmark = .*pytest\.mark\.(torch|vllm|sglang)", re.MULTILINE)


def pytest_ignore_collect(collection_path, config):
    """Files whose every test needs torch import it at their top: left out where torch is not installed."""
    if importlib.util.find_spec("torch") or not collection_path.match("test_*.py"):
        return None
    return True if WHOLE_FILE.search(collection_path.read_text()) else None


@dataclass(frozen=True)
class Outcome:
    """What a finished command said."""

    code: int
    out: str
    err: str

    def json(self):
        return json.loads(self.out)


@pytest.fixture
def run_weightline(tmp_path, monkeypatch):
    """Runs `weightline ARGS` in the test's folder and returns its `Outcome`.

    In this process, because a fresh interpreter for each of hundreds of commands is most of their time; with
    `process=True`, or where a process matters (`preexec`), in one of its own.
    """

    def run(*args, env=None, process=False, preexec=None):
        args = [str(a) for a in args]
        env = {"COLUMNS": "200", "NO_COLOR": "1", **(env or {})}
        if process or preexec:
            command = [sys.executable, "-m", "weightline", *args]
            done = subprocess.run(
                command,
                cwd=tmp_path,
                env={**os.environ, **env},
                capture_output=True,
                text=True,
                preexec_fn=preexec,
                timeout=100,
                check=False,
            )
            return Outcome(done.returncode, done.stdout, done.stderr)
        return _in_process(args, env)

    def _in_process(args, env):
        from weightline.cli import main

        out, err = io.StringIO(), io.StringIO()
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            patch.setattr(sys, "argv", ["weightline", *args])
            for name, value in env.items():
                patch.setenv(name, value)
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    main()
                    code = 0
                except SystemExit as exit_:
                    code = exit_.code or 0
        return Outcome(code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture
def save_weights(tmp_path):
    """Writes arrays as a safetensors file below the test's folder and returns its path."""

    def save(name, arrays) -> Path:
        from safetensors.numpy import save_file

        path = tmp_path / name
        save_file(arrays, path)
        return path

    return save
