"""Rollouts over HTTP from engines that never stop: groups of requests in flight, whatever the engines'
versions do meanwhile.

One thread with an event loop of its own keeps a fixed number of groups launched and not yet taken. Each group
is one prompt: `group_size` requests at temperature 1, and one greedy request, which is what an audit can
replay. Every finished request becomes one line of the rollout file.
"""

from __future__ import annotations

import asyncio
import hashlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import msgspec
from msgspec import Struct

from weightline.core import spans
from weightline.demo.task import Prompt, Task
from weightline.errors import InvalidInput, Unavailable, WeightlineError
from weightline.types import WeightVersionSpan

_PATH = "/inference/v1/generate"
_IMPROPER = (
    httpx.HTTPError,
    WeightlineError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
)
"""What a missing or malformed answer can raise; nothing else is taken for a dropped request."""
_CARRIED = ("token_ids", "finish_reason", "weight_versions", "kv_weight_versions", "kv_recomputed_at")


class Sample(Struct, frozen=True, kw_only=True):
    """One finished answer."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """One a token, of the weights that sampled it."""
    finish_reason: str
    weight_versions: tuple[WeightVersionSpan, ...]
    engine: str

    @property
    def mixed(self) -> bool:
        """Whether more than one version sampled it."""
        return len(self.weight_versions) > 1


class Group(Struct, frozen=True):
    """One prompt with the answers that came; those that were dropped are missing."""

    prompt: Prompt
    samples: tuple[Sample, ...]


class Counts(Struct, frozen=True):
    """All requests so far, greedy ones included."""

    requests: int = 0
    """Requests that were sent and have ended, in whatever way."""
    tokens: int = 0
    dropped: int = 0
    """Requests without a proper terminal answer: transport error, HTTP error, abort, labels that do not cover
    the tokens."""
    mixed: int = 0
    """Requests whose tokens come from more than one version."""


class RolloutOptions(Struct, frozen=True, kw_only=True):
    """How rollouts are asked for."""

    group_size: int
    max_tokens: int
    in_flight: int
    """Groups launched and not yet taken."""
    seed: int = 0
    temperature: float = 1.0
    start_timeout: float = 300.0
    """Seconds that an engine may take to come up and serve a version of the run."""
    request_timeout: float = 600.0
    """Seconds without a byte from an engine after which a request counts as dropped."""


class RolloutClient:
    """Owns the thread and the file. `start`, then `take` from one training thread, then `stop`. Never resends
    a request.

    A refused connection is tried again only while an engine has not yet been reached at all. `serves` tells
    whether a label is one of this run's: nothing is sent to an engine before it says so of itself.
    """

    def __init__(
        self,
        engines: Sequence[str],
        task: Task,
        *,
        run: str,
        options: RolloutOptions,
        path: Path,
        serves: Callable[[str], bool],
        on_drop: Callable[[str, str, str], None] | None = None,
    ) -> None:
        """`engines`: base URLs. `path`: the rollout file; lines are added at its end. `on_drop` is told the
        request, the engine and the reason of each dropped request, in the client's thread. Raises
        `InvalidInput`.
        """
        if not engines:
            raise InvalidInput("rollouts: no engine", hint="give at least one engine URL")
        if options.group_size < 2 or options.in_flight < 1 or options.max_tokens < 1:
            raise InvalidInput(
                f"rollouts: group_size={options.group_size}, in_flight={options.in_flight}, "
                f"max_tokens={options.max_tokens}",
                hint="a group has at least 2 samples; the others are at least 1",
            )
        self._engines = [url.rstrip("/") for url in engines]
        self._task = task
        self._run = run
        self._options = options
        self._path = path
        self._serves = serves
        self._on_drop = on_drop
        self._done: queue.SimpleQueue[Group | BaseException] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._counts = Counts()
        self._load = dict.fromkeys(self._engines, 0)
        self._outstanding = 0
        self._stopping = False
        self._failed: BaseException | None = None
        self._wake: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._main, name="rollouts", daemon=True)

    @property
    def counts(self) -> Counts:
        """What has ended so far."""
        with self._lock:
            return self._counts

    def start(self) -> None:
        """Begin to launch groups as soon as every engine serves a version of the run."""
        self._thread.start()

    def take(self, count: int, *, timeout: float = 600.0) -> list[Group]:
        """The next `count` groups that are finished, in the order in which they finished; waits for them.

        As many new ones are launched. Raises what ended the client, and `Unavailable` when nothing came
        within `timeout` seconds.
        """
        groups: list[Group] = []
        while len(groups) < count:
            if self._failed is not None:
                raise self._failed
            try:
                item = self._done.get(timeout=timeout)
            except queue.Empty:
                raise Unavailable(
                    f"rollouts: no group was finished within {timeout:.0f} s",
                    hint="look at the engines' logs",
                ) from None
            if isinstance(item, BaseException):
                self._failed = item
                continue
            groups.append(item)
        with self._lock:
            self._outstanding -= count
        self._poke()
        return groups

    def stop(self) -> Counts:
        """Launch nothing more, wait until every request in flight has ended, and close the file.
        Idempotent."""
        self._stopping = True
        self._poke()
        if self._thread.is_alive():
            self._thread.join()
        return self.counts

    # -- the thread

    def _poke(self) -> None:
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(wake.set)
            except RuntimeError:
                return  # it closed just now: there is nobody left to wake

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - handed to the training thread, which raises it
            self._done.put(error)

    async def _serve(self) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        # A pause of an engine is not a reason to give up on it: only silence for long is.
        timeout = httpx.Timeout(self._options.request_timeout, connect=10.0)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as http:
            await asyncio.gather(*(self._await_engine(http, url) for url in self._engines))
            with self._path.open("ab") as file:
                await self._keep_in_flight(http, file)

    async def _keep_in_flight(self, http: httpx.AsyncClient, file: BinaryIO) -> None:
        running: set[asyncio.Task[None]] = set()
        wake = self._wake
        if wake is None:  # set by `_serve`
            raise RuntimeError("the event loop is not running")
        while True:
            wake.clear()
            while not self._stopping and self._may_launch():
                task = asyncio.create_task(self._group(http, file, self._task.draw()))
                task.add_done_callback(lambda _: wake.set())
                running.add(task)
            for finished in [t for t in running if t.done()]:
                running.discard(finished)
                finished.result()
            if self._stopping and not running:
                return
            await wake.wait()

    def _may_launch(self) -> bool:
        with self._lock:
            free = self._outstanding < self._options.in_flight
            self._outstanding += free
            return free

    async def _await_engine(self, http: httpx.AsyncClient, url: str) -> None:
        deadline = time.monotonic() + self._options.start_timeout
        reached = False
        seen = "no answer"
        while time.monotonic() < deadline and not self._stopping:
            try:
                answer = await http.get(f"{url}/weight_info")
                answer.raise_for_status()
                reached, seen = True, str(answer.json().get("weight_version"))
                if self._serves(seen):
                    return
                seen = f"label {seen!r}"
            except httpx.ConnectError as error:
                if reached:
                    raise Unavailable(f"engine {url} went away: {error}", hint="look at its log") from error
            except httpx.HTTPError as error:
                seen = f"{type(error).__name__} {error}"
            await asyncio.sleep(0.1)
        if not self._stopping:
            raise Unavailable(
                f"engine {url} serves no version of the run after "
                f"{self._options.start_timeout:.0f} s ({seen})",
                hint="is it up, and does a follower keep it on the newest version?",
            )

    async def _group(self, http: httpx.AsyncClient, file: BinaryIO, prompt: Prompt) -> None:
        size = self._options.group_size
        answers = await asyncio.gather(*(self._request(http, file, prompt, i) for i in range(size + 1)))
        self._done.put(Group(prompt, tuple(a for a in answers[:size] if a is not None)))

    async def _request(
        self, http: httpx.AsyncClient, file: BinaryIO, prompt: Prompt, number: int
    ) -> Sample | None:
        """Send request `number` of a group (the last one is greedy); None when it was dropped."""
        greedy = number == self._options.group_size
        name = f"{prompt.index}-{'greedy' if greedy else number}"
        sampling: dict[str, Any] = {"temperature": 0.0 if greedy else self._options.temperature}
        if not greedy:
            sampling["seed"] = _seed(self._options.seed, name)
        sampling |= {"max_tokens": self._options.max_tokens, "logprobs": 1}
        body = {"request_id": name, "token_ids": list(prompt.token_ids), "sampling_params": sampling}
        engine = min(self._engines, key=lambda url: self._load[url])
        self._load[engine] += 1
        try:
            answer = await http.post(engine + _PATH, json=body)
            answer.raise_for_status()
            choice = answer.json()["choices"][0]
            sample = read_choice(choice, engine)
        except _IMPROPER as error:
            self._count(None)
            if self._on_drop is not None:
                self._on_drop(name, engine, f"{type(error).__name__}: {error}")
            return None
        finally:
            self._load[engine] -= 1
        self._count(sample)
        line = {
            "run": self._run,
            "request_id": name,
            "prompt_token_ids": prompt.token_ids,
            "sampling": sampling,
            "logprobs_mode": "raw",
            "engine": engine,
            "choices": [
                {key: choice[key] for key in _CARRIED if choice.get(key) is not None}
                | {"logprobs": sample.logprobs}
            ],
        }
        file.write(msgspec.json.encode(line) + b"\n")
        file.flush()
        return sample

    def _count(self, sample: Sample | None) -> None:
        with self._lock:
            c = self._counts
            self._counts = Counts(
                requests=c.requests + 1,
                tokens=c.tokens + (len(sample.token_ids) if sample else 0),
                dropped=c.dropped + (sample is None),
                mixed=c.mixed + (sample is not None and sample.mixed),
            )


def read_choice(choice: Mapping[str, Any], engine: str) -> Sample:
    """A choice of the engine's answer, checked: ended by the model or by its limit, one log-probability and
    one label a token.

    Raises `InvalidInput` for anything less: it is no proper terminal answer.
    """
    tokens = tuple(choice["token_ids"])
    reason = choice["finish_reason"]
    if reason not in ("stop", "length"):
        raise InvalidInput(f"a request ended with {reason!r}", hint="look at the engine's log")
    labels = tuple(
        WeightVersionSpan(s["version"], int(s["start"]), int(s["end"])) for s in choice["weight_versions"]
    )
    spans.validate(labels, len(tokens))
    logprobs = tuple(float(entry["logprob"]) for entry in choice["logprobs"]["content"])
    if len(logprobs) != len(tokens):
        raise InvalidInput(
            f"{len(logprobs)} logprobs for {len(tokens)} tokens", hint="look at the engine's log"
        )
    return Sample(
        token_ids=tokens, logprobs=logprobs, finish_reason=reason, weight_versions=labels, engine=engine
    )


def _seed(seed: int, name: str) -> int:
    """A sampling seed for each request: the same for the same request of the same run."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest(), "big")
