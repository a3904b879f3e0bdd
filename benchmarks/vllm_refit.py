"""Refits of a live vLLM server, beside vLLM's own reload of the full checkpoint, in one run.

    .venv-vllm/bin/python benchmarks/vllm_refit.py MODEL_FOLDER [-n 8] [--billion] [--refits 0]

MODEL_FOLDER is a Hugging Face folder of one safetensors file. A server of its own is started with it. Each
round moves a share of all elements by one unit in the last place, commits, and waits until the engine serves
the new version. `commit_to_served_ms` runs from the call of commit to the answer of resume.
`inside_pause_ms` is what lies between vLLM's answers to pause and resume; `ours_ms` is that without vLLM's
own calls (start, finish with label, reset of the prefix cache, is-paused), which are made once more after
each refit with nothing of ours in them. The line through the shares gives fixed cost and slope.
`--billion` adds a synthetic model of more than 1e9 bf16 parameters in this process (real vLLM modules, no
generation). `--refits N` goes on for N refits and reports resident memory on the way. Prints one JSON
document; times are medians in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "real"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "vllm"))

from real_world import Traffic, World
from safetensors.torch import load_file, save_file
from vllm_server import Server

import weightline

SHARES = (0.0, 0.002, 0.008, 0.016)


INSIDE = ("apply", "verify", "invalidate", "label")
"""Verbs between the answers to pause and resume."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("-n", type=int, default=8, help="rounds a share (default 8)")
    parser.add_argument("--refits", type=int, default=0, help="more refits, for a look at memory")
    parser.add_argument("--billion", action="store_true", help="also the synthetic model in this process")
    parser.add_argument("--only-billion", action="store_true", help="no server")
    return parser.parse_args()


def moved(weights: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    """`share` of all elements moved by one unit in the last place."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, tensor in weights.items():
        count = round(tensor.numel() * share)
        if not count:
            out[name] = tensor
            continue
        bits = tensor.clone().view(torch.int16)
        hit = torch.from_numpy(np.unique(rng.integers(0, tensor.numel(), count)))
        bits.view(-1)[hit] ^= 1
        out[name] = bits.view(tensor.dtype)
    return out


def median(values: list[float]) -> float:
    return round(statistics.median(values), 2)


def timed(work: Any) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def vllm_calls(server: Server, n: int = 10) -> dict[str, float]:
    """vLLM's own calls, one by one, with nothing of ours in them; one connection, as the adapter has."""
    import httpx

    calls: dict[str, list[float]] = {}
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        label = client.get("/weight_info").json()["weight_version"]
        steps = {
            "pause": lambda: client.post("/pause?mode=keep&clear_cache=true"),
            "is_paused": lambda: client.get("/is_paused"),
            "start": lambda: client.post("/start_weight_update", json={}),
            "reset_prefix_cache": lambda: client.post("/reset_prefix_cache"),
            "finish_with_label": lambda: client.post("/finish_weight_update", json={"weight_version": label}),
            "resume": lambda: client.post("/resume"),
        }
        for _ in range(n):
            for name, call in steps.items():
                calls.setdefault(name, []).append(timed(call))
    return {name: median(values) for name, values in calls.items()}


def rounds(world: World, follower: Any, share: float, n: int) -> dict[str, Any]:
    """`n` refits at one share."""
    served, events, ours, commits = [], [], [], []
    resume, resumed = follower.port.resume, []

    def noting() -> None:
        resume()
        resumed.append(time.perf_counter())

    follower.port.resume = noting
    for _ in range(n):
        world.version += 1
        world.weights = moved(world.weights, share, world.version)
        if share == 0.0:
            name = next(iter(world.weights))
            world.weights[name] = world.weights[name].clone()
            world.weights[name].view(torch.int16).view(-1)[0] ^= 1
        began = time.perf_counter()
        version = world.engine.commit(world.weights, step=world.version)
        committed = time.perf_counter()
        world.follow_to(follower, version)
        served.append((resumed[-1] - began) * 1e3)
        commits.append((committed - began) * 1e3)
        events.append(next(e for e in reversed(world.events) if e["event"] == "refit"))
        # vLLM's own calls right after, in the same weather: what is left of this pause is ours.
        alone = vllm_calls(world.server, 1)
        own = (
            alone["start"] + alone["reset_prefix_cache"] + alone["finish_with_label"] + 2 * alone["is_paused"]
        )
        ours.append(sum(events[-1]["phases"][p] for p in INSIDE) - own)
    follower.port.resume = resume
    names = ("plan", "prepare", "pause", "apply", "verify", "invalidate", "label", "resume", "fetch")
    phases = {name: median([e["phases"][name] for e in events]) for name in names}
    return {
        "elements": events[-1]["elements"],
        "commit_to_served_ms": median(served),
        "commit_to_served_least_ms": round(min(served), 1),
        "commit_ms": median(commits),
        "pause_ms": median([e["pause_ms"] for e in events]),
        "inside_pause_ms": median([sum(e["phases"][p] for p in INSIDE) for e in events]),
        "ours_ms": median(ours),
        "ours_least_ms": round(min(ours), 2),
        "phases": phases,
        "delta_bytes": events[-1]["nbytes"],
    }


def reload_full(world: World, n: int) -> dict[str, float]:
    """The usual way: write a whole checkpoint, let vLLM read it back."""
    writes, reloads = [], []
    target = world.server.model / "model.safetensors"
    for _ in range(n):
        writes.append(timed(lambda: save_file(world.weights, target, metadata={"format": "pt"})))
        world.server.post("/pause?mode=keep")
        reloads.append(timed(lambda: world.server.post("/collective_rpc", {"method": "reload_weights"})))
        world.server.post("/resume")
    return {
        "write_ms": median(writes),
        "reload_ms": median(reloads),
        "sum_ms": median(writes) + median(reloads),
        "sum_least_ms": round(min(a + b for a, b in zip(writes, reloads, strict=True)), 1),
    }


def loss_of_tokens(world: World, follower: Any) -> dict[str, float]:
    """Tokens a second with and without a refit every second, over ten seconds each."""
    found = {}
    for name, refits in (("quiet", 0), ("one_refit_a_second", 10)):
        traffic = Traffic(world.server, streams=4, count=32)
        began = time.perf_counter()
        for k in range(10):
            if refits:
                world.version += 1
                world.weights = moved(world.weights, 0.002, world.version)
                version = world.engine.commit(world.weights, step=world.version)
                world.follow_to(follower, version)
            left = began + k + 1 - time.perf_counter()
            if left > 0:
                threading.Event().wait(left)
        tokens, seconds = traffic.tokens, time.perf_counter() - began
        traffic.stop()
        found[name] = round(tokens / seconds, 1)
    return found


def served(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that needs a server."""
    import shutil

    with tempfile.TemporaryDirectory(prefix="weightline-bench-") as scratch:
        root = Path(scratch)
        model = root / "model"
        shutil.copytree(arguments.model, model)
        server = Server(model, root / "server.log")
        world = World(root, server, load_file(model / "model.safetensors"))
        try:
            server.start()
            follower = world.follower()
            first = world.engine.commit(world.weights, step=0)
            world.version = first
            world.follow_to(follower, first)
            idle = server.resident()
            result: dict[str, Any] = {"vllm_calls_ms": vllm_calls(server)}
            result["reload_full"] = reload_full(world, max(3, arguments.n // 2))
            world.follow_to(follower, world.version)
            result["shares"] = {}
            for share in SHARES:
                result["shares"][str(share)] = rounds(world, follower, share, arguments.n)
            elements = [found["elements"] for found in result["shares"].values()]
            inside = [found["inside_pause_ms"] for found in result["shares"].values()]
            slope, fixed = np.polyfit(elements, inside, 1)
            result["inside_pause_fixed_ms"] = round(float(fixed), 2)
            result["inside_pause_ms_per_million_elements"] = round(float(slope) * 1e6, 2)
            result["tokens_per_second"] = loss_of_tokens(world, follower)
            if arguments.refits:
                samples = [server.resident()]
                for k in range(arguments.refits):
                    rounds(world, follower, 0.002, 1)
                    if (k + 1) % max(1, arguments.refits // 6) == 0:
                        samples.append(server.resident())
                result["resident_bytes"] = samples
            result["reload_full_after"] = reload_full(world, max(3, arguments.n // 2))
            result["resident_bytes_before_refits"] = idle
        finally:
            world.close()
            server.kill()
    return result


def billion(n: int) -> dict[str, Any]:
    """A synthetic Qwen3 of more than 1e9 bf16 parameters: our refit, and the reload of all weights."""
    from vllm_driver import Driver
    from vllm_models import loaded

    from weightline import codec
    from weightline.demo.models import tiny_model

    with tempfile.TemporaryDirectory(prefix="weightline-bench-") as scratch:
        root = Path(scratch)
        folder = tiny_model(root / "model", arch="qwen3", hidden=2048, layers=42)
        weights = load_file(folder / "model.safetensors")
        runtime = root / "runtime"
        runtime.mkdir()
        (runtime / "owner.json").write_text("{}")
        elements = sum(t.numel() for t in weights.values())
        with loaded(folder, dtype="bfloat16") as live:
            began = time.perf_counter()
            live.engine.weights.proved.wait()
            proof = (time.perf_counter() - began) * 1e3
            driver = Driver(live.engine, runtime)
            driver.ask("close", session=driver.refit(codec.full(weights), 1, None))
            ends, insides, old = [], [], weights
            digests = {name: codec.digest_of(codec.bits_of(t)) for name, t in weights.items()}
            for k in range(2, n + 2):
                new = moved(old, 0.002, k)
                began = time.perf_counter()
                delta = codec.diff(old, new, old_digests=digests)
                digests.update({c.spec.name: c.digest for c in delta.changes()})
                session = driver.prepare(delta, k, k - 1)["session"]
                paused = time.perf_counter()
                live.engine.start_weight_update()
                driver.ask("apply", update=True, session=session)
                live.engine.finish_weight_update()
                insides.append((time.perf_counter() - paused) * 1e3)
                ends.append((time.perf_counter() - began) * 1e3)
                driver.ask("close", session=session)
                old = new
            from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
            from vllm.model_executor.model_loader.reload.inplace import reload_weights

            record_metadata_for_reloading(live.model)
            target = folder / "model.safetensors"
            write = timed(lambda: save_file(old, target, metadata={"format": "pt"}))
            reload = timed(lambda: reload_weights(live.config, live.model, None, None, True))
    return {
        "elements": elements,
        "proof_ms": round(proof, 1),
        "changed_share": 0.002,
        "end_to_end_ms": median(ends),
        "inside_pause_ms": median(insides),
        "reload": {"write_ms": round(write, 1), "reload_ms": round(reload, 1)},
        "times_faster_end_to_end": round((write + reload) / statistics.median(ends), 1),
        "times_shorter_pause": round(reload / statistics.median(insides), 1),
    }


def main() -> None:
    arguments = parse()
    result: dict[str, Any] = {"weightline": weightline.__version__}
    if not arguments.only_billion:
        result["server"] = served(arguments)
    if arguments.billion or arguments.only_billion:
        result["billion"] = billion(3)
    json.dump(result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
