"""Board, views and report: from events and answers to the numbers and the words."""

from __future__ import annotations

import io
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from weightline.demo.board import Board, EngineSeen, EngineState, LineSeen
from weightline.demo.report import build, human_bytes, print_summary
from weightline.demo.view import Lines, LiveView, make_view, picture, sparkline
from weightline.types import Ack, VersionRecord


def record(version: int, nbytes: int, changed: int, *acks: str) -> VersionRecord:
    return VersionRecord(
        version=version,
        seq=version,
        parent=version - 1 or None,
        base=version - 1 or None,
        epoch=1,
        step=version,
        label=f"{version}@aa",
        kind="delta" if version > 1 else "anchor",
        nbytes=nbytes,
        raw_nbytes=1000,
        changed=changed,
        elements=500,
        digest="d",
        folder="f",
        committed_at=0.0,
        commit_id=str(version),
        acks=tuple(Ack(subscriber=name, version=version) for name in acks),
    )


def finished_board() -> Board:
    board = Board(model="tiny", planned_steps=2)
    board.engines = {"engine-0": EngineState(), "engine-1": EngineState()}
    board.see_line(
        LineSeen((record(1, 1010, 500), record(2, 40, 5), record(3, 60, 10, "engine-0", "engine-1")))
    )
    for name in board.engines:
        board.see_engine(EngineSeen(name, "3@aa", False))
        for pause in (4.0, 9.5, 7.0):
            board.see_follower(name, {"event": "refit", "version": 1, "pause_ms": pause})
    board.see_follower("engine-0", {"event": "refused", "version": 2, "error": {"message": "no room"}})
    for step, reward in ((1, 0.25), (2, 0.5)):
        board.see_trainer(
            {
                "event": "step",
                "step": step,
                "version": step,
                "reward_mean": reward,
                "reward_std": 0.5 * (step - 1),
                "groups": 4,
                "loss": 0.1,
                "grad_norm": 1.0,
                "staleness": 0.5,
                "tokens": 64,
                "mixed": 1,
            }
        )
        board.see_trainer({"event": "version", "version": step, "blocked_ms": 1.5, "commit_ms": 20.0})
    board.see_trainer({"event": "rollouts", "requests": 10, "tokens": 640, "dropped": 0, "mixed": 3})
    board.see_trainer({"event": "done"})
    board.see_audit({"event": "replayed", "requests": 3, "tokens": 120})
    board.see_audit(
        {
            "event": "audit",
            "tokens_checked": 200,
            "requests_checked": 5,
            "mixed_requests_checked": 2,
            "mismatches": 0,
            "ties": 1,
            "max_tie_gap": 1e-4,
            "tie_margin": 5e-4,
            "by_version": {},
            "max_logprob_error": 1e-5,
            "logprob_outliers": 0,
            "control": {"tokens": 90, "mismatches": 2, "max_logprob_error": 0.0125, "logprob_outliers": 70},
        }
    )
    return board


def printed(make: Any, **options: Any) -> str:
    out = io.StringIO()
    make(Console(file=out, width=120, **options))
    return out.getvalue()


def test_report_has_the_keys_that_checks_read() -> None:
    report = build(finished_board(), seconds=12.0, phases={"train": 9.0}, folder=None)
    document = msgspec.to_builtins(report)
    assert document["versions"] == [1, 2, 3]
    assert document["engines"][0] == {
        "id": "engine-0",
        "version": 3,
        "refits": 3,
        "max_pause_ms": 9.5,
        "refused": 1,
    }
    assert document["rollouts"] == {"requests": 10, "tokens": 640, "dropped": 0, "mixed": 3}
    assert document["bytes"]["full"] == 3000
    assert document["bytes"]["delta_total"] == 100
    assert document["bytes"]["ratio"] == 30.0
    assert document["bytes"]["ratio_after_first"] == 20.0
    assert document["audit"]["tokens_checked"] == 200
    assert document["audit"]["mixed_requests_checked"] == 2
    assert document["audit"]["mismatches"] == 0
    assert document["reward"] == [0.25, 0.5]
    assert document["changed_fraction"] == [0.01, 0.02]
    assert document["steps_with_variance"] == 1


def test_settled_needs_label_and_ack_of_the_newest_version_from_every_engine() -> None:
    board = finished_board()
    assert board.settled
    board.see_engine(EngineSeen("engine-1", "2@aa", False))
    assert not board.settled
    board.see_engine(EngineSeen("engine-1", "3@aa", False))
    board.see_line(LineSeen((*board.records.values(), record(4, 10, 1, "engine-0"))))
    assert not board.settled
    assert not Board().settled


def test_settled_waits_for_news_of_the_last_version() -> None:
    board = finished_board()
    board.see_trainer({"event": "done", "version": 4})
    assert not board.settled


def test_an_unknown_label_is_no_version() -> None:
    board = finished_board()
    board.see_engine(EngineSeen("engine-0", "default", False))
    assert board.engines["engine-0"].version is None


def test_a_board_without_anything_gives_a_report_all_the_same() -> None:
    report = build(Board(), seconds=0.0, phases={}, folder=None)
    assert (report.versions, report.bytes.ratio, report.audit.tokens_checked) == ([], 0.0, 0)
    assert "done" in printed(lambda console: print_summary(report, console))


def test_summary_says_what_happened_and_what_to_look_at_next(tmp_path: Path) -> None:
    board = finished_board()
    temporary = printed(lambda c: print_summary(build(board, seconds=12.0, phases={}, folder=None), c))
    assert "reward 0.250 → 0.500" in temporary
    assert "200 tokens of 5 requests replayed (2 mixed): none is wrong, 1 ties within 0.0005" in temporary
    assert "replayed log-probabilities are within 1.0e-05 of the recorded ones; control:" in temporary
    assert "exchanged on purpose, 70 of 90 log-probabilities are off" in " ".join(temporary.split())
    assert "weightline demo --model tiny --dir" in temporary
    kept = printed(lambda c: print_summary(build(board, seconds=12.0, phases={}, folder=tmp_path), c))
    assert f"weightline log {tmp_path / 'store'}" in kept
    assert board.audit.outcome is not None
    board.audit.outcome["mismatches"] = 2
    wrong = printed(lambda c: print_summary(build(board, seconds=12.0, phases={}, folder=None), c))
    assert "2 ARE WRONG" in wrong


def test_the_next_commands_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    folder = tmp_path / "it's a run; $HOME"
    text = printed(lambda c: print_summary(build(finished_board(), seconds=1.0, phases={}, folder=folder), c))
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("  weightline ")]
    assert [words[1] for words in commands] == ["log", "show", "checkout"]
    assert {words[2] for words in commands} == {str(folder / "store")}


def test_lines_are_said_once_each() -> None:
    board, out = Board(model="tiny"), io.StringIO()
    view = make_view(board, Console(file=out, width=80))
    assert isinstance(view, Lines)
    with view:
        board.phase = "train"
        board.engines = {"engine-0": EngineState()}
        board.see_line(LineSeen((record(1, 1010, 500), record(2, 40, 5))))
        board.see_follower("engine-0", {"event": "refit", "version": 2, "pause_ms": 4.0})
        view.update()
        view.update()
    text = out.getvalue()
    assert text.count("version 2@aa: 40 B of 1 kB, 1.00% of elements changed") == 1
    assert text.count("engine-0: refit 1") == 1


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("phase", ["model", "processes", "train", "audit", "stop"])
def test_the_picture_fits_a_terminal(width: int, phase: str) -> None:
    board = finished_board()
    board.phase, board.parts = phase, {"server": "ready", "engine-0": "starting"}
    text = printed(lambda c: c.print(picture(board, 75.0)))
    assert "1:15" in text
    assert "3@aa" in text
    assert "dropped" in text
    narrow = io.StringIO()
    Console(file=narrow, width=width).print(picture(board, 75.0))
    lines = narrow.getvalue().splitlines()
    assert max(len(line) for line in lines) <= width
    assert len(lines) <= 24


def test_a_terminal_gets_the_live_view_and_keeps_the_last_picture() -> None:
    board, out = finished_board(), io.StringIO()
    console = Console(file=out, width=100, height=30, force_terminal=True)
    view = make_view(board, console)
    assert isinstance(view, LiveView)
    with view:
        view.update(now=True)
    assert "engine-1" in out.getvalue()


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert len(sparkline([float(i) for i in range(100)], width=40)) == 40


def test_human_bytes() -> None:
    assert [human_bytes(n) for n in (0, 999, 1500, 269_000_000, 3_200_000_000)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "269 MB",
        "3.2 GB",
    ]
