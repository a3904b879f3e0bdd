"""The marker-version test: many requests at once, swaps in between, every token checked.

Requests come from `workers` threads, deterministic by seed: streams and not, one output or several, prompts
with a shared beginning and fresh ones. A swapper commits marker versions and lets the follower bring them
to the engine, through every pause the engine has. Some requests are aborted by id at a random moment, some
clients go away.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from msgspec import Struct

from weightline.errors import Unavailable, WeightlineError
from weightline.testing.client import Ask, Client
from weightline.testing.flight import until
from weightline.testing.judge import Judge, Sent
from weightline.testing.marker import MarkerModel
from weightline.testing.report import Findings
from weightline.testing.swaps import OWN, Swaps

Progress = Callable[[str, int, int], None]
"""Called with what is under way, how far it is, and how far it has to go."""


class Load(Struct, frozen=True, kw_only=True):
    """How much of it."""

    tokens: int = 100_000
    """Tokens to compare with their labels."""
    swaps: int = 200
    workers: int = 64
    longest: int = 48
    """Tokens of one output at most."""
    prompt: int = 40
    """Tokens of a prompt that no other request has, at most."""
    prefix: int = 272
    """Tokens of a prompt's beginning that several requests share."""
    seed: int = 0


class Stress:
    """One run over one kind of marker model."""

    def __init__(
        self, client: Client, swaps: Swaps, model: MarkerModel, load: Load, progress: Progress
    ) -> None:
        self.client, self.swaps, self.model, self.load = client, swaps, model, load
        self.judge = Judge(swaps, model)
        self._progress = progress
        self._stop = threading.Event()
        self._more = threading.Condition()
        self._live: dict[str, bool] = {}
        """Id -> whether it has been aborted, of the requests under way."""
        self._pause_aborts = 0
        """Odd while a pause may end requests; a request that saw it odd, or saw it change, may have been
        aborted."""
        self._next = 0
        self._lock = threading.Lock()
        self.hanging = 0
        self.errors: list[str] = []
        self.resident: list[int] = []

    # Requests.

    def _ask(self) -> tuple[Ask, bool]:
        with self._lock:
            number = self._next
            self._next += 1
        rng = random.Random(f"{self.load.seed}:{self.model.kind}:{number}")
        vocabulary, load = self.model.vocabulary, self.load
        shared = rng.random() < 0.5
        if shared:
            # Long prefixes are what an engine's cache keeps; short ones cost little.
            base = random.Random(f"{load.seed}:{rng.randrange(3)}")
            size = load.prefix if rng.random() < 0.25 else load.prompt
            prompt = [base.randrange(3, vocabulary) for _ in range(size)]
            prompt += [rng.randrange(3, vocabulary) for _ in range(rng.randint(1, 4))]
        else:
            prompt = [rng.randrange(3, vocabulary) for _ in range(rng.randint(1, load.prompt))]
        stream, leaves = rng.random() < 0.6, rng.random() < 0.05
        n = rng.choice((1, 1, 1, 1, 2, 3))
        ask = Ask(
            id=f"conform-{self.swaps.line.run[:6]}-{self.model.kind}-{number}",
            prompt=tuple(prompt),
            max_tokens=rng.randint(1, load.longest),
            stream=stream,
            n=n,
            disconnect_after=rng.randint(1, 8) if leaves else None,
        )
        return ask, not shared

    def _work(self) -> None:
        while not self._stop.is_set():
            ask, fresh = self._ask()
            floor, aborts = self.swaps.live, self._pause_aborts
            with self._lock:
                self._live[ask.id] = False
            reply = self.client.generate(ask)
            with self._lock:
                aborted = self._live.pop(ask.id) or aborts % 2 == 1 or self._pause_aborts != aborts
            self.judge.add(reply, Sent(floor, aborted, fresh), self.swaps.newest)
            with self._more:
                self._more.notify_all()
            if reply.error and not reply.left:
                self._stop.wait(0.1)  # an engine that refuses everything is not hammered

    def _abort_some(self) -> None:
        rng = random.Random(self.load.seed)
        while not self._stop.wait(0.05):
            with self._lock:
                candidates = sorted(id for id, aborted in self._live.items() if not aborted)
                if not candidates:
                    continue
                chosen = rng.choice(candidates)
                self._live[chosen] = True
            try:
                self.client.abort(chosen)
            except WeightlineError as error:
                self.errors.append(error.message)

    # Swaps.

    def run(self, measure: Callable[[], int | None]) -> None:
        """Until enough tokens are judged and all swaps are done. Raises `Unavailable` when the engine stops
        answering."""
        self._swap(0)
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(self.load.workers)]
        threads.append(threading.Thread(target=self._abort_some, daemon=True))
        for thread in threads:
            thread.start()
        try:
            for number in range(1, self.load.swaps + 1):
                self._tokens(self.load.tokens * number // (self.load.swaps + 1))
                self._swap(number)
                size = measure()
                if size is not None:
                    self.resident.append(size)
                self._progress(f"{self.model.kind} markers", self.judge.tally.tokens, self.load.tokens)
            self._tokens(self.load.tokens)
        finally:
            self._stop.set()
            deadline = time.monotonic() + 150
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        self.hanging = sum(thread.is_alive() for thread in threads)

    def _tokens(self, count: int) -> None:
        with self._more:
            before, since = self.judge.tally.tokens, time.monotonic()
            while self.judge.tally.tokens < count:
                self._more.wait(1.0)
                if self.judge.tally.tokens != before:
                    before, since = self.judge.tally.tokens, time.monotonic()
                elif time.monotonic() - since > 150:
                    raise Unavailable(
                        f"no output ended for 150 s, at {before} tokens", hint="see the engine's log"
                    )

    def _swap(self, number: int) -> None:
        # Each way once, so that a short run has them all; then pauses that end all requests, which leave no
        # output of two versions, are rarer than the others.
        ways = [*self.client.pauses, OWN]
        if 1 <= number <= len(ways):
            pause = ways[number - 1]
        else:
            rng = random.Random(f"{self.load.seed}:swap:{number}")
            pause = rng.choices(ways, [1.0 if way.aborts or way.drains else 3.0 for way in ways])[0]
        if pause.aborts:
            self._pause_aborts += 1
        self.swaps.marker(self.model, 1 + number, pause)
        if pause.aborts:
            self._pause_aborts += 1

    # The outcome.

    def report(self, found: Findings, prefix: str) -> None:
        """All rules, and what must be true at the end."""
        self.judge.report(found, prefix)
        tally = self.judge.tally
        found.add(f"{prefix}.aborts", "aborts by id are answered", not self.errors, self.errors[:1] or "all")
        text = f"{self.hanging} requests hang"
        found.add(f"{prefix}.terminals.hanging", "no request hangs", not self.hanging, text)
        quiet = until(lambda: self.client.live_requests() == 0, timeout=15.0)
        text = f"{self.client.live_requests()} live"
        found.add(f"{prefix}.none-left", "clients that went away leave no request behind", quiet, text)
        text = f"{tally.mixed} outputs of more than one version, {tally.aborted} aborted, {tally.left} left"
        found.add(
            f"{prefix}.mixed", "outputs of more than one version were among them", tally.mixed > 0, text
        )
        if self.model.kind == "kv":
            text = f"{tally.kv_judged} tokens that had to have KV of their own version"
            found.add(
                f"{prefix}.kv-judged",
                "tokens with a claim about their KV were among them",
                tally.kv_judged > 0,
                text,
            )
