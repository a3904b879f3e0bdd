"""Scripts in `scenarios/`: commands, a line of four dashes, and the trace that they must produce.

`SCENARIOS=rewrite pytest tests/core` writes the traces anew; then read the diff.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ledger_world import World

FOLDER = Path(__file__).parent / "scenarios"


def _blocks(text: str) -> list[tuple[str, list[str], list[str]]]:
    """(comment, commands, expected lines) of each block; blocks are parted by a blank line."""
    blocks = []
    for block in text.strip().split("\n\n"):
        head, _, tail = block.partition("\n----")
        lines = head.split("\n")
        comment = [line for line in lines if line.startswith("#")]
        commands = [line for line in lines if line and not line.startswith("#")]
        blocks.append(("\n".join(comment), commands, tail.strip("\n").split("\n") if tail.strip() else []))
    return blocks


def _play(text: str) -> str:
    world, out = World(), []
    for comment, commands, _ in _blocks(text):
        trace = []
        for command in commands:
            lines = world.run(command)
            many = len(commands) > 1
            trace += [f"> {command}", *(f"  {line}" for line in lines)] if many else lines
        parts = [part for part in (comment, "\n".join(commands)) if part]
        if commands:
            parts += ["----", "\n".join(trace)]
        out.append("\n".join(parts))
    return "\n\n".join(out) + "\n"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    text = path.read_text()
    played = _play(text)
    if os.environ.get("SCENARIOS") == "rewrite":
        path.write_text(played)
    else:
        assert played == text


def test_there_are_scenarios() -> None:
    assert len(list(FOLDER.glob("*.txt"))) >= 20
