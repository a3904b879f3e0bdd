"""The engine: one thread owns the model and runs the step loop.

Everything that changes state (a new request, an abort, a pause, new weights, a label) is a command that
this thread executes between two steps. So "no step is in flight" holds by construction wherever weights or
labels change, and the label that a step reads is the label of the weights it computes with.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Literal, TypeVar
from uuid import uuid4

import torch

from weightline.errors import ConflictError, Unavailable
from weightline.generate.face import Face
from weightline.generate.kv import SlotCache
from weightline.generate.metrics import Metrics
from weightline.generate.model import LoadedModel
from weightline.generate.options import EngineOptions
from weightline.generate.prefix import PrefixCache
from weightline.generate.refit import Identity, Refits
from weightline.generate.requests import Request
from weightline.generate.scheduler import Scheduler
from weightline.generate.steps import Stepper
from weightline.generate.weights import LiveWeights, tied_names
from weightline.generate.wire import EngineState, HeldAt, RefitOrder

log = logging.getLogger(__name__)
T = TypeVar("T")

PauseMode = Literal["abort", "wait", "keep"]
Running = Literal["running", "draining", "paused"]
ID_PREFIX = "generate-tokens-"
"""vLLM puts this before the caller's request id; both forms name the request in an abort."""


class Engine(Face):
    """A rollout engine without its HTTP face. All public methods may be called from any thread but the
    engine's own.
    """

    def __init__(
        self, model: LoadedModel, options: EngineOptions, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.model = model
        self.options = options
        self.clock = clock
        self.instance = uuid4().hex
        self.hold: HeldAt | None = None
        self.identity = Identity("default")
        self.quarantined = False
        self.metrics = Metrics(clock)
        self.weights = LiveWeights(model)
        cache = SlotCache(model.layers, options.max_num_seqs, options.max_model_len)
        self.kv_tokens = options.kv_tokens or options.max_num_seqs * options.max_model_len
        self.scheduler = Scheduler(cache, options.max_num_seqs, self.kv_tokens)
        self.prefix = PrefixCache(cache, options.prefix_tokens)
        self.stepper = Stepper(
            model,
            cache,
            self.scheduler,
            self.prefix,
            max_model_len=options.max_model_len,
            prefill_tokens=options.prefill_tokens,
        )
        self.refits = Refits(self, self.weights, timeout=options.session_timeout, clock=clock)
        self._state: Running = "running"
        self._recompute = False
        self._kept = False
        self._drained: list[Future[None]] = []
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._stopping = False
        self._closed = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="weightline-engine", daemon=True)

    # Life.

    def start(self) -> Engine:
        """Start the engine thread."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """End all requests as aborted and stop the thread. Idempotent."""
        with self._closed:
            self._stopping = True
            self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def post(self, command: Callable[[], T]) -> Future[T]:
        """Have the engine thread run `command` between two steps. Raises `Unavailable` after `stop`."""
        future: Future[T] = Future()
        with self._closed:
            if self._stopping:
                raise Unavailable("the engine is stopping", hint="start it again")
            self._commands.put((command, future))
        return future

    def call(self, command: Callable[[], T]) -> T:
        """`post`, and wait for the result."""
        return self.post(command).result()

    # Requests.

    def _enqueue(self, request: Request) -> None:
        if self.quarantined:
            raise Unavailable(
                "the engine is quarantined: its weights are in an unknown state", hint="refit it in full"
            )
        self.scheduler.queue.append(request)

    def abort(self, request_ids: Iterable[str] | None) -> int:
        """End requests by the caller's ids (None: all) with what they have; returns how many were live.
        Unknown ids do nothing.
        """
        wanted = None if request_ids is None else {i.removeprefix(ID_PREFIX) for i in request_ids}
        return self.call(
            lambda: self._abort(lambda r: wanted is None or r.external_id.removeprefix(ID_PREFIX) in wanted)
        )

    def abort_request(self, request: Request) -> Future[int]:
        """End this very request, if it still runs; does not wait."""
        return self.post(lambda: self._abort(lambda r: r is request))

    def _abort(self, wanted: Callable[[Request], bool], reason: Literal["abort", "error"] = "abort") -> int:
        found = self.scheduler.find(wanted)
        for request in found:
            if request in self.scheduler.queue:
                self.scheduler.queue.remove(request)
            for sequence in request.live:
                self.stepper.finish(sequence, reason)
        if self._state == "draining" and not self.scheduler.rows and not self._stopping:
            self._now_paused()  # no step comes any more that would notice
        return len(found)

    # Pausing.

    @property
    def paused(self) -> bool:
        """No step runs until `resume`."""
        return self._state == "paused"

    def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> Future[None]:
        """Stop between two steps. The future is done once no step runs.

        "keep" freezes running requests (with `clear_cache` they recompute their keys and values when they
        go on), "abort" ends all live requests with what they have, "wait" admits no more and lets running
        ones end. An engine that is paused already stays so.
        """
        done: Future[None] = Future()
        self.call(lambda: self._pause(mode, clear_cache, done))
        return done

    def _pause(self, mode: PauseMode, clear_cache: bool, done: Future[None]) -> None:
        self.refits.pause_came(by_it=self._state == "running")
        if mode == "abort":
            self._abort(lambda _: True)
        self._kept = self._kept or mode == "keep"
        if mode == "wait" and self._state != "paused" and (self.scheduler.rows or self.scheduler.resuming):
            self._state = "draining"
            self._drained.append(done)
            return
        if clear_cache:
            self._recompute = True
        self._now_paused()
        done.set_result(None)

    def pause_now(self, *, clear_cache: bool) -> None:
        """`pause("keep")`, on the engine thread."""
        self._pause("keep", clear_cache, Future())

    def _now_paused(self) -> None:
        self._state = "paused"
        waiters, self._drained = self._drained, []
        for waiter in waiters:
            waiter.set_result(None)

    def resume(self) -> None:
        """Go on. Idempotent. Raises `ConflictError` while new weights are live under the old label."""
        self.call(self.resume_now)

    def resume_now(self) -> None:
        """`resume`, on the engine thread."""
        if self.refits.unlabelled:
            self.metrics.weights_without_label += 1
            log.warning("resume refused: new weights are live under the old label %r", self.identity.label)
            raise ConflictError(
                "new weights are live under the old label", hint="label or roll back the refit first"
            )
        if self._recompute:
            self.scheduler.forget_kv()
        if self._recompute or self._kept:
            # Running requests may go on with keys and values of before: no new one may find theirs.
            self.prefix.renew()
        self._recompute = self._kept = False
        self._state = "running"
        self.refits.resumed()
        waiters, self._drained = self._drained, []
        for waiter in waiters:
            waiter.set_exception(
                ConflictError("the engine was resumed before running requests had ended", hint="pause again")
            )

    @property
    def halted(self) -> bool:
        """Paused, or on the way there."""
        return self._state != "running"

    def reset_prefix_cache(self) -> None:
        """No new request finds keys or values of an earlier one."""
        self.call(self.prefix.renew)

    def reset_kv(self) -> None:
        """All running requests compute their keys and values anew."""
        self.call(self.scheduler.forget_kv)

    # Labels and weights.

    def weights_changed(self) -> None:
        """On the engine thread: weights or label are others now, so a half-computed pass starts over, and no
        new request finds what the old ones computed.
        """
        self.prefix.renew()
        self.scheduler.restart_partial()

    def quarantine(self, why: str) -> None:
        """On the engine thread: the weights are in an unknown state. Ends all requests and takes no more."""
        log.error("quarantined: %s", why)
        self.quarantined = True
        self.weights.carried.clear()
        self._abort(lambda _: True)

    def set_label(self, label: str) -> None:
        """Tokens of the next step carry `label`; weights and version stay. What is behind such a label is
        the caller's claim.
        """

        def change() -> None:
            if label != self.identity.label:
                self.metrics.labels_without_weights += 1
                log.warning("label %r replaces %r, and no weights changed", label, self.identity.label)
            self.identity = Identity(label, self.identity.version, self.identity.run)
            self.weights_changed()

        self.call(change)

    def prepare(self, order: RefitOrder) -> tuple[str, int]:
        """Open a refit session and decode its delta while serving; returns (session, elements). Raises as
        `Refits.open` and `Refits.decode`.
        """
        session = self.call(lambda: self.refits.open(order))
        if session.change is None:
            try:
                decoded = self.refits.decode(session)
            except BaseException:
                self.call(lambda: self.refits.discard(session))
                raise
            self.call(lambda: self.refits.ready(session, decoded))
        return session.id, session.elements

    def digests(self, names: Iterable[str] | None = None) -> tuple[dict[str, str], Identity]:
        """Additive digests recomputed in full, while serving, and the identity they belong to.

        Raises `ConflictError` when refits keep coming in between, `InvalidInput` for an unknown name.
        """
        wanted = None if names is None else list(names)
        for _ in range(3):
            before, writes = self.identity, self.weights.writes
            found = self.weights.digests(wanted)
            if self.identity == before and self.weights.writes == writes:
                return found, before
        raise ConflictError(
            "weights changed while their digests were computed", hint="ask again between two refits"
        )

    def describe(self) -> EngineState:
        """What the engine serves now."""

        def look() -> EngineState:
            session = self.refits.session
            return EngineState(
                label=self.identity.label,
                version=self.identity.version,
                run=self.identity.run,
                instance=self.instance,
                paused=self.paused,
                quarantined=self.quarantined,
                tensors=self.weights.specs(),
                aliases=tied_names(self.weights.aliases),
                hold=self.hold,
                model=str(self.model.folder),
                running=len(self.scheduler.rows),
                waiting=len(self.scheduler.queue),
                session=session.id if session else None,
                holder=session.order.holder if session else None,
            )

        return self.call(look)

    # The loop.

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        with torch.inference_mode():
            while self._obey():
                self.refits.expire()
                if self._may_step():
                    self._step()
            self._abort(lambda _: True)
        for waiter in self._drained:
            waiter.set_exception(Unavailable("the engine is stopping"))

    def _may_step(self) -> bool:
        if self._state == "draining":
            return bool(self.scheduler.rows) or self.scheduler.resuming
        return self._state == "running" and bool(self.scheduler.rows or self.scheduler.queue)

    def _step(self) -> None:
        try:
            self.stepper.step(self.identity.label, admit=self._state == "running")
        except (
            Exception
        ) as error:  # one bad step must not take the engine down with requests that hang for ever
            log.exception("a step failed: %s", error)
            self._abort(lambda r: any(s in self.scheduler.rows for s in r.sequences), "error")
        if self._state == "draining" and not self._may_step():
            self._now_paused()

    def _obey(self) -> bool:
        """Execute waiting commands; with nothing to step, wait for one. False when the engine stops."""
        while True:
            try:
                entry = (
                    self._commands.get(block=False)
                    if self._may_step()
                    else self._commands.get(timeout=self._patience())
                )
            except queue.Empty:
                return True
            if entry is None:
                return False
            command, future = entry
            if not future.set_running_or_notify_cancel():
                continue
            # Before the command, so that a session whose time is up is over for the command too.
            self.refits.expire()
            try:
                future.set_result(command())
            except BaseException as error:  # noqa: BLE001 - it belongs to the caller, who gets it from the future
                future.set_exception(error)

    def _patience(self) -> float | None:
        deadline = self.refits.deadline()
        return None if deadline is None else max(0.05, deadline - self.clock())
