"""A store, a real engine's server, the follower between them, and requests that never stop."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from real_server import RealServer
from real_weights import marked

import weightline
from weightline.rollout import Follower
from weightline.rollout.replica import Replica
from weightline.service import connect


class World:
    """A store with marker versions, a server, and the follower between them."""

    def __init__(
        self, root: Path, server: RealServer, base: dict[str, torch.Tensor], *, query: str = ""
    ) -> None:
        self.root, self.server, self.query = root, server, query
        self.engine = weightline.CheckpointEngine(storage_path=str(root / "store"))
        self.engine.start()
        self.line = connect(f"file://{root / 'store'}")
        self.weights = base
        self.version = 0
        self.events: list[dict[str, Any]] = []
        self._open: list[Callable[[], None]] = []

    def port(self, holder: str = "follower-1", *, query: str | None = None, **options: Any) -> Any:
        port = self.server.port(self.query if query is None else query, holder=holder, **options)
        self._open.append(port.close)
        return port

    def follower(self, port: Any = None, **options: Any) -> Follower:
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
        command += ["--engine", f"{self.server.kind}={self.server.url}?{options}", "--id", "follow"]
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
        while self.server.label() != label or self.server.paused():
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

    def __init__(self, server: RealServer, *, streams: int, count: int) -> None:
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
