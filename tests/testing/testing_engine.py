"""A real embedded engine in a process of its own, on a free port. Imported by torch tests only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path


class EngineProcess:
    """`serve_engine(model)`; `close` ends it and checks that it went in order."""

    def __init__(self, model: Path, log: Path) -> None:
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, str(model)],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, log.read_text()[-2000:]
        facts = json.loads(line)
        self.url, self.pid = facts["url"], facts["pid"]

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(90) == 0
        assert self.process.stdout is not None
        self.process.stdout.close()


_START = """
import json, sys
from pathlib import Path
from weightline.generate import serve_engine
serve_engine(Path(sys.argv[1]), port=0, threads=1, max_model_len=512,
             ready=lambda facts: print(json.dumps(facts), flush=True))
"""
