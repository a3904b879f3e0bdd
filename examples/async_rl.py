"""Asynchronous RL in one file: rollouts never wait for the trainer, and the labels say which weights
sampled what.

A real rollout engine and its follower run as processes. While requests are being decoded, the trainer takes
an optimizer step and commits it; the follower swaps the new version into the engine, in the middle of those
requests. Each output then tells in `weight_versions` where the swap came. This script

1. trains on the sampled outputs with a mask from `wl.spans`: only tokens at most `--stale` steps old count;
2. reads the swap point of each greedy output and checks every token after it against a fresh instance of
  the new version, loaded by transformers from a checkout, token for token.

usage: python examples/async_rl.py [--steps 3] [--requests 4] [--tokens 384] [--stale 0]

Needs `pip install 'weightline[demo]'`. Half a minute on two cores. Exit code 0 only if every token agreed
and every step swapped into running requests.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import weightline as wl
from weightline.demo.models import tiny_model
from weightline.store import Store

Output = dict[str, Any]

PATIENCE = 120.0
"""Seconds to wait for a process or a swap."""


@contextlib.contextmanager
def process(*arguments: object) -> Iterator[None]:
    """A `weightline` command that runs beside us, and ends with us."""
    command = [sys.executable, "-m", "weightline", *map(str, arguments)]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        running.terminate()
        running.wait(30)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that must come."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"waited {PATIENCE:.0f} s in vain for {what}")
        time.sleep(0.02)


class Rollouts:
    """The engine, as a trainer's rollout side sees it."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False)

    def up(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def label(self) -> str:
        return str(self.http.get("/weight_info").json()["weight_version"])

    def generate(self, prompt: list[int], tokens: int, heard: threading.Event, **sampling: Any) -> Output:
        """One streamed output: `token_ids` and, from the last chunk, `weight_versions`. `heard` is set with
        the first tokens."""
        body = {
            "token_ids": prompt,
            "sampling_params": {"max_tokens": tokens, "ignore_eos": True, **sampling},
            "stream": True,
        }
        found: list[int] = []
        last: dict[str, Any] = {}
        with self.http.stream("POST", "/inference/v1/generate", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    last = json.loads(line[6:])["choices"][0]
                    found += last["token_ids"]
                    if len(found) >= 4:
                        heard.set()
        return {"prompt": prompt, "token_ids": found, "weight_versions": last["weight_versions"]}

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Requests stop between two tokens and go on afterwards with keys and values computed anew, by the
        weights that are live then. (Left to itself a follower keeps them: then tokens after the swap come
        from new weights over old keys, see docs/spans.md.)"""
        self.http.post("/pause?mode=keep&clear_cache=true").raise_for_status()
        try:
            yield
        finally:
            self.http.post("/resume").raise_for_status()


def train(policy: Any, optimizer: Any, outputs: list[Output], line: Any, stale: int) -> float:
    """One REINFORCE step on the tokens that are fresh enough; reward: even tokens."""
    now = line.latest()
    lengths = [len(output["token_ids"]) for output in outputs]
    batch = wl.spans.batch([output["weight_versions"] for output in outputs], lengths=lengths)
    fresh = wl.spans.mask(batch, line, now=now, at_most=stale, like="torch")
    logprobs, rewards = [], []
    for output in outputs:
        prompt, tokens = output["prompt"], torch.tensor(output["token_ids"])
        logits = policy(torch.tensor([prompt + output["token_ids"]])).logits[0, len(prompt) - 1 : -1]
        logprobs.append(logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])
        rewards.append((tokens % 2 == 0).float())
    advantage = torch.cat(rewards) - torch.cat(rewards).mean()
    loss = -(torch.cat(logprobs) * advantage * fresh).sum() / fresh.sum().clamp(min=1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(fresh.float().mean())


def weights_of(policy: Any) -> dict[str, Any]:
    """What is committed: the policy in bf16, as engines store it."""
    return {name: tensor.detach().bfloat16() for name, tensor in policy.state_dict().items()}


def differing(output: Output, model: Any, start: int, end: int) -> list[int]:
    """Output tokens in [start, end) that `model` does not sample greedily after all tokens before them."""
    context = torch.tensor([output["prompt"] + output["token_ids"][:end]])
    with torch.inference_mode():
        predicted = model(context).logits[0, len(output["prompt"]) - 1 : -1].argmax(-1)
    return [i for i in range(start, end) if int(predicted[i]) != output["token_ids"][i]]


def fresh_instance(store: Path, version: int, folder: Path) -> Any:
    """The version as a plain Hugging Face folder, loaded by transformers."""
    with contextlib.closing(Store.open(store)) as opened:
        opened.checkout(version, folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class Checks:
    """Compares tokens with fresh instances of the versions that their labels name."""

    def __init__(self, store: Path, line: Any, work: Path) -> None:
        self.store, self.line, self.work = store, line, work
        self.models: dict[str, Any] = {}
        self.swaps = self.tokens = self.control = 0

    def model(self, label: str) -> Any:
        """A fresh instance, loaded once."""
        if label not in self.models:
            versions = {record.label: record.version for record in self.line.versions()}
            self.models[label] = fresh_instance(self.store, versions[label], self.work / label)
        return self.models[label]

    def after_swaps(self, outputs: list[Output]) -> None:
        """Every token after every swap. Exits when one differs."""
        for number, output in enumerate(outputs):
            for before, span in itertools.pairwise(output["weight_versions"]):
                label, start, end = span["version"], span["start"], span["end"]
                wrong = differing(output, self.model(label), start, end)
                if wrong:
                    sys.exit(f"output {number}: token {wrong[0]} does not come from {label}")
                print(f"  output {number}: tokens {start} to {end} equal those of a fresh {label}")
                self.swaps, self.tokens = self.swaps + 1, self.tokens + end - start
                # What a wrong label would look like: the version before the swap samples other tokens.
                self.control += len(differing(output, self.model(before["version"]), start, end))


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def start(
    engine: Rollouts, pool: ThreadPoolExecutor, step: int, args: argparse.Namespace
) -> list[Future[Output]]:
    """Twice `--requests` requests, all of them in the middle of an output when this returns."""
    heard = [threading.Event() for _ in range(2 * args.requests)]
    futures = []
    for i, event in enumerate(heard):
        prompt = [3 + (step * 97 + i * 31 + j * 7) % 500 for j in range(6)]
        # The first half is greedy, to be checked; the other half explores, to be trained on.
        explore = {"temperature": 1.0, "seed": step * 100 + i}
        sampling = {"temperature": 0.0} if i < args.requests else explore
        futures.append(pool.submit(engine.generate, prompt, args.tokens, event, **sampling))
    for event in heard:
        event.wait(PATIENCE)
    return futures


def run(args: argparse.Namespace, root: Path) -> None:
    """The whole loop, on a tiny model of its own."""
    model, store, port = tiny_model(root / "model"), root / "store", free_port()
    url = f"http://127.0.0.1:{port}"
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
    with contextlib.ExitStack() as open_:
        pool = open_.enter_context(ThreadPoolExecutor(2 * args.requests))
        line = open_.enter_context(wl.CheckpointEngine(storage_path=store))
        line.commit(weights_of(policy), model_files=model)
        open_.enter_context(process("engine", model, "--port", port, "--threads", 1))
        engine = Rollouts(url)
        open_.enter_context(engine.http)
        until(engine.up, "the engine")
        open_.enter_context(process("follow", store, "--engine", f"embedded={url}"))
        until(lambda: engine.label() == line.versions()[-1].label, "version 1")
        outputs = [future.result() for future in start(engine, pool, 0, args)]
        checks = Checks(store, line, root)
        for step in range(1, args.steps + 1):
            futures = start(engine, pool, step, args)
            share = train(policy, optimizer, outputs[args.requests :], line, args.stale)
            with engine.frozen():
                version = line.commit(weights_of(policy), step=step)
                label = line.record(version).label
                until(lambda label=label: engine.label() == label, f"version {version}")  # type: ignore[misc]
            outputs = [future.result() for future in futures]
            print(f"step {step}: trained on {share:.0%} of the last tokens; version {version} swapped in")
            checks.after_swaps(outputs[: args.requests])
        if checks.swaps < args.steps:
            sys.exit("a swap came after the outputs had ended; give more --tokens")
        print(f"the version before the swap would have sampled {checks.control} of them otherwise")
        print(
            f"{checks.swaps} swap points, {checks.tokens} tokens after them: all as a fresh instance has them"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("steps", 3), ("requests", 4), ("tokens", 384), ("stale", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(0)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as root:
        run(args, Path(root))


if __name__ == "__main__":
    main()
