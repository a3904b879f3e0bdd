"""Real servers, doors and weights for the tests of the service."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import weightline as wl

BOUND = 30.0
"""Seconds that anything real is waited for."""

SERVE = """
import json, sys
options = json.loads(sys.argv[1])
if options.pop("no_torch", False):
    class Block:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("torch", "transformers"):
                raise ImportError(f"{name} is blocked in this test")
    sys.meta_path.insert(0, Block())
kill_file = options.pop("kill_file", None)
heartbeat = options.pop("heartbeat", None)
from weightline.errors import WeightlineError
from weightline.service import serve
if heartbeat is not None:
    import weightline.service.host
    weightline.service.host.HEARTBEAT_SECONDS = heartbeat
if kill_file is not None:
    # While the file is there: dies by SIGKILL before the durable step whose number it holds.
    import os, pathlib, signal
    from weightline.store.disk import Disk
    steps = 0
    plain = Disk.__init__
    def on_step(_):
        global steps
        if pathlib.Path(kill_file).exists():
            steps += 1
            if steps == int(pathlib.Path(kill_file).read_text()):
                os.kill(os.getpid(), signal.SIGKILL)
    Disk.__init__ = lambda disk, *_: plain(disk, on_step)
def ready(facts):
    facts["torch"] = "torch" in sys.modules
    print(json.dumps(facts), flush=True)
try:
    serve(ready=ready, **options)
except WeightlineError as error:
    print(json.dumps({"error": error.to_dict()}), flush=True)
    sys.exit(error.status.exit_code)
"""


def until(condition: Callable[[], Any], what: str, bound: float = BOUND) -> Any:
    """The first true value of `condition`, polled; fails after `bound` seconds."""
    deadline = time.monotonic() + bound
    pause = threading.Event()
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {bound} s for {what}"
        pause.wait(0.01)


class ServerProcess:
    """One `serve` in a process of its own."""

    def __init__(self, root: Path | str, runtime_dir: Path, **options: Any) -> None:
        self.root = root
        self.runtime_dir = runtime_dir
        self.options = {"store": str(root), "runtime_dir": str(runtime_dir), **options}
        self.process: subprocess.Popen[str] | None = None
        self.facts: dict[str, Any] = {}

    @property
    def url(self) -> str:
        return str(self.facts["listen"])

    @property
    def socket(self) -> Path:
        return Path(self.url.removeprefix("unix://"))

    def start(self) -> ServerProcess:
        self.facts = self.first_line()
        assert "error" not in self.facts, self.facts
        return self

    def first_line(self) -> dict[str, Any]:
        """What it says first: that it is ready, or why not."""
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", SERVE, json.dumps(self.options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the server said nothing: {self.process.communicate(timeout=BOUND)[1]}"
        return dict(json.loads(line))

    def kill(self) -> None:
        """SIGKILL, and reap."""
        assert self.process is not None
        self.process.kill()
        self._reap()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """The clean way: exit code and stderr."""
        assert self.process is not None
        self.process.send_signal(number)
        return self._reap()

    def _reap(self) -> tuple[int, str]:
        assert self.process is not None
        _, err = self.process.communicate(timeout=BOUND)
        code = self.process.returncode
        self.process = None
        return code, err

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.kill()


class Door:
    """One way to a store: any number of handles, all closed at the end."""

    def __init__(self, kind: str, root: Path | str, url: str) -> None:
        self.kind = kind
        self.root = root
        self.url = url
        self._open: list[Any] = []

    def open(self) -> Any:
        if self.kind == "embedded":
            line: Any = wl.CheckpointEngine(self.root).start()
        else:
            line = wl.connect(self.url)
        self._open.append(line)
        return line

    def close(self) -> None:
        for line in self._open:
            line.close()


def model(seed: int = 0) -> dict[str, np.ndarray]:
    """A few tensors of several dtypes, with a NaN payload and a minus zero in them."""
    rng = np.random.default_rng(seed)
    odd = np.array([0x7FC01234, 0x80000000, 0x00000001, 0xFF800000], dtype=np.uint32).view(np.float32)
    return {
        "embed.weight": rng.standard_normal((16, 8)).astype(ml_dtypes.bfloat16),
        "layer.weight": rng.standard_normal((8, 8)).astype(np.float32),
        "layer.odd": odd,
        "layer.scale": np.array(3.5, dtype=np.float16),
        "steps": np.arange(5, dtype=np.int64),
    }


def moved(weights: dict[str, np.ndarray], *names: str) -> dict[str, np.ndarray]:
    """The same with the lowest bit of element 0 of each named tensor flipped (default: of the first)."""
    out = {name: value.copy() for name, value in weights.items()}
    for name in names or ("embed.weight",):
        out[name].reshape(-1).view(np.uint8)[0] ^= 1
    return out


def bits(weights: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """What must be equal when two sets of weights are."""
    return {name: (str(v.dtype), v.shape, np.ascontiguousarray(v).tobytes()) for name, v in weights.items()}
