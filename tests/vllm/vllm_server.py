"""A real vLLM server in processes of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from real_server import VENV, RealServer

from weightline.rollout.engines.vllm import VllmEngine

SERVE = Path(__file__).parents[2] / "engines" / "vllm" / "serve.sh"


class Server(RealServer):
    """One vLLM server process tree."""

    kind = "vllm"

    def command(self) -> list[str]:
        command = ["sh", str(SERVE), str(VENV), str(self.model), str(self.address), "--dtype", "float32"]
        return [*command, "--weight-transfer-config", '{"backend":"weightline"}', *self.flags]

    def environment(self) -> dict[str, str]:
        return {"VLLM_LOGGING_LEVEL": "INFO"}

    def up(self) -> bool:
        return self.answers("/health")

    def port(self, query: str, **options: Any) -> VllmEngine:
        return VllmEngine(self.url + query, **options)

    def label(self) -> str:
        return str(self.get("/weight_info")["weight_version"])

    def paused(self) -> bool:
        return bool(self.get("/is_paused")["is_paused"])

    def pause(self) -> None:
        self.post("/pause?mode=keep").raise_for_status()

    def resume(self) -> None:
        self.post("/resume").raise_for_status()

    def spoil(self) -> None:
        self.post("/weight_checker", {"action": "reset"}).raise_for_status()

    def generate(self, prompt: list[int], count: int) -> dict[str, Any]:
        """One request to the end; its first choice."""
        body = {
            "model": "m",
            "token_ids": prompt,
            "stream": False,
            "sampling_params": {"max_tokens": count, "temperature": 0, "ignore_eos": True},
        }
        answer = self.post("/inference/v1/generate", body)
        answer.raise_for_status()
        return dict(answer.json()["choices"][0])

    def stream(
        self,
        prompt: list[int],
        count: int,
        *,
        mode: str = "tokens",
        on_chunk: Callable[[int], None] | None = None,
    ) -> dict[str, Any]:
        """One streamed request to its end: all tokens, and what its last chunk said.

        `on_chunk` is called with the number of chunks so far."""
        body = {
            "model": "m",
            "token_ids": prompt,
            "stream": True,
            "output_mode": mode,
            "sampling_params": {"max_tokens": count, "temperature": 0, "ignore_eos": True},
        }
        tokens: list[int] = []
        last: dict[str, Any] = {}
        early = chunks = 0
        with (
            httpx.Client(timeout=300.0, trust_env=False) as client,
            client.stream("POST", f"{self.url}/inference/v1/generate", json=body) as response,
        ):
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line[6:]).get("choices", []):
                    early += bool(last.get("weight_versions"))
                    tokens += choice.get("token_ids") or []
                    last = choice
                chunks += 1
                if on_chunk is not None:
                    on_chunk(chunks)
        return {**last, "token_ids": tokens, "prompt": prompt, "spans_before_the_last_chunk": early}

    def prefix_hits(self) -> int:
        """Tokens served from cached prefixes since the start."""
        text = httpx.get(self.url + "/metrics", timeout=60.0, trust_env=False).text
        found = re.search(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", text, re.MULTILINE)
        return int(float(found[1])) if found else 0
