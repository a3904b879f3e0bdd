"""Figures of the whole line: runs `weightline demo --json` and prints what came of it.

usage: python benchmarks/demo.py [--model smollm2|tiny|DIR] [--steps N] [--engines N] [--json]

Everything is measured while it runs for real: a server, a trainer, engines and followers as processes of
their own. The baseline for bytes is shipping every version in full; for pauses, the time that an engine was
not able to sample.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps")
    parser.add_argument("--engines", default="2")
    parser.add_argument("--json", action="store_true", help="print the demo's own report instead of a table")
    args = parser.parse_args()
    command = [
        sys.executable,
        "-m",
        "weightline",
        "demo",
        "--json",
        "--model",
        args.model,
        "--engines",
        args.engines,
    ]
    if args.steps:
        command += ["--steps", args.steps]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(f"the demo ended with exit code {done.returncode}; see above")
    report = json.loads(done.stdout)
    if args.json:
        sys.stdout.write(done.stdout.decode())
        return
    for name, value in figures(report):
        print(f"{name:<34}{value}")


def figures(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows of the table."""
    size, audit, rollouts = report["bytes"], report["audit"], report["rollouts"]
    pauses = [e["max_pause_ms"] for e in report["engines"] if e["max_pause_ms"] is not None]
    changed = report["changed_fraction"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [
        ("machine", f"{platform.machine()}, {cores} cores"),
        ("model", str(report["model"])),
        ("steps", f"{len(report['reward'])}, {report['steps_with_variance']} with reward variance"),
        ("reward", " ".join(f"{r:.3f}" for r in report["reward"])),
        ("rollouts", f"{rollouts['requests']} requests, {rollouts['tokens']} tokens"),
        ("mixed / dropped requests", f"{rollouts['mixed']} / {rollouts['dropped']}"),
        ("versions", str(len(report["versions"]))),
        ("refits", " ".join(str(e["refits"]) for e in report["engines"])),
        ("longest pause of an engine", f"{max(pauses):.1f} ms" if pauses else "-"),
        ("changed elements a version", " ".join(f"{c:.3%}" for c in changed)),
        ("all versions in full", f"{size['full'] / 1e6:.2f} MB"),
        ("stored after the first", f"{size['delta_total'] / 1e6:.2f} MB"),
        (
            "full / stored",
            f"{size['ratio']:.2f} x; without the first version {size['ratio_after_first']:.2f} x",
        ),
        ("commit held up the trainer", " ".join(f"{ms:.1f}" for ms in report["blocked_ms"]) + " ms"),
        ("commit until visible", " ".join(f"{ms:.0f}" for ms in report["commit_ms"]) + " ms"),
        ("staleness", " ".join(f"{s:.2f}" for s in report["staleness"]) + " versions"),
        ("tokens replayed", f"{audit['tokens_checked']} of {audit['requests_checked']} requests"),
        ("mixed requests replayed", str(audit["mixed_requests_checked"])),
        ("wrong labels / ties", f"{audit['mismatches']} / {audit['ties']}"),
        ("largest log-probability error", str(audit["max_logprob_error"])),
        ("seconds", f"{report['seconds']:.1f}"),
        ("of which", ", ".join(f"{k} {v:.1f}" for k, v in report["phase_seconds"].items())),
        ("resident memory, all processes", f"{report['peak_rss'] / 1e9:.2f} GB"),
    ]


if __name__ == "__main__":
    main()
