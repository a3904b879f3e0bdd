"""`python -m weightline.audit STORE MODEL ROLLOUTS.jsonl [--requests N]`: the replay as a process, with
events on stdout.

Prints `{"event": "replayed", "requests", "tokens"}` as it goes on and `{"event": "audit", …}` with the report
at the end.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import msgspec

from weightline.errors import WeightlineError


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m weightline.audit", description=__doc__)
    parser.add_argument("store")
    parser.add_argument("model", type=Path)
    parser.add_argument("rollouts", type=Path)
    parser.add_argument("--requests", type=int)
    args = parser.parse_args()
    try:
        _audit(args)
    except WeightlineError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr, flush=True)
        sys.exit(error.status.exit_code)


def _audit(args: argparse.Namespace) -> None:
    import weightline
    from weightline.audit import replay

    said = 0.0

    def progress(requests: int, tokens: int) -> None:
        nonlocal said
        if time.monotonic() - said >= 0.25:
            said = time.monotonic()
            _print({"event": "replayed", "requests": requests, "tokens": tokens})

    line = weightline.connect(args.store)
    try:
        report = replay(
            line, args.model, args.rollouts, requests=args.requests, control=True, progress=progress
        )
    finally:
        line.close()
    _print({"event": "audit", **msgspec.to_builtins(report)})


def _print(event: dict[str, object]) -> None:
    print(msgspec.json.encode(event).decode(), flush=True)


if __name__ == "__main__":
    main()
