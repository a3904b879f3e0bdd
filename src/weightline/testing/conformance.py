"""The conformance suite: does a live engine label every token with the version that sampled it?

`run("embedded", "http://127.0.0.1:8001", model)` runs the acceptance of the span proposal and the
marker-version test on any engine that a follower can drive, and returns a report of named checks. It needs
the engine for itself: it replaces the weights, pauses, aborts, and leaves the engine on the weights of
`model`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from weightline.errors import RefitError, Unavailable
from weightline.testing import acceptance
from weightline.testing.acceptance import Stage
from weightline.testing.client import Client, OutputMode, open_client
from weightline.testing.judge import Tally
from weightline.testing.marker import Kind, MarkerModel, load_folder
from weightline.testing.report import ConformanceReport, Findings
from weightline.testing.stress import Load, Progress, Stress
from weightline.testing.swaps import OWN, Swaps

FLAT = 0.05
"""How much the engine's resident memory may grow over the second half of the swaps, as a share of it."""
FLAT_BYTES = 32 << 20
"""Growth below this is never a finding."""

_COMPLETED = "the engine answers, and takes every version, until the end"


class Options(Struct, frozen=True, kw_only=True):
    """What to run and how much of it."""

    tokens: int = 100_000
    """Tokens of the marker test."""
    swaps: int = 200
    workers: int = 64
    seed: int = 0
    longest: int = 320
    """Tokens of a request that must still run when the pause comes, at most."""
    prefix: int = 272
    """Tokens of the prompts that several requests share: at least two blocks of the engine's prefix cache."""
    pid: int | None = None
    """Process of the engine: then its resident memory (children included) must stay flat."""
    kinds: tuple[Kind, ...] = ("plain", "kv")
    """Marker models of the marker test; tokens and swaps are shared out among them."""
    accept: bool = True
    """Run the acceptance; False: the marker test only."""
    output_modes: tuple[OutputMode, ...] | None = None
    """Ask in these only; None: all that the kind has."""


def run(
    kind: str,
    url: str,
    model: Path | None = None,
    *,
    options: Options | None = None,
    client: Client | None = None,
    progress: Progress | None = None,
) -> ConformanceReport:
    """Run the whole suite on the engine of `kind` at `url`.

    `model`: the Hugging Face folder that the engine was started with (None: the engine names it). `client`:
    an adapter of one's own instead of the kind's. Raises `InvalidInput` (kind, URL, model) and
    `Unavailable` (no engine there). An engine that stops answering later, or does not take a version, fails
    the check `completed`, and keeps what it has.
    """
    options = options or Options()
    say = progress or (lambda _what, _done, _of: None)
    engine = f"{kind}={url}"
    client = client or open_client(engine)
    started = time.monotonic()
    try:
        client.label()  # is it there at all?
        folder = model or client.model_folder()
        base, config = load_folder(folder)
        plain, kv = (MarkerModel(base, config, kind=k) for k in ("plain", "kv"))
        found = Findings()
        figures: dict[str, Any] = dict.fromkeys((*Tally.__struct_fields__, "swaps"), 0)
        with tempfile.TemporaryDirectory(prefix="weightline-conform-") as root:
            swaps = Swaps(client, engine, Path(root))
            try:
                _checks(client, swaps, plain, kv, options, found, figures, say)
                swaps.swap(None, 0, base, OWN)
            except (RefitError, Unavailable) as error:
                # What was found so far is worth more than a traceback; nothing after it would mean anything.
                found.add("completed", _COMPLETED, False, error.message)
            else:
                found.add("completed", _COMPLETED, True)
            finally:
                swaps.close()
    finally:
        client.close()
    checks = found.all()
    figures["seconds"] = round(time.monotonic() - started, 1)
    return ConformanceReport(
        ok=all(check.ok for check in checks),
        engine=engine,
        model=str(folder),
        seed=options.seed,
        checks=checks,
        not_offered=dict(client.not_offered),
        figures=figures,
    )


def _checks(
    client: Client,
    swaps: Swaps,
    plain: MarkerModel,
    kv: MarkerModel,
    options: Options,
    found: Findings,
    figures: dict[str, Any],
    say: Progress,
) -> None:
    if options.accept:
        modes = options.output_modes or client.output_modes
        stage = Stage(client, swaps, plain, kv, longest=options.longest, prefix=options.prefix, modes=modes)
        stage.found = found
        say("acceptance", 0, 1)
        acceptance.run(stage)
        say("acceptance", 1, 1)
    measure = _resident(options.pid)
    runs = []
    share = len(options.kinds)
    for model in (m for m in (plain, kv) if m.kind in options.kinds):
        load = Load(
            tokens=options.tokens // share,
            swaps=options.swaps // share,
            workers=options.workers,
            prefix=options.prefix,
            seed=options.seed,
        )
        runs.append(Stress(client, swaps, model, load, say))
        runs[-1].run(measure)
        runs[-1].report(found, f"marker.{model.kind}")
        for name in Tally.__struct_fields__:
            figures[name] = sum(getattr(run.judge.tally, name) for run in runs)
        figures["swaps"] = len(runs) * load.swaps
    found.add("refits", "no refit was refused on the way", not swaps.refusals, str(swaps.refusals[:1]))
    if options.pid is not None:
        resident = [size for run in runs for size in run.resident]
        _flat(found, resident)
        figures["resident_mib"] = [size >> 20 for size in resident[:: max(1, len(resident) // 16)]]


def _flat(found: Findings, sizes: list[int]) -> None:
    half, quarter = len(sizes) // 2, max(1, len(sizes) // 4)
    before = max(sizes[max(0, half - quarter) : half] or sizes)
    after = max(sizes[-quarter:])
    limit = before + max(FLAT_BYTES, int(before * FLAT))
    text = f"{before >> 20} MiB at half of the swaps, {after >> 20} MiB at the end"
    found.add(
        "memory.flat", "the engine's memory does not grow with requests and swaps", after <= limit, text
    )


def _resident(pid: int | None) -> Callable[[], int | None]:
    """Resident bytes of a process and its children now."""
    if pid is None:
        return lambda: None
    import psutil

    process = psutil.Process(pid)

    def measure() -> int:
        total = process.memory_info().rss
        for child in process.children(recursive=True):
            try:
                total += child.memory_info().rss
            except psutil.NoSuchProcess:
                continue  # it ended between the two calls
        return int(total)

    return measure
