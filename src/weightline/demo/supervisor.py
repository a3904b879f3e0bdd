"""Runs the demo: real processes, each started when what it needs is there, all ended whatever happens."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import msgspec
from rich.console import Console

from weightline.demo import report as reports
from weightline.demo.board import Board, EngineSeen, EngineState, LineSeen, MemorySeen
from weightline.demo.children import ChildEvent, ChildExit, Children
from weightline.demo.places import Places, Ports, model_cache
from weightline.demo.probe import Probe
from weightline.demo.view import make_view
from weightline.errors import InvalidInput, Unavailable, WeightlineError, from_dict

MAX_MODEL_LEN = 256
"""Prompt and output tokens of a request. A SmolLM2 engine then takes 1.3 GB, not 2.6 GB as with 2048."""
AUDITED_REQUESTS = 24
_FINISHING = ("model", "trainer", "audit")
"""Children that are meant to end by themselves, with exit code 0."""


class Stopped(Exception):
    """A signal asked the demo to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def run_demo(
    model: str | Path = "smollm2",
    steps: int | None = None,
    engines: int = 2,
    dir: Path | str | None = None,
    *,
    json: bool = False,
    console: Console | None = None,
) -> reports.DemoReport:
    """Run server, engines, followers and trainer as processes of their own, audit the rollouts, and say what
    came of it.

    `model`: "smollm2", "tiny" or a Hugging Face folder. `steps`: optimizer steps (None: chosen for the
    model). `dir`: a new or empty folder that keeps the run; None: a temporary one, removed at the end (its
    logs stay after a failure). The view and the summary go to `console` (default: stderr with `json`, else
    stdout); with `json` there is no summary, the caller prints the returned report.

    Raises `InvalidInput` for a bad argument, `WeightlineError` when a child fails, `Unavailable` when
    something does not happen in time, `KeyboardInterrupt` after Ctrl-C and `SystemExit` after SIGTERM or
    SIGHUP. Whichever way it ends, even by SIGKILL, no process, socket or shared memory stays behind. Call it
    from the main thread to have signals handled.
    """
    if engines < 1:
        raise InvalidInput(f"engines: {engines} is too few", hint="give --engines 1 or more")
    if steps is not None and steps < 1:
        raise InvalidInput(f"steps: {steps} is too few", hint="give --steps 1 or more")
    if str(model) not in ("smollm2", "tiny"):
        from weightline.demo.models import check_model_folder

        check_model_folder(Path(model))
    console = console or Console(stderr=json)
    demo = Demo(str(model), steps, engines, Path(dir) if dir is not None else None, console)
    try:
        with demo:
            result = demo.run()
    except Stopped as stopped:
        console.print(demo.account(stopped), markup=False, highlight=False, soft_wrap=True)
        if stopped.number == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + stopped.number) from None
    if not json:
        reports.print_summary(result, console)
    return result


class Demo:
    """One run. A context manager: leaving it stops all processes and removes what must not stay."""

    def __init__(
        self, model: str, steps: int | None, engines: int, folder: Path | None, console: Console
    ) -> None:
        self.model, self.steps = model, steps
        self.places = Places(folder)
        self.board = Board(model=model, planned_steps=steps)
        self.board.engines = {f"engine-{i}": EngineState() for i in range(engines)}
        self.view = make_view(self.board, console)
        self.phases: dict[str, float] = {}
        self.notes: list[str] = []
        self._started = self._phase_started = time.monotonic()
        self._signal: int | None = None
        self._handlers: dict[int, Any] = {}
        self._probe: Probe | None = None
        self._ended: set[str] = set()
        self._folder: Path | None = None
        """The model folder, once it is known."""
        self._stopped: list[str] = []
        self._committed: int | None = None
        """Versions in the store once nobody writes any more; None when it could not be read."""
        self.ports = Ports(engines)
        self.children = Children(self.places.logs)
        self.children.tell_janitor("remove", str(self.places.runtime))
        if self.places.temporary:
            self.children.tell_janitor("remove", str(self.places.run))

    # -- the run

    def run(self) -> reports.DemoReport:
        """From nothing to the report."""
        folder = self._resolve_model()
        self._start_processes(folder)
        self._phase("train")
        self._wait(lambda: "trainer" in self._ended, "the trainer to end", timeout=None)
        if not self.board.trainer_done:
            raise self.children.failure(ChildExit("trainer", 0))
        self._phase("settle")
        self._wait(lambda: self.board.settled, "every engine to serve the newest version", timeout=120.0)
        self._audit(folder)
        self._phase("stop")
        kept = None if self.places.temporary else self.places.run
        seconds = time.monotonic() - self._started
        return reports.build(self.board, seconds=seconds, phases=self.phases, folder=kept)

    def _resolve_model(self) -> Path:
        self._phase("model")
        self._start("model", "weightline.demo.resolve", self.model, model_cache(), threads=_cores())
        self._wait(lambda: "model" in self._ended, "the model folder", timeout=900.0)
        if self._folder is None:
            raise self.children.failure(ChildExit("model", 0))
        return self._folder

    def _start_processes(self, model: Path) -> None:
        """Server and engines at once; the trainer when there is a server; each follower when its engine is
        up.
        """
        self._phase("processes")
        listen, runtime = f"unix:{self.places.socket}", self.places.runtime
        self._start(
            "server", "weightline", "serve", self.places.store, "--listen", listen, "--runtime-dir", runtime
        )
        for name in self.board.engines:
            # The key-value cache is reserved for so many positions; the demo's requests are far shorter.
            limit = ("--max-model-len", MAX_MODEL_LEN)
            self._start(name, "weightline", "engine", model, "--port", self._port(name), *limit)
        self._await_ready("server")
        addresses = {name: self._url(name) for name in self.board.engines}
        self._probe = Probe(self.children.inbox, self.url, addresses)
        config = self._trainer_config(model)
        self._start("trainer", "weightline.demo.trainer", "--config", config, threads=self._threads)
        for name, url in addresses.items():
            self._await_ready(name)
            where = ("--engine", f"embedded={url}", "--id", name, "--runtime-dir", runtime / name)
            self._start(_follower(name), "weightline", "follow", self.url, *where)
        self._wait(lambda: self.board.newest is not None, "the first version", timeout=600.0)

    def _await_ready(self, name: str) -> None:
        self._wait(lambda: self._ready(name), f"{name} to be ready", timeout=300.0)

    def _trainer_config(self, model: Path) -> Path:
        from weightline.demo.trainer import default_config

        config = msgspec.structs.replace(
            default_config(self.model),
            store=self.url,
            engines=tuple(self._url(name) for name in self.board.engines),
            model=str(model),
            rollouts=str(self.rollouts),
        )
        if self.steps is not None:
            config = msgspec.structs.replace(config, steps=self.steps)
        self.board.planned_steps = config.steps
        path = self.places.run / "trainer.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(config)))
        return path

    def _audit(self, model: Path) -> None:
        self._phase("audit")
        sample = ("--requests", AUDITED_REQUESTS)
        self._start(
            "audit", "weightline.audit", self.url, model, self.rollouts, *sample, threads=self._threads
        )
        # Its last event is all we need; torch takes seconds to leave a process.
        self._wait(
            lambda: self.board.audit.outcome is not None or "audit" in self._ended,
            "the replay",
            timeout=900.0,
        )
        if self.board.audit.outcome is None:
            raise self.children.failure(ChildExit("audit", 0))

    # -- names and addresses

    @property
    def url(self) -> str:
        """The server's address."""
        return f"unix://{self.places.socket}"

    @property
    def rollouts(self) -> Path:
        """The rollout file."""
        return self.places.run / "rollouts.jsonl"

    @property
    def _threads(self) -> int:
        """Of the trainer and of the replay. A model as small as the tiny one gains nothing from a second
        thread, and on busy cores two threads that wait for each other lose a lot.
        """
        return 1 if self.model == "tiny" else _cores()

    def _port(self, engine: str) -> int:
        return self.ports.numbers[list(self.board.engines).index(engine)]

    def _url(self, engine: str) -> str:
        return f"http://127.0.0.1:{self._port(engine)}"

    # -- waiting

    def _phase(self, name: str) -> None:
        now = time.monotonic()
        self.phases[self.board.phase] = self.phases.get(self.board.phase, 0.0) + now - self._phase_started
        self._phase_started, self.board.phase = now, name
        self.view.update(now=True)

    def _start(self, name: str, module: str, *arguments: object, threads: int = 1) -> None:
        """Run `python -m MODULE ARGUMENTS...` as a child; commands of ours are asked for events."""
        command = ["-m", module, *map(str, arguments), *(["--json"] if module == "weightline" else [])]
        env = {f"{library}_NUM_THREADS": str(threads) for library in ("OMP", "MKL", "OPENBLAS", "NUMBA")}
        # More threads than cores: one that spins while it waits takes the core from one that works.
        env["OMP_WAIT_POLICY"] = "PASSIVE"
        # torch makes this folder, and leaves it there.
        env["TORCHINDUCTOR_CACHE_DIR"] = str(self.places.runtime / "torch")
        self.children.start(name, command, env=env)
        self.board.parts[name] = "starting"

    def _ready(self, name: str) -> bool:
        return self.board.parts.get(name) in ("ready", "done")

    def _wait(self, done: Callable[[], bool], what: str, *, timeout: float | None) -> None:
        """Take in whatever comes until `done`; every failure of a child and every signal ends the wait at
        once.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not done():
            if self._signal is not None:
                raise Stopped(self._signal)
            if deadline is not None and time.monotonic() > deadline:
                raise Unavailable(
                    f"waited {timeout:.0f} s for {what} in vain", hint=f"the logs are in {self.places.logs}"
                )
            self._take(0.1)
            self.view.update()

    def _take(self, timeout: float) -> None:
        import queue

        try:
            item = self.children.inbox.get(timeout=timeout)
            while True:
                self._see(item)
                item = self.children.inbox.get_nowait()
        except queue.Empty:
            return

    def _see(self, item: Any) -> None:
        match item:
            case LineSeen():
                self.board.see_line(item)
            case EngineSeen():
                self.board.see_engine(item)
            case MemorySeen(rss=rss):
                self.board.peak_rss = max(self.board.peak_rss, rss)
            case ChildExit(child=child, code=code):
                if self.children[child].stopping:
                    return
                if child not in _FINISHING or code != 0:
                    raise self.children.failure(item)
                self._ended.add(child)
                self.board.parts[child] = "done"
            case ChildEvent(child=child, fields=fields):
                self._see_event(child, fields)

    def _see_event(self, child: str, event: dict[str, Any]) -> None:
        if event["event"] == "error" and child == "model":
            raise from_dict({k: v for k, v in event.items() if k != "event"})
        if event["event"] == "model" and child == "model":
            self._folder = Path(event["folder"])
        elif child == "trainer":
            self.board.parts[child] = "ready"
            self.board.see_trainer(event)
        elif child == "audit":
            self.board.see_audit(event)
        elif child.startswith("follower-"):
            self.board.parts[child] = "ready"
            self.board.see_follower(child.replace("follower-", "engine-", 1), event)
        elif event["event"] == "ready":
            self.board.parts[child] = "ready"

    # -- the end

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._handlers[number] = signal.signal(number, self._on_signal)
        self.view.__enter__()
        return self

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._signal is not None:  # the second time: no more patience
            for child in self.children:
                child.signal(signal.SIGKILL)
        self._signal = number

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.board.phase = "stop"
            self.view.__exit__(kind, error, trace)
            self._stop_children(hurry=error is not None)
            if isinstance(error, Stopped):
                self._committed = committed_in(self.places.store)
        finally:
            failed = isinstance(error, WeightlineError) or (
                error is not None and not isinstance(error, Stopped)
            )
            if failed and self.places.temporary:
                self.children.tell_janitor("keep", str(self.places.run))
            self.children.close()
            self.ports.close()
            self.places.remove(keep_logs=failed)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def _stop_children(self, *, hurry: bool) -> None:
        """Those that use others first, so that nobody is left talking to a door that is gone; in a hurry, all
        at once.
        """
        self._stopped = [c.name for c in self.children if c.running]
        if self._probe is not None:
            self._probe.stop()
        engines = list(self.board.engines)
        followers = [_follower(name) for name in engines]
        groups = [["model", "audit", "trainer", *followers], engines, ["server"]]
        if hurry:
            groups = [[name for group in groups for name in group]]
        for group in groups:
            self.notes += self.children.stop(*group, grace=3.0 if hurry else 5.0)
        if self._probe is not None:
            self._probe.join()

    def account(self, stopped: Stopped) -> str:
        """What was done when a signal ended the demo, for people."""
        where = (
            "its temporary folder is removed"
            if self.places.temporary
            else f"the run is kept in {self.places.run}"
        )
        seen = len(self.board.records)
        committed = seen if self._committed is None else self._committed
        done = f"{committed} versions committed, {len(self.board.steps)} steps done"
        processes = ", ".join(self._stopped) or "nothing was running"
        notes = "".join(f"\n{note}" for note in self.notes)
        return f"{stopped}: stopped {processes}\n{done}; {where}{notes}"


def committed_in(store: Path) -> int | None:
    """Versions that the log of the store holds, also those that the demo did not hear of before it stopped;
    None when there is no store yet or it cannot be read.
    """
    from weightline.store import Store

    try:
        opened = Store.open(store)
    except WeightlineError:
        return None
    try:
        return len(opened.versions())
    finally:
        opened.close()


def _follower(engine: str) -> str:
    return engine.replace("engine-", "follower-", 1)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
