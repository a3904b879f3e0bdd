"""Commands that prove: conform."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from weightline.cli.app import command
from weightline.cli.arguments import JsonOption
from weightline.cli.output import print_json, say


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


def _progress(what: str, done: int, total: int) -> None:
    text = f"{what}: {done} of {total}" if total > 1 else what
    if sys.stderr.isatty():
        typer.echo(f"\r{text:<60}", nl=False, err=True)
    elif total == 1 or done >= total:
        typer.echo(text, err=True)
