"""A real SGLang server in processes of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from real_server import VENV, RealServer

from weightline.rollout.engines.sglang import SglangEngine

SERVE = Path(__file__).parents[2] / "engines" / "sglang" / "serve.sh"


class Server(RealServer):
    """One SGLang server process tree. An idle scheduler sleeps: it would take a core of a small machine."""

    kind = "sglang"

    def command(self) -> list[str]:
        command = ["sh", str(SERVE), str(VENV), str(self.model), str(self.address), "--sleep-on-idle"]
        return [*command, *self.flags]

    def environment(self) -> dict[str, str]:
        return {}

    def up(self) -> bool:
        return self.answers("/health")

    def kill(self) -> None:
        super().kill()
        for left in Path("/dev/shm").glob("sglang_loads_*.shm"):
            left.unlink(missing_ok=True)

    def port(self, query: str, **options: Any) -> SglangEngine:
        return SglangEngine(self.url + query, **options)

    def label(self) -> str:
        return str(self.get("/model_info")["weight_version"])

    def paused(self) -> bool:
        port = self.port("", holder="server-looking")
        try:
            return port.describe().paused
        finally:
            port.close()

    def pause(self) -> None:
        self.post("/pause_generation", {"mode": "in_place"}).raise_for_status()

    def resume(self) -> None:
        self.post("/continue_generation", {"torch_empty_cache": False}).raise_for_status()

    def spoil(self) -> None:
        self.post("/weights_checker", {"action": "reset_tensors"}).raise_for_status()

    def generate(self, prompt: list[int], count: int) -> dict[str, Any]:
        answer = self.post("/generate", _body(prompt, count, stream=False))
        answer.raise_for_status()
        return _answer(answer.json())

    def stream(
        self, prompt: list[int], count: int, *, on_chunk: Callable[[int], None] | None = None
    ) -> dict[str, Any]:
        last: dict[str, Any] = {}
        early = chunks = 0
        with (
            httpx.Client(timeout=300.0, trust_env=False) as client,
            client.stream("POST", f"{self.url}/generate", json=_body(prompt, count, stream=True)) as response,
        ):
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                early += bool(last.get("meta_info", {}).get("weight_versions"))
                last = json.loads(line[6:])
                chunks += 1
                if on_chunk is not None:
                    on_chunk(chunks)
        return {**_answer(last), "prompt": prompt, "spans_before_the_last_chunk": early}


def _body(prompt: list[int], count: int, *, stream: bool) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, "stream": stream}


def _answer(answer: dict[str, Any]) -> dict[str, Any]:
    meta = answer["meta_info"]
    return {
        "token_ids": answer["output_ids"],
        "weight_versions": meta["weight_versions"],
        "finish_reason": meta["finish_reason"]["type"],
        "cached_tokens": meta["cached_tokens"],
    }
