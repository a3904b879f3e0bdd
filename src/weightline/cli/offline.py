"""Commands that need no store: doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weightline.cli.app import command
from weightline.cli.arguments import JsonOption
from weightline.cli.output import print_json, say


@command("doctor", "Start here", store=False)
def doctor(
    store: Annotated[
        str | None,
        typer.Argument(metavar="[STORE]", help="Where a store is or shall be, folder or URL; default: here."),
    ] = None,
    warm: Annotated[
        bool,
        typer.Option(
            "--warm", help="Compile and cache every kernel now, so that no later step waits for it."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """What is installed, what works on this machine, and what to do next.

    With the URL of an S3 store it is tried out: credentials, put-if-absent, time of a request, clock.

    Example: weightline doctor --warm
    """
    from weightline.cli.diagnosis import diagnose

    findings = diagnose(store or str(Path.cwd()), warm=warm)
    ok = all(f.state != "broken" for f in findings)
    if json:
        print_json({"ok": ok, "findings": findings})
    else:
        for finding in findings:
            say(f"{finding.state:<8}{finding.name:<22}{finding.detail}")
            if finding.hint:
                say(f"{'':<8}hint: {finding.hint}")
    if not ok:
        raise SystemExit(1)
