"""What a demo run amounted to: the record behind `weightline demo --json`, and its summary for people."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from weightline.audit import Control
from weightline.demo.board import Board


class EngineLine(Struct, frozen=True):
    """One rollout engine at the end."""

    id: str
    version: int | None
    """The version it serves; None when it serves none that the line knows."""
    refits: int
    max_pause_ms: float | None
    """Longest time that it was paused for a version, in milliseconds."""
    refused: int = 0
    """Refits that did not go through and were tried again."""


class Rollouts(Struct, frozen=True):
    """What the trainer fetched from the engines."""

    requests: int
    tokens: int
    """Output tokens."""
    dropped: int
    """Requests that an engine did not finish."""
    mixed: int
    """Requests whose tokens were sampled by more than one version."""


class Bytes(Struct, frozen=True):
    """Bytes of weights, manifests and attachments apart."""

    full: int
    """Sum of the raw weights of all versions: what shipping each in full would take."""
    delta_total: int
    """Bytes stored for them, anchors but the first included."""
    ratio: float
    """full / delta_total."""
    first: int
    """Bytes of the first version, which has to be shipped whole in any scheme."""
    ratio_after_first: float
    """The same ratio over the versions after the first only: like for like."""


class Audit(Struct, frozen=True):
    """Outcome of the replay of a sample of the rollouts."""

    tokens_checked: int
    mixed_requests_checked: int
    mismatches: int
    requests_checked: int = 0
    ties: int = 0
    """Tokens whose logit is below the top one by no more than `tie_margin`."""
    max_tie_gap: float = 0.0
    tie_margin: float = 0.0
    max_logprob_error: float | None = None
    """Largest difference between a recorded and a replayed log-probability."""
    logprob_outliers: int = 0
    control: Control | None = None
    """The same replay with the labels of mixed requests exchanged, so known to be wrong: what a lie would
    look like.
    """


class DemoReport(Struct, frozen=True, kw_only=True):
    """Everything `weightline demo --json` prints."""

    model: str
    versions: list[int]
    engines: list[EngineLine]
    rollouts: Rollouts
    bytes: Bytes
    audit: Audit
    reward: list[float]
    """Mean reward, one a step."""
    changed_fraction: list[float]
    """Changed elements / elements, for each version after the first."""
    reward_variance: list[float]
    """Variance of the rewards, one a step."""
    steps_with_variance: int
    staleness: list[float]
    """Mean distance, in versions, between the weights that sampled a step's tokens and those that trained on
    them.
    """
    blocked_ms: list[float]
    """How long each commit held up the training loop."""
    commit_ms: list[float]
    seconds: float
    """From start to end, model preparation included."""
    phase_seconds: dict[str, float]
    peak_rss: int
    """Largest sum of the resident bytes of all processes; pages that they share count once a process."""
    dir: str | None
    """Where the run is kept; None when it was temporary."""


def build(board: Board, *, seconds: float, phases: dict[str, float], folder: Path | None) -> DemoReport:
    """The report of what `board` has seen."""
    versions = sorted(board.records)
    return DemoReport(
        model=board.model,
        versions=versions,
        engines=[
            EngineLine(
                id=name,
                version=e.version,
                refits=e.refits,
                max_pause_ms=e.max_pause_ms,
                refused=e.refused,
            )
            for name, e in board.engines.items()
        ],
        rollouts=Rollouts(**board.rollouts),
        bytes=Bytes(**board.bytes_stored()),  # type: ignore[arg-type]
        audit=msgspec.convert(
            {
                "tokens_checked": 0,
                "mixed_requests_checked": 0,
                "mismatches": 0,
                **(board.audit.outcome or {}),
            },
            Audit,
        ),
        reward=[s.reward_mean for s in board.steps],
        changed_fraction=[
            board.records[v].changed / board.records[v].elements if board.records[v].elements else 0.0
            for v in versions[1:]
        ],
        reward_variance=[s.reward_std**2 for s in board.steps],
        steps_with_variance=sum(s.reward_std > 0 for s in board.steps),
        staleness=[s.staleness for s in board.steps],
        blocked_ms=[board.blocked_ms[v] for v in sorted(board.blocked_ms)],
        commit_ms=[board.commit_ms[v] for v in sorted(board.commit_ms)],
        seconds=round(seconds, 3),
        phase_seconds={k: round(v, 3) for k, v in phases.items()},
        peak_rss=board.peak_rss,
        dir=str(folder) if folder else None,
    )


def human_bytes(count: float) -> str:
    """`count` bytes with three digits and a unit of 1000."""
    for unit in ("B", "kB", "MB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def milliseconds(value: float | None) -> str:
    """A duration in milliseconds, or a dash."""
    return "–" if value is None else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def summary(report: DemoReport) -> RenderableType:
    """What happened, in a few lines, and what to look at next."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column()
    first, last = (report.reward[0], report.reward[-1]) if report.reward else (0.0, 0.0)
    rows.add_row(
        "training",
        f"{len(report.reward)} steps, reward {first:.3f} → {last:.3f}, "
        f"{report.steps_with_variance} of them with reward variance",
    )
    rows.add_row("versions", _versions_line(report))
    for engine in report.engines:
        rows.add_row(
            engine.id,
            f"serves version {engine.version}, {engine.refits} refits, "
            f"longest pause {milliseconds(engine.max_pause_ms)}"
            + (f", {engine.refused} refits were tried again" if engine.refused else ""),
        )
    r = report.rollouts
    rows.add_row(
        "rollouts", f"{r.requests} requests, {r.tokens} tokens, {r.mixed} mixed, {r.dropped} dropped"
    )
    rows.add_row("labels", _audit_line(report.audit))
    if (control := _control_line(report.audit)) is not None:
        rows.add_row("", control)
    rows.add_row("cost", f"{report.seconds:.0f} s, {human_bytes(report.peak_rss)} resident at most")
    return Group(Text("weightline demo: done", style="bold green"), rows, Text(), *_next(report))


def _versions_line(report: DemoReport) -> str:
    b = report.bytes
    if len(report.versions) < 2:
        return f"{len(report.versions)}"
    low, high = min(report.changed_fraction), max(report.changed_fraction)
    return (
        f"{report.versions[0]}–{report.versions[-1]}; after the first {human_bytes(b.delta_total)} stored, "
        f"{b.ratio_after_first:.1f} × less than in full; {low:.2%}–{high:.2%} of elements changed a version"
    )


def _audit_line(audit: Audit) -> str:
    verdict = "none is wrong" if audit.mismatches == 0 else f"{audit.mismatches} ARE WRONG"
    ties = f", {audit.ties} ties within {audit.tie_margin:g}" if audit.ties else ""
    return (
        f"{audit.tokens_checked} tokens of {audit.requests_checked} requests replayed "
        f"({audit.mixed_requests_checked} mixed): {verdict}{ties}"
    )


def _control_line(audit: Audit) -> str | None:
    control = audit.control
    if control is None or control.max_logprob_error is None or audit.max_logprob_error is None:
        return None
    return (
        f"replayed log-probabilities are within {audit.max_logprob_error:.1e} of the recorded ones; "
        f"control: with the labels of mixed requests exchanged on purpose, {control.logprob_outliers} of "
        f"{control.tokens} log-probabilities are off, by up to {control.max_logprob_error:.1e}"
    )


def _next(report: DemoReport) -> list[Text]:
    if report.dir is None:
        return [
            Text("next: keep a run to look at:", style="bold"),
            Text("  weightline demo --model tiny --dir ./run", no_wrap=True),
        ]
    store = shlex.quote(str(Path(report.dir) / "store"))
    rollouts = shlex.quote(str(Path(report.dir) / "rollouts.jsonl"))
    newest = report.versions[-1] if report.versions else 1
    return [
        Text("next: look at what was kept:", style="bold"),
        Text(f"  weightline log {store}", no_wrap=True),
        Text(f"  weightline show {store} {newest}", no_wrap=True),
        Text(f"  weightline checkout {store} {newest} ./policy-{newest}", no_wrap=True),
        Text(f"  the rollouts with their labels: {rollouts}", no_wrap=True),
    ]


def print_summary(report: DemoReport, console: Console) -> None:
    """Write the summary to `console`, without cutting paths at the edge."""
    console.print(summary(report), soft_wrap=True)
