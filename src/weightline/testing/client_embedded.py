"""The embedded engine: vLLM's surface, and its own description."""

from __future__ import annotations

from pathlib import Path

from weightline.testing.client_vllm import PAUSES, VllmClient


class EmbeddedClient(VllmClient):
    """`Client` on a `weightline engine`."""

    kind = "embedded"
    pauses = PAUSES

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.not_offered = {}

    def live_requests(self) -> int:
        described = self.wire.expect("GET", "/weightline/describe")
        return int(described["running"]) + int(described["waiting"])

    def model_folder(self) -> Path:
        return Path(self.wire.expect("GET", "/weightline/describe")["model"])
