"""A real vLLM server in processes of its own, a store, and marker versions of a tiny model."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from vllm_driver import nudged

import weightline
from weightline.rollout import Follower
from weightline.rollout.engines.vllm import VllmEngine
from weightline.rollout.replica import Replica
from weightline.service import connect

SERVE = Path(__file__).parents[2] / "engines" / "vllm" / "serve.sh"
VENV = Path(sys.prefix)
START = 420.0
"""Seconds that a server may take to come up on a loaded machine."""


def marked(weights: dict[str, torch.Tensor], k: int) -> dict[str, torch.Tensor]:
    """Version k: greedy decoding emits token k, whatever the prompt.

    Every token has one embedding and the layers add nothing to it, so the last hidden state is known; only
    row k of the head answers to it. All other tensors move as a training step moves them.
    """
    out = nudged(weights, k)
    for name, tensor in out.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    out["model.embed_tokens.weight"].fill_(1.0)
    out["model.norm.weight"].fill_(1.0)
    out["lm_head.weight"].zero_()
    out["lm_head.weight"][k] = 1.0
    return out


class Server:
    """One vLLM server process tree."""

    def __init__(self, model: Path, log: Path, *flags: str, port: int | None = None) -> None:
        self.model, self.log, self.flags = model, log, flags
        self.port = port or _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        """Start it and wait until it answers."""
        config = '{"backend":"weightline"}'
        command = ["sh", str(SERVE), str(VENV), str(self.model), str(self.port), "--dtype", "float32"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--weight-transfer-config", config, *self.flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=dict(os.environ, VLLM_LOGGING_LEVEL="INFO", PATH=f"{VENV}/bin:{os.environ['PATH']}"),
            )
        deadline = time.monotonic() + START
        while not self.up():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"vLLM did not come up:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.25)
        return self

    def up(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        """End the whole process tree, without a chance to clean up."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=60.0, trust_env=False).json()

    def post(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=300.0, trust_env=False)

    def generate(self, prompt: list[int], count: int) -> dict[str, Any]:
        """One request to the end; its first choice."""
        body = {
            "model": "m",
            "token_ids": prompt,
            "stream": False,
            "sampling_params": {"max_tokens": count, "temperature": 0, "ignore_eos": True},
        }
        answer = self.post("/inference/v1/generate", body)
        answer.raise_for_status()
        return dict(answer.json()["choices"][0])

    def prefix_hits(self) -> int:
        """Tokens served from cached prefixes since the start."""
        text = httpx.get(self.url + "/metrics", timeout=60.0, trust_env=False).text
        found = re.search(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", text, re.MULTILINE)
        return int(float(found[1])) if found else 0

    def resident(self) -> int:
        """Bytes of resident memory of all its processes."""
        import psutil

        if self.process is None:
            return 0
        root = psutil.Process(self.process.pid)
        return sum(p.memory_info().rss for p in (root, *root.children(recursive=True)))


class World:
    """A store, a server, and the follower between them."""

    def __init__(self, root: Path, server: Server, base: dict[str, torch.Tensor]) -> None:
        self.root, self.server = root, server
        self.engine = weightline.CheckpointEngine(storage_path=str(root / "store"))
        self.engine.start()
        self.line = connect(f"file://{root / 'store'}")
        self.weights = base
        self.version = 0
        self.events: list[dict[str, Any]] = []
        self._open: list[Callable[[], None]] = []

    def port(self, holder: str = "follower-1", **options: Any) -> VllmEngine:
        port = VllmEngine(self.server.url, holder=holder, **options)
        self._open.append(port.close)
        return port

    def follower(self, port: VllmEngine | None = None, **options: Any) -> Follower:
        replica = Replica(self.line.run, "follower-1", parent=self.root / "runtime")
        self._open.append(replica.close)
        return Follower(
            self.line, port or self.port(), replica, id="engine-0", on_event=self.events.append, **options
        )

    def commit(self) -> int:
        """The next marker version."""
        self.version += 1
        self.weights = marked(self.weights, self.version)
        assert self.engine.commit(self.weights, step=self.version) == self.version
        return self.version

    def follow_to(self, follower: Follower, version: int, within: float = 60.0) -> None:
        """Step until the engine serves `version`."""
        deadline = time.monotonic() + within
        while True:
            delay = follower.step()
            live = follower.port.describe()
            if live.version == version and live.label == self.line.record(version).label and not live.paused:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"engine serves {live}; events: {self.events[-3:]}")
            time.sleep(min(delay, 0.2))

    def label_of(self, version: int) -> str:
        return self.line.record(version).label

    def close(self) -> None:
        for close in self._open:
            close()
        self.line.close()
        self.engine.close()


class Traffic:
    """Requests that never stop, until told; every answer is kept."""

    def __init__(self, server: Server, *, streams: int, count: int) -> None:
        self.server, self.count = server, count
        self.answers: list[dict[str, Any]] = []
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(streams)
        self._futures = [self._pool.submit(self._run, number) for number in range(streams)]

    def _run(self, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            prompt = [1 + (number * 31 + turn * 7 + i) % 400 for i in range(4 + number)]
            self.answers.append(self.server.generate(prompt, self.count))

    @property
    def tokens(self) -> int:
        return sum(len(answer["token_ids"]) for answer in self.answers)

    def stop(self) -> list[dict[str, Any]]:
        """No new requests; all answers. Raises what a request raised."""
        self._stop.set()
        for future in self._futures:
            future.result()
        self._pool.shutdown()
        return self.answers


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])
