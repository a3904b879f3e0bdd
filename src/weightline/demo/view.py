"""The demo while it runs: a live picture on a terminal, plain lines elsewhere. Both only read the board."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weightline.demo.board import Board
from weightline.demo.report import human_bytes, milliseconds

_BARS = "▁▂▃▄▅▆▇█"
_MARKS = {"starting": "[yellow]…[/]", "ready": "[green]✓[/]", "done": "[green]✓[/]"}
_REFRESH = 0.2

PHASES = {
    "start": "starting",
    "model": "looking for the model folder (made once; about a minute for SmolLM2)",
    "processes": "starting the processes",
    "train": "training, while the engines go on serving",
    "settle": "waiting until every engine serves the newest version",
    "audit": "replaying a sample of the rollouts: do the labels tell the truth?",
    "stop": "stopping",
}


class View(Protocol):
    """What the supervisor needs of a view."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, *, now: bool = False) -> None:
        """The board may have changed. Cheap when it has not; `now` redraws at once."""
        ...


def make_view(board: Board, console: Console) -> View:
    """A `LiveView` when `console` is a terminal, else `Lines`."""
    return LiveView(board, console) if console.is_terminal else Lines(board, console)


class LiveView:
    """Redraws one picture in place; the last one stays on the screen."""

    def __init__(self, board: Board, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._board, self._clock = board, clock
        self._started = clock()
        self._drawn = float("-inf")
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="ellipsis")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.update(now=True)
        self._live.stop()

    def update(self, *, now: bool = False) -> None:
        """Redraw, a few times a second at most."""
        if now or self._clock() - self._drawn >= _REFRESH:
            self._drawn = self._clock()
            self._live.update(picture(self._board, self._drawn - self._started), refresh=True)


def picture(board: Board, seconds: float) -> RenderableType:
    """The whole state as one renderable of about fifteen lines."""
    head = Text.assemble(
        ("weightline demo ", "bold"),
        f"· {board.model} · {int(seconds) // 60}:{int(seconds) % 60:02d} · ",
        (PHASES.get(board.phase, board.phase), "cyan"),
    )
    parts = "  ".join(f"{name} {_MARKS.get(state, state)}" for name, state in board.parts.items())
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    if board.phase in ("start", "model", "processes"):
        grid.add_row("start-up", Text.from_markup(parts or "…"))
    if board.records:
        grid.add_row("versions", _versions(board))
    if board.steps:
        grid.add_row("reward", _reward(board))
        grid.add_row("staleness", f"{board.steps[-1].staleness:.2f} versions, mean of the last step's tokens")
    if board.rollouts["requests"]:
        r = board.rollouts
        dropped = f"[red]{r['dropped']} dropped[/]" if r["dropped"] else "0 dropped"
        grid.add_row(
            "rollouts",
            Text.from_markup(
                f"{r['requests']} requests, {r['tokens']} tokens, {r['mixed']} mixed, {dropped}"
            ),
        )
    if board.phase == "audit" or board.audit.outcome:
        grid.add_row("audit", _audit(board))
    return Group(head, grid, *([_engines(board)] if board.records else []))


def _versions(board: Board) -> str:
    b, newest = board.bytes_stored(), board.records[max(board.records)]
    if len(board.records) == 1:
        return f"{newest.label}, {human_bytes(newest.raw_nbytes)} in full"
    changed = newest.changed / newest.elements if newest.elements else 0.0
    size = f"{human_bytes(newest.nbytes)} of {human_bytes(newest.raw_nbytes)}"
    return (
        f"{len(board.records)}, newest {newest.label}: {size}, {changed:.2%} of elements changed; "
        f"{b['ratio_after_first']:.1f} × less than in full so far"
    )


def _reward(board: Board) -> str:
    last = board.steps[-1]
    of = f" of {board.planned_steps}" if board.planned_steps else ""
    line = sparkline([s.reward_mean for s in board.steps])
    return f"{line} {last.reward_mean:.3f} ± {last.reward_std:.3f}, step {len(board.steps)}{of}"


def _audit(board: Board) -> Text:
    outcome = board.audit.outcome
    if outcome is None:
        return Text(f"{board.audit.requests} requests, {board.audit.tokens} tokens replayed …")
    wrong = int(outcome.get("mismatches", 0))
    style = "green" if wrong == 0 else "bold red"
    return Text(f"{outcome.get('tokens_checked')} tokens replayed, {wrong} wrong labels", style=style)


def _engines(board: Board) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column, justify in (
        ("engine", "left"),
        ("serves", "left"),
        ("refits", "right"),
        ("last pause", "right"),
        ("longest", "right"),
    ):
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for name, e in board.engines.items():
        label = f"{e.label or '–'}{' (paused)' if e.paused else ''}"
        behind = e.version != board.newest
        table.add_row(
            name,
            Text(label, style="yellow" if behind else "green"),
            f"{e.refits} ({e.refused} refused)" if e.refused else str(e.refits),
            milliseconds(e.last_pause_ms),
            milliseconds(e.max_pause_ms),
        )
    return table


def sparkline(values: list[float], width: int = 40) -> str:
    """The last `width` values as bars between their smallest and largest; equal values are low bars."""
    shown = values[-width:]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((v - low) * scale)] for v in shown)


class Lines:
    """One line of text for each thing that happens: for logs and pipes."""

    def __init__(self, board: Board, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._board, self._console, self._clock = board, console, clock
        self._started = clock()
        self._phase = ""
        self._parts: dict[str, str] = {}
        self._versions: set[int] = set()
        self._steps = 0
        self._refits: dict[str, int] = {}
        self._refused: dict[str, int] = {}
        self._audited = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.update()

    def _say(self, text: str) -> None:
        # Plain print: rich would wrap and colour what a log should keep as it is.
        self._console.print(
            f"[{self._clock() - self._started:6.1f} s] {text}", markup=False, highlight=False, soft_wrap=True
        )

    def update(self, *, now: bool = False) -> None:
        """Say what is new on the board."""
        del now  # lines are never late
        board = self._board
        if board.phase != self._phase:
            self._phase = board.phase
            self._say(PHASES.get(board.phase, board.phase))
        for name, state in board.parts.items():
            if self._parts.get(name) != state:
                self._parts[name] = state
                self._say(f"{name}: {state}")
        for version in sorted(board.records.keys() - self._versions):
            self._versions.add(version)
            record = board.records[version]
            changed = record.changed / record.elements if record.elements else 0.0
            self._say(
                f"version {record.label}: {human_bytes(record.nbytes)} of {human_bytes(record.raw_nbytes)}, "
                f"{changed:.2%} of elements changed"
            )
        for name, engine in board.engines.items():
            if engine.refits > self._refits.get(name, 0):
                self._refits[name] = engine.refits
                self._say(
                    f"{name}: refit {engine.refits}, serves {engine.label or '?'}, "
                    f"pause {milliseconds(engine.last_pause_ms)}"
                )
            if engine.refused > self._refused.get(name, 0):
                self._refused[name] = engine.refused
                self._say(f"{name}: refit refused, will be tried again: {engine.trouble}")
        for step in board.steps[self._steps :]:
            self._say(
                f"step {step.step}: reward {step.reward_mean:.3f} ± {step.reward_std:.3f}, "
                f"loss {step.loss:.4f}, staleness {step.staleness:.2f}, {step.tokens} tokens, "
                f"{step.mixed} mixed requests"
            )
        self._steps = len(board.steps)
        if board.audit.outcome is not None and not self._audited:
            self._audited = True
            self._say(f"audit: {_audit(board).plain}")
