"""Commands that read a store: log, show, checkout, verify."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from weightline.cli.app import command
from weightline.cli.arguments import JsonOption, StoreArgument, opened, opened_store
from weightline.cli.output import human_bytes, human_time, print_json, say, table
from weightline.types import VersionRecord

if TYPE_CHECKING:
    from weightline.store import TraceEvent

VersionArgument = Annotated[
    int, typer.Argument(metavar="VERSION", help="Number of the version.", show_default=False)
]


def _marks(record: VersionRecord) -> str:
    names = ("yanked", "abandoned", "retired")
    return ",".join(name for name in names if getattr(record, name)) or "-"


def _ratio(record: VersionRecord) -> str:
    return f"{record.raw_nbytes / record.nbytes:.1f}x" if record.nbytes else "-"


@command("log", "History")
def log(
    store: StoreArgument,
    limit: Annotated[
        int, typer.Option("--limit", "-n", help="Newest versions to print; 0 for all.", min=0)
    ] = 0,
    json: JsonOption = False,
) -> None:
    """The history of a store, newest first: versions, bytes, lineage, and who serves what.

    Example: weightline log ./ckpt -n 10
    """
    with opened(store) as line:
        records = list(reversed(line.versions()))
        run = line.run
    if limit:
        records = records[:limit]
    if json:
        print_json({"run": run, "versions": records})
        return
    if not records:
        say(f"run {run}: no versions yet")
        return
    say(f"run {run}")
    table(
        [
            "version",
            "label",
            "kind",
            "parent",
            "step",
            "bytes",
            "vs full",
            "changed",
            "served by",
            "marks",
            "committed",
        ],
        [
            [
                str(r.version),
                r.label,
                r.kind,
                "-" if r.parent is None else str(r.parent),
                "-" if r.step is None else str(r.step),
                human_bytes(r.nbytes),
                _ratio(r),
                f"{r.changed / r.elements:.3%}" if r.elements else "-",
                ",".join(a.subscriber for a in r.acks) or "-",
                _marks(r),
                human_time(r.committed_at),
            ]
            for r in records
        ],
    )


@command("show", "History")
def show(store: StoreArgument, version: VersionArgument, json: JsonOption = False) -> None:
    """One version: its record, tensors with digests, attachments and acknowledgements.

    Example: weightline show ./ckpt 7
    """
    with opened(store) as line:
        record = line.record(version)
        manifest = None if record.retired else line.manifest(version)
    if json:
        print_json({"record": record, "manifest": manifest})
        return
    facts = [
        ("version", f"{record.version}  (entry {record.seq}, epoch {record.epoch})"),
        ("label", record.label),
        ("kind", record.kind),
        ("parent, base", f"{record.parent}, {record.base}"),
        ("step", str(record.step)),
        ("committed", human_time(record.committed_at)),
        (
            "stored",
            f"{human_bytes(record.nbytes)} for {human_bytes(record.raw_nbytes)} raw ({_ratio(record)})",
        ),
        ("changed", f"{record.changed} of {record.elements} elements against its base"),
        ("digest", record.digest),
        ("folder", record.folder),
        ("commit id", record.commit_id),
        ("attachments", ", ".join(record.attachments) or "-"),
        ("marks", _marks(record)),
    ]
    for name, value in facts:
        say(f"{name:<14}{value}")
    for ack in record.acks:
        pause = "" if ack.pause_ms is None else f", paused {ack.pause_ms:.1f} ms"
        say(f"{'served by':<14}{ack.subscriber} since {human_time(ack.at)}, verified {ack.verified}{pause}")
    if manifest is not None:
        say(f"{'tensors':<14}{len(manifest.tensors)}")
        for entry in manifest.tensors:
            say(f"  {entry.spec.name}  {entry.spec.dtype} {list(entry.spec.shape)}  {entry.digest}")


@command("checkout", "History")
def checkout(
    store: StoreArgument,
    version: VersionArgument,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder to make; must not exist.", show_default=False)
    ],
    json: JsonOption = False,
) -> None:
    """Write a version, bit-exact, as a Hugging Face folder that from_pretrained and engines open as it is.

    Example: weightline checkout ./ckpt 7 ./policy-7
    """
    with opened_store(store) as found:
        record = found.record(version)
        found.checkout(version, out)
    if json:
        print_json({"version": version, "label": record.label, "path": str(out), "digest": record.digest})
    else:
        say(f"version {version} ({record.label}) written to {out}")


class _Step(msgspec.Struct, frozen=True):
    """One step of a version; `subscriber` is empty for the trainer's."""

    subscriber: str
    stage: str
    at: float
    ms: float
    """Since the step before, of the same subscriber (its first: since the trainer's last)."""
    total_ms: float
    """Since the commit was asked for."""


def _steps(events: list[TraceEvent]) -> list[_Step]:
    began = min((event.at for event in events), default=0.0)
    last: dict[str, float] = {}
    steps = []
    for event in sorted(events, key=lambda event: (event.subscriber, event.at)):
        before = last.get(event.subscriber, last.get("", event.at))
        last[event.subscriber] = event.at
        ms, total = (round(1e3 * (event.at - since), 3) for since in (before, began))
        steps.append(_Step(event.subscriber, event.stage, event.at, ms, total))
    return steps


@command("trace", "History")
def trace(store: StoreArgument, version: VersionArgument, json: JsonOption = False) -> None:
    """The way of one version from its commit to each engine, and how long each step took.

    Example: weightline trace ./ckpt 7
    """
    with opened_store(store) as found:
        record = found.record(version)
        steps = _steps(found.events(version))
    slowest = max(steps, key=lambda step: step.ms, default=None)
    if json:
        print_json({"version": version, "label": record.label, "steps": steps, "slowest": slowest})
        return
    if slowest is None:
        say(f"version {version}: no trace is kept (older than the newest 1000, or the catalogue was rebuilt)")
        return
    table(
        ["who", "stage", "ms", "since commit, ms"],
        [[s.subscriber or "trainer", s.stage, f"{s.ms:.1f}", f"{s.total_ms:.1f}"] for s in steps],
    )
    say(f"slowest: {slowest.stage} of {slowest.subscriber or 'the trainer'}, {slowest.ms:.1f} ms")


@command("verify", "History")
def verify(
    store: StoreArgument,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also rebuild every version and recompute every tensor's digest.")
    ] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Mend what can be mended, then check.")] = False,
    json: JsonOption = False,
) -> None:
    """Check a store like fsck: every entry, chain and digest. Exit code 0 only if it is whole.

    With --repair, what another copy of the same bytes can mend is mended first: log entries out of the index,
    anchors out of their chains, one half of a mirror out of the other. A half that is lost or replaced is
    given up by that: when it was the one that decides about the log, the other does from then on.

    Example: weightline verify ./ckpt --deep
    """
    from weightline.errors import STATUS

    with opened_store(store) as found:
        repaired = found.repair() if repair else []
        report = found.verify(deep=deep)
    if json:
        print_json({**msgspec.to_builtins(report), "repaired": repaired})
    else:
        for line in repaired:
            say(f"repaired: {line}")
        for problem in report.problems:
            where = "" if problem.version is None else f"version {problem.version}: "
            say(f"{problem.kind}: {where}{problem.path}\n  hint: {problem.hint}")
        for note in report.notes:
            say(f"note: {note.path}\n  {note.hint}")
        say(f"{report.versions} versions, {len(report.problems)} problems" + (": whole" if report.ok else ""))
    if not report.ok:
        raise SystemExit(STATUS["integrity"].exit_code)
