"""From a commit to an engine that serves it, beside the usual way (save_file, load_file, load_state_dict), in
one run.

    python benchmarks/refit.py MODEL_FOLDER [-n 5] [--changed 0.01] [--requests 0]

MODEL_FOLDER is a Hugging Face folder of one safetensors file. Each round moves a share of all elements by one
unit in the last place, commits, and waits until the follower (a process of its own) says that the engine (a
process of its own) was resumed with the new version and that the ack is written. Prints one JSON document;
times are in milliseconds, medians over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file

from weightline.service import CheckpointEngine

ENGINE = """
import json, sys
from pathlib import Path
from weightline.generate import serve_engine
serve_engine(Path(sys.argv[1]), port=0, max_model_len=256,
             ready=lambda facts: print(json.dumps(facts), flush=True))
"""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("-n", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--changed", type=float, default=0.01, help="share of elements that change a round")
    parser.add_argument("--requests", type=int, default=0, help="requests that run during the refits")
    return parser.parse_args()


@contextlib.contextmanager
def process(arguments: list[str]) -> Iterator[Iterator[dict[str, Any]]]:
    """A child, as the JSON lines that it prints; terminated at the end."""
    child = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        yield (json.loads(line) for line in child.stdout)
    finally:
        child.terminate()
        child.wait(timeout=30)


def moved(weights: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    """A share of the elements moves by one unit in the last place."""
    generator = torch.Generator().manual_seed(seed)
    after = {}
    for name, tensor in weights.items():
        bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        after[name] = (
            (bits + (torch.rand(bits.shape, generator=generator) < share)).to(bits.dtype).view(tensor.dtype)
        )
    return after


def timed(action: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    result = action()
    return (time.perf_counter() - began) * 1e3, result


def usual_way(weights: dict[str, torch.Tensor], model: torch.nn.Module, folder: Path) -> dict[str, float]:
    """What a trainer and an engine do without a line: the whole file out and in again."""
    path = folder / "usual.safetensors"

    def save() -> None:
        save_file(weights, path)

    def flush() -> None:
        with path.open("rb") as file:
            os.fsync(file.fileno())

    save_ms, _ = timed(save)
    fsync_ms, _ = timed(flush)
    load_ms, loaded = timed(lambda: load_file(path))
    set_ms, _ = timed(lambda: model.load_state_dict(loaded, strict=False))
    path.unlink()
    return {
        "save_file": save_ms,
        "load_file": load_ms,
        "load_state_dict": set_ms,
        "total": save_ms + load_ms + set_ms,
        "total_with_fsync": save_ms + fsync_ms + load_ms + set_ms,
    }


def keep_busy(url: str, requests: int, stop: threading.Event) -> list[threading.Thread]:
    def ask() -> None:
        body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 64, "ignore_eos": True}}
        while not stop.is_set():
            httpx.post(
                f"{url}/inference/v1/generate", json=body, timeout=600, trust_env=False
            ).raise_for_status()

    threads = [threading.Thread(target=ask) for _ in range(requests)]
    for thread in threads:
        thread.start()
    return threads


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(row[key] for row in rows), 3) for key in rows[0]}


def main() -> None:
    from transformers import AutoModelForCausalLM

    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the children end too
    weights = load_file(options.model / "model.safetensors")
    # fp32, as the engine computes: the same widening is part of both ways.
    baseline_model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    raw = sum(t.numel() * t.element_size() for t in weights.values())
    stop = threading.Event()
    busy: list[threading.Thread] = []
    ours, usual, phases, copies = [], [], [], []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        line = stack.enter_context(contextlib.closing(CheckpointEngine(Path(folder) / "store")))
        line.commit(weights, model_files=options.model)
        engine = next(stack.enter_context(process(["-c", ENGINE, str(options.model)])))
        follow = ["-m", "weightline", "follow", str(line.root), "--engine", f"embedded={engine['url']}"]
        follow += ["--runtime-dir", f"{folder}/run", "--json"]
        refits = (e for e in stack.enter_context(process(follow)) if e["event"] in ("refit", "refused"))
        first = next(refits)
        busy = keep_busy(engine["url"], options.requests, stop)
        stack.callback(lambda: [thread.join() for thread in busy])
        stack.callback(stop.set)
        for k in range(options.n):
            weights = moved(weights, options.changed, k)
            began = time.perf_counter()
            version = line.commit(weights)
            committed = (time.perf_counter() - began) * 1e3
            event = next(refits)
            served = (time.perf_counter() - began) * 1e3
            if event["event"] != "refit" or event["version"] != version:
                raise SystemExit(f"version {version} was not served: {event}")
            ours.append({
                "commit": committed, "served": served, "after_commit": served - committed,
                "refit": event["total_ms"], "pause": event["pause_ms"], "bytes": event["nbytes"],
            })  # fmt: skip
            phases.append(event["phases"])
            usual.append(usual_way(weights, baseline_model, Path(folder)))
            copies.append(timed(lambda current=weights: [t.clone() for t in current.values()])[0])
    result = {
        "model": options.model.name,
        "n": options.n,
        "parameters": sum(t.numel() for t in weights.values()),
        "raw_bytes": raw,
        "changed": options.changed,
        "requests": options.requests,
        "cpus": os.cpu_count(),
        "first_full_refit_ms": {"total": first["total_ms"], "pause": first["pause_ms"]},
        "weightline_ms": medians(ours),
        "longest_pause_ms": max(row["pause"] for row in ours),
        "phases_ms": medians(phases),
        "usual_way_ms": medians(usual),
        "memcpy_ms": round(statistics.median(copies), 3),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
