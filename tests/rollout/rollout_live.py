"""A real embedded engine in a process of its own, and a tiny random model for it. Imported by torch tests
only.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

SERVE = """
import json, sys
from pathlib import Path
from weightline.generate import serve_engine
serve_engine(Path(sys.argv[1]), port=int(sys.argv[2]), session_timeout=float(sys.argv[3]), threads=1,
             max_model_len=256, ready=lambda facts: print(json.dumps(facts), flush=True))
"""


def make_model(folder: Path, *, tied: bool, seed: int = 0) -> None:
    """A Qwen3 of about 0.1 M parameters, in bf16, as a Hugging Face folder."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=127,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)


def weights_of(folder: Path) -> dict[str, Any]:
    """The tensors of a Hugging Face folder as they lie in its file."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def nudged(
    weights: dict[str, Any], seed: int, names: tuple[str, ...] | None = None, share: float = 0.02
) -> dict[str, Any]:
    """The weights after a small step: a share of the elements of `names` (default: all) moves."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    after = {}
    for name, tensor in weights.items():
        if names is not None and name not in names:
            after[name] = tensor
            continue
        mask = torch.rand(tensor.shape, generator=generator) < share
        noise = torch.randn(tensor.shape, generator=generator) * 0.2
        after[name] = torch.where(mask, noise.to(tensor.dtype), tensor)
    return after


def until(condition: Callable[[], Any], *, timeout: float = 30.0, what: str = "") -> Any:
    """The first true value of `condition`, polled; fails the test when `timeout` seconds pass."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited {timeout} s in vain for {what or condition}")


class LiveEngine:
    """One engine process; `restart` brings it back on the same port."""

    def __init__(self, model: Path, *, session_timeout: float = 3.0) -> None:
        self.model, self.session_timeout = model, session_timeout
        self.port = 0
        self.process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        arguments = [sys.executable, "-c", SERVE, str(self.model), str(self.port), str(self.session_timeout)]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process is; a pipe could fill
        self.process = subprocess.Popen(
            arguments,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise AssertionError(f"the engine did not start: {self.log.read()[-2000:]}")
        facts = json.loads(line)
        self.port, self.url = facts["port"], facts["url"]
        self.name = f"embedded={self.url}"
        self.http = httpx.Client(base_url=self.url, timeout=30.0, trust_env=False)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=20)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.log.close()
        self.http.close()

    def describe(self) -> dict[str, Any]:
        return self.http.get("/weightline/describe").json()

    def label(self) -> str:
        return self.http.get("/weight_info").json()["weight_version"]

    def paused(self) -> bool:
        return self.http.get("/is_paused").json()["is_paused"]

    def digests(self) -> dict[str, str]:
        return self.http.post("/weightline/digests", json={"names": None}).json()["digests"]

    def greedy(self, prompt: list[int], tokens: int, **sampling: Any) -> dict[str, Any]:
        """One choice: token_ids, weight_versions, …"""
        body = {
            "token_ids": prompt,
            "sampling_params": {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, **sampling},
        }
        answer = self.http.post("/inference/v1/generate", json=body, timeout=100.0)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]
