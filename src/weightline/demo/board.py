"""What is known of a running demo: fed with events and answers of public interfaces, read by the view and the
report.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from weightline.types import VersionRecord


class LineSeen(Struct, frozen=True):
    """What the server answered to `versions()`."""

    records: tuple[VersionRecord, ...]


class EngineSeen(Struct, frozen=True):
    """What an engine answered to `/weight_info` and `/is_paused`."""

    engine: str
    label: str
    paused: bool


class MemorySeen(Struct, frozen=True):
    """Resident bytes of the demo and all its children, summed; shared pages count once a process."""

    rss: int


@dataclass
class EngineState:
    """One engine and its follower."""

    label: str = ""
    version: int | None = None
    refits: int = 0
    last_pause_ms: float | None = None
    max_pause_ms: float | None = None
    paused: bool = False
    refused: int = 0
    """Refits that did not go through; each is tried again."""
    trouble: str = ""
    """Why the last of them did not."""


@dataclass
class StepState:
    """One optimizer step, as the trainer tells it."""

    step: int
    reward_mean: float
    reward_std: float
    groups: int = 0
    loss: float = 0.0
    staleness: float = 0.0
    tokens: int = 0
    mixed: int = 0


@dataclass
class AuditState:
    """Progress of the replay, and its outcome."""

    requests: int = 0
    tokens: int = 0
    outcome: dict[str, Any] | None = None


@dataclass
class Board:
    """The state of a demo. `apply` takes what comes out of the inbox; nothing here does I/O."""

    model: str = ""
    phase: str = "start"
    parts: dict[str, str] = field(default_factory=dict)
    """Process -> "starting", "ready", "done": the progress of the start-up."""
    planned_steps: int | None = None
    records: dict[int, VersionRecord] = field(default_factory=dict)
    blocked_ms: dict[int, float] = field(default_factory=dict)
    commit_ms: dict[int, float] = field(default_factory=dict)
    engines: dict[str, EngineState] = field(default_factory=dict)
    steps: list[StepState] = field(default_factory=list)
    rollouts: dict[str, int] = field(
        default_factory=lambda: {"requests": 0, "tokens": 0, "dropped": 0, "mixed": 0}
    )
    trainer_done: bool = False
    final: int | None = None
    """The last version that the trainer committed, as it said when it was done."""
    audit: AuditState = field(default_factory=AuditState)
    peak_rss: int = 0

    @property
    def newest(self) -> int | None:
        """The newest committed version."""
        return max(self.records, default=None)

    @property
    def settled(self) -> bool:
        """Every engine says the newest version's label, and the server has the follower's ack for it."""
        if self.newest is None or self.newest < (self.final or 0):
            return False  # what we know of the line is older than the end of the training
        record = self.records[self.newest]
        acked = {a.subscriber for a in record.acks}
        return all(state.label == record.label and name in acked for name, state in self.engines.items())

    def see_line(self, seen: LineSeen) -> None:
        """Take over the server's answer."""
        self.records = {r.version: r for r in seen.records}

    def see_engine(self, seen: EngineSeen) -> None:
        """Take over an engine's answer; its version is the one that the line gave that label."""
        state = self.engines[seen.engine]
        state.label, state.paused = seen.label, seen.paused
        state.version = next((r.version for r in self.records.values() if r.label == seen.label), None)

    def see_trainer(self, event: dict[str, Any]) -> None:
        """Take over an event of the trainer."""
        match event["event"]:
            case "version":
                self.blocked_ms[event["version"]] = float(event.get("blocked_ms") or 0.0)
                self.commit_ms[event["version"]] = float(event.get("commit_ms") or 0.0)
            case "step":
                known = {k: event[k] for k in StepState.__dataclass_fields__ if event.get(k) is not None}
                self.steps.append(StepState(**known))
            case "rollouts":
                self.rollouts.update({k: int(event[k]) for k in self.rollouts if k in event})
            case "done":
                self.trainer_done = True
                self.final = event.get("version")
            case _:
                pass  # events that we do not show are in the log

    def see_follower(self, engine: str, event: dict[str, Any]) -> None:
        """Take over an event of an engine's follower."""
        state = self.engines[engine]
        if event["event"] == "refused":
            state.refused += 1
            state.trouble = str((event.get("error") or {}).get("message", ""))
        if event["event"] != "refit":
            return
        state.refits += 1
        if event.get("label"):
            state.label, state.version = str(event["label"]), event.get("version")
        pause = event.get("pause_ms")
        if pause is not None:
            state.last_pause_ms = float(pause)
            state.max_pause_ms = max(state.max_pause_ms or 0.0, float(pause))

    def see_audit(self, event: dict[str, Any]) -> None:
        """Take over an event of the replay."""
        if event["event"] == "replayed":
            self.audit.requests, self.audit.tokens = int(event["requests"]), int(event["tokens"])
        elif event["event"] == "audit":
            self.audit.outcome = event

    def bytes_stored(self) -> dict[str, int | float]:
        """`full`, `delta_total` and `ratio` as `report.Bytes` defines them (zeros when nothing was
        committed).
        """
        records = [self.records[v] for v in sorted(self.records)]
        full = sum(r.raw_nbytes for r in records)
        delta = sum(r.nbytes for r in records[1:])
        later = sum(r.raw_nbytes for r in records[1:])
        return {
            "full": full,
            "delta_total": delta,
            "ratio": full / delta if delta else 0.0,
            "first": records[0].nbytes if records else 0,
            "ratio_after_first": later / delta if delta else 0.0,
        }
