"""Drives the transfer engine of a loaded model through vLLM's own interface, as its worker does."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from typing import Any

from weightline import codec
from weightline.errors import from_dict
from weightline.plugins.exchange import Change, write_refit


class Driver:
    """One follower's requests, made in process."""

    def __init__(self, engine: Any, runtime: Path, holder: str = "follower-1") -> None:
        self.engine, self.runtime, self.holder = engine, runtime, holder

    def ask(self, action: str, *, update: bool = False, **fields: Any) -> dict[str, Any]:
        """The answer; raises the typed error that came back."""
        path = self.runtime / f"{uuid.uuid4().hex}.json"
        request = {"action": action, "answer": str(path), **fields}
        if update:
            self.engine.update_weights(request)
        else:
            self.engine.init_transfer_engine(self.engine.parse_init_info(request))
        deadline = time.monotonic() + 60
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer to {action}")
            time.sleep(0.002)
        answer = json.loads(path.read_text())
        if "error" in answer:
            raise from_dict(answer["error"])
        return answer

    def file(self, delta: codec.Delta) -> tuple[Path, str]:
        path = self.runtime / f"{uuid.uuid4().hex}.safetensors"
        changes = [
            Change(c.spec.name, c.spec.dtype, c.spec.shape, c.digest, c.index, c.bits)
            for c in delta.changes()
        ]
        _, sha256 = write_refit(path, changes)
        return path, sha256

    def prepare(self, delta: codec.Delta, version: int, have: int | None, **more: Any) -> dict[str, Any]:
        path, sha256 = self.file(delta)
        fields = {
            "run": "r",
            "version": version,
            "label": f"{version}@x",
            "have": have,
            "holder": self.holder,
        }
        return self.ask("prepare", file=str(path), sha256=sha256, **{**fields, **more})

    def refit(self, delta: codec.Delta, version: int, have: int | None) -> str:
        """All the way; the session stays open, so that a test can take it back."""
        session = self.prepare(delta, version, have)["session"]
        self.engine.start_weight_update()
        self.ask("apply", update=True, session=session)
        self.engine.finish_weight_update()
        return session
