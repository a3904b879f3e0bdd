"""Commands that prove: audit a rollout file, hold an engine to the conformance suite."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from weightline.cli.app import command
from weightline.cli.arguments import JsonOption, StoreArgument, opened, opened_store
from weightline.cli.output import print_json, say
from weightline.errors import InvalidInput


@command("conform", "Processes", store=False)
def conform(
    engine: Annotated[
        str,
        typer.Argument(
            metavar="KIND=URL", help="The live engine, e.g. vllm=http://127.0.0.1:8000.", show_default=False
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="DIR", help="The folder it was started with; default: it says so."),
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", help="Tokens to check in the marker test.", min=1)
    ] = 100_000,
    swaps: Annotated[int, typer.Option("--swaps", help="Versions to swap in meanwhile.", min=2)] = 200,
    workers: Annotated[int, typer.Option("--workers", help="Requests at once.", min=1)] = 64,
    seed: Annotated[int, typer.Option("--seed", help="The same seed asks the same requests.")] = 0,
    pid: Annotated[
        int | None, typer.Option("--pid", help="Process of the engine: its memory must then stay flat.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Does a live engine label every token with the version that sampled it? Needs the engine for itself.

    Replaces its weights by marker versions through a follower and a store of its own, pauses, aborts and
    disconnects, and checks every token; puts the weights of the model folder back. Exit code 0 only if
    every check holds.

    Example: weightline conform embedded=http://127.0.0.1:8001 --tokens 20000
    """
    from weightline.testing import conformance

    kind, _, url = engine.partition("=")
    options = conformance.Options(tokens=tokens, swaps=swaps, workers=workers, seed=seed, pid=pid)
    report = conformance.run(kind, url, model, options=options, progress=None if json else _progress)
    if json:
        print_json(report)
    else:
        for check in report.checks:
            verdict, text = ("ok", check.what) if check.ok else ("FAILED", check.evidence)
            say(f"{verdict:<8}{check.id:<44}{text}")
        for what, why in report.not_offered.items():
            say(f"{'-':<8}{what:<44}{why}")
        figures = report.figures
        say(
            f"{len(report.checks)} checks, {len(report.failed)} failed; {figures['tokens']} tokens of "
            f"{figures['requests']} requests under {figures['swaps']} swaps, {figures['wrong']} with a wrong "
            f"label; {figures['seconds']} s"
        )
    if not report.ok:
        raise SystemExit(1)


@command("audit", "Processes")
def audit(
    store: StoreArgument,
    rollouts: Annotated[
        Path, typer.Argument(metavar="ROLLOUTS.jsonl", help="A rollout file.", show_default=False)
    ],
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="DIR", help="Folder with config.json; default: the store's."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", help="Look at so many requests, mixed ones first.", min=1)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Replay a rollout file: prove or refute the label of each greedily sampled token.

    Rebuilds the exact bytes of every version that a label names and samples the tokens again. Exit code 0
    when the labels are proved, 9 when they are refuted, 1 when the replay cannot tell.

    Example: weightline audit ./ckpt rollouts.jsonl --requests 200
    """
    from weightline.audit import replay
    from weightline.audit.verdict import verdict
    from weightline.errors import STATUS

    _need_torch()
    with _config_of(store, model) as folder, opened(store) as line:
        report = replay(line, folder, rollouts, requests=requests, control=True)
    outcome = verdict(report)
    if json:
        document = {"requests": report.requests_checked, **msgspec.to_builtins(report)}
        print_json({**document, "verdict": outcome.word, "why": outcome.why})
    else:
        for miss in report.first_mismatches:
            where = f"request {miss.request_id}, output {miss.choice}, token {miss.token}"
            say(f"{where}, {miss.label}: {miss.reason}")
        for label, tally in report.by_version.items():
            say(f"{label:<20}{tally.tokens} tokens, {tally.mismatches} mismatches, {tally.ties} ties")
        for reason, count in report.unchecked.items():
            say(f"{'not checked':<20}{count} tokens: {reason}")
        say(f"{outcome.word}: {outcome.why} ({report.requests_checked} requests)")
    codes = {"proved": 0, "refuted": STATUS["integrity"].exit_code, "undecided": 1}
    if codes[outcome.word]:
        raise SystemExit(codes[outcome.word])


def _need_torch() -> None:
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        raise InvalidInput(
            "a replay runs the model, and torch or transformers is not installed",
            hint="pip install 'weightline[torch]'",
        )


@contextlib.contextmanager
def _config_of(store: str, model: Path | None) -> Iterator[Path]:
    """A folder with the model's configuration: the one given, or the store's, which anchors may carry."""
    if model is not None:
        yield model
        return
    from weightline.store.checkout import model_files_of

    with opened_store(store) as found, tempfile.TemporaryDirectory(prefix="weightline-audit-") as folder:
        for record in reversed(found.versions()):
            files = [] if record.retired else model_files_of(found.reading, found.state, record.version)
            if any(path.name == "config.json" for path in files):
                for path in files:
                    shutil.copy(path, Path(folder) / path.name)
                yield Path(folder)
                return
    raise InvalidInput(
        f"{store}: no version carries the model's config.json",
        hint="give --model DIR, the folder that the engines were started with (or commit with model_files)",
    )


def _progress(what: str, done: int, total: int) -> None:
    text = f"{what}: {done} of {total}" if total > 1 else what
    if sys.stderr.isatty():
        typer.echo(f"\r{text:<60}", nl=False, err=True)
    elif total == 1 or done >= total:
        typer.echo(text, err=True)
