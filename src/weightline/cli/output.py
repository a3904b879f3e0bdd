"""What commands print: one JSON document with `--json`, else tables for people; errors go to stderr."""

from __future__ import annotations

import sys
import time
from typing import Any, NoReturn

import msgspec
import typer

from weightline.errors import WeightlineError


def fail(error: WeightlineError) -> NoReturn:
    """One readable line and a hint on stderr, then the exit code of the error's kind."""
    typer.echo(f"error: {error.message}", err=True)
    if error.hint:
        typer.echo(f"hint: {error.hint}", err=True)
    raise SystemExit(error.status.exit_code)


def print_json(document: Any) -> None:
    """`document` (structs, dicts, lists) as one JSON document on stdout."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document)).decode() + "\n")
    sys.stdout.flush()


def print_event(event: Any) -> None:
    """`event` as one line of JSON on stdout, at once: the form of long-running commands with `--json`."""
    sys.stdout.write(msgspec.json.encode(event).decode() + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """A line for a person."""
    typer.echo(text)


def table(columns: list[str], rows: list[list[str]]) -> None:
    """Left-aligned columns without frames, so that the output stays greppable."""
    widths = [max(len(r[i]) for r in [columns, *rows]) for i in range(len(columns))]
    for row in [columns, *rows]:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def human_bytes(count: int | float) -> str:
    """`count` bytes in the largest unit that leaves a digit before the point; 1 kB is 1000 bytes."""
    value = float(count)
    if value < 1000:
        return f"{value:.0f} B"
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 1000:
            return f"{value:.2f} {unit}"
    return f"{value / 1000:.2f} TB"


def human_time(seconds_since_epoch: float) -> str:
    """A point in time in the local zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds_since_epoch))
