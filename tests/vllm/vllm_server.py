"""A real vLLM server in processes of its own, a store, and marker versions of a tiny model."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
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
_LIBC = ctypes.CDLL(None)
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

    def start(self, **environment: str) -> Server:
        """Start it and wait until it answers."""
        config = '{"backend":"weightline"}'
        command = ["sh", str(SERVE), str(VENV), str(self.model), str(self.port), "--dtype", "float32"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--weight-transfer-config", config, *self.flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, nothing that takes a lock
                env=dict(
                    os.environ,
                    VLLM_LOGGING_LEVEL="INFO",
                    PATH=f"{VENV}/bin:{os.environ['PATH']}",
                    **environment,
                ),
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

    def stream(
        self,
        prompt: list[int],
        count: int,
        *,
        mode: str = "tokens",
        on_chunk: Callable[[int], None] | None = None,
    ) -> dict[str, Any]:
        """One streamed request to its end: all tokens, and what its last chunk said.

        `on_chunk` is called with the number of chunks so far."""
        body = {
            "model": "m",
            "token_ids": prompt,
            "stream": True,
            "output_mode": mode,
            "sampling_params": {"max_tokens": count, "temperature": 0, "ignore_eos": True},
        }
        tokens: list[int] = []
        last: dict[str, Any] = {}
        early = chunks = 0
        with (
            httpx.Client(timeout=300.0, trust_env=False) as client,
            client.stream("POST", f"{self.url}/inference/v1/generate", json=body) as response,
        ):
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line[6:]).get("choices", []):
                    early += bool(last.get("weight_versions"))
                    tokens += choice.get("token_ids") or []
                    last = choice
                chunks += 1
                if on_chunk is not None:
                    on_chunk(chunks)
        return {**last, "token_ids": tokens, "prompt": prompt, "spans_before_the_last_chunk": early}

    def workers(self) -> list[Any]:
        """Its processes below the API server."""
        import psutil

        return [] if self.process is None else psutil.Process(self.process.pid).children(recursive=True)

    @contextlib.contextmanager
    def hanging(self, who: str, seconds: float) -> Iterator[None]:
        """`who` ("workers" or "http") stands still from now on, for so long, also after the block."""
        import psutil

        if self.process is None:
            raise RuntimeError("the server is not running")
        stopped = self.workers() if who == "workers" else [psutil.Process(self.process.pid)]
        for process in stopped:
            process.suspend()
        timer = threading.Timer(seconds, lambda: [process.resume() for process in stopped])
        timer.start()
        try:
            yield
        finally:
            timer.join()

    def paused(self) -> bool:
        return bool(self.get("/is_paused")["is_paused"])

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

    def __init__(self, root: Path, server: Server, base: dict[str, torch.Tensor], *, query: str = "") -> None:
        self.root, self.server, self.query = root, server, query
        self.engine = weightline.CheckpointEngine(storage_path=str(root / "store"))
        self.engine.start()
        self.line = connect(f"file://{root / 'store'}")
        self.weights = base
        self.version = 0
        self.events: list[dict[str, Any]] = []
        self._open: list[Callable[[], None]] = []

    def port(self, holder: str = "follower-1", *, query: str | None = None, **options: Any) -> VllmEngine:
        url = self.server.url + (self.query if query is None else query)
        port = VllmEngine(url, holder=holder, **options)
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

    @contextlib.contextmanager
    def follow_process(self) -> Iterator[subprocess.Popen[bytes]]:
        """`weightline follow` itself, killed at the end."""
        options = "&".join(filter(None, (self.query.removeprefix("?"), "session_timeout=1")))
        command = [sys.executable, "-W", "ignore", "-m", "weightline", "follow", str(self.root / "store")]
        command += ["--engine", f"vllm={self.server.url}?{options}", "--id", "follow"]
        command += ["--runtime-dir", str(self.root / "runtime")]
        with (self.root / "follow.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def follow_process_to(self, process: subprocess.Popen[bytes], version: int) -> None:
        """Wait until the engine, which `process` follows, serves `version` or a newer one."""
        label, deadline = self.label_of(version), time.monotonic() + 90
        while self.server.get("/weight_info")["weight_version"] != label or self.server.paused():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"follow: {(self.root / 'follow.log').read_text()[-3000:]}")
            time.sleep(0.02)

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
            self.answers.append({"prompt": prompt, **self.server.generate(prompt, self.count)})

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


def rollout_line(run: str, answer: dict[str, Any], *, kv_kept: bool) -> dict[str, Any]:
    """One answer as a line of a rollout file (docs/rollout-file.md).

    Whose weights computed the keys and values follows from how the follower pauses: all recomputed by the
    newest version at each boundary, or left as each version computed them (the last token before a boundary
    is fed back, so computed, by the version after it).
    """
    found, prompt, total = answer["weight_versions"], len(answer["prompt"]), len(answer["token_ids"])
    kv, again = [], []
    if kv_kept:
        starts = [0, *(span["start"] + prompt - 1 for span in found[1:]), prompt + total - 1]
        for span, start, end in zip(found, starts[:-1], starts[1:], strict=True):
            kv.append({"version": span["version"], "start": start, "end": end})
    else:
        kv.append({"version": found[-1]["version"], "start": 0, "end": prompt + total - 1})
        again = [span["start"] for span in found[1:]]
    choice = {"token_ids": answer["token_ids"], "finish_reason": answer["finish_reason"]}
    choice |= {"weight_versions": found, "kv_weight_versions": kv, "kv_recomputed_at": again}
    return {
        "run": run,
        "request_id": f"r{id(answer)}",
        "prompt_token_ids": answer["prompt"],
        "sampling": {"temperature": 0.0},
        "choices": [choice],
    }


def _die_with_parent() -> None:
    """A test run that is killed leaves no server behind: the kernel ends the server with it."""
    _LIBC.prctl(1, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])
