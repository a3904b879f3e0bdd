"""`python -m weightline.demo.resolve MODEL CACHE`: the model folder, made if need be, in a process that gives
its memory back.

Prints one event: `{"event": "model", "folder": …}` or `{"event": "error", …}` with the error's fields.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from weightline.errors import WeightlineError


def main() -> None:
    from weightline.demo.models import resolve_model

    spec, cache = sys.argv[1], Path(sys.argv[2])
    code = 0
    try:
        event = {"event": "model", "folder": str(resolve_model(spec, cache))}
    except WeightlineError as error:
        event, code = {"event": "error", **error.to_dict()}, error.status.exit_code
    print(msgspec.json.encode(event).decode(), flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
