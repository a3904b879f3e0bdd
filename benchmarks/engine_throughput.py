"""Tokens per second of the embedded engine, beside `transformers.generate` on the same requests in the same
run.

usage: python benchmarks/engine_throughput.py [MODEL] [--requests 16] [--longest 128] [--threads N]
[--repeat 2] [--vllm URL] [--json]

MODEL is "tiny" (default), "smollm2" or a model folder. Requests have mixed prompt and output lengths, are
greedy and do not stop early. The baselines: `generate` one request at a time, and `generate` on one
left-padded batch, which runs until its longest output ends; tokens beyond what a request asked for do not
count. Both compute in float32. It also measures what a keep-pause costs, without and with recomputation.

`--vllm URL`: a running vLLM server of the same model, given the same requests at once. For a fair row start
it with `--dtype float32`, as many threads (OMP_NUM_THREADS) and the engine's max_model_len 512. Its prefix
cache is reset before each round. The engines do not run at the same time, but the idle server is there.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from weightline.demo.models import resolve_model
from weightline.demo.places import model_cache
from weightline.generate import Engine, EngineOptions, SamplingParams, load_model

MAX_LEN = 512


def workload(requests: int, vocabulary: int, longest: int) -> list[tuple[list[int], int]]:
    """(prompt, output tokens): prompts of 8 to 200 tokens, outputs of 16 to `longest`, the same in every
    run.
    """
    rng = random.Random(0)
    return [
        ([rng.randrange(vocabulary) for _ in range(rng.randint(8, 200))], rng.randint(16, longest))
        for _ in range(requests)
    ]


def run_engine(
    engine: Engine, work: list[tuple[list[int], int]], pause_at: int | None = None, **pause: Any
) -> dict[str, Any]:
    """All requests at once. `pause_at`: pause and resume once after so many tokens."""
    done, finals, seen = threading.Semaphore(0), [], 0
    reached = threading.Event()

    def sink(chunk: Any) -> None:
        nonlocal seen
        seen += len(chunk.token_ids)
        if seen == pause_at:
            reached.set()
        if chunk.final is not None:
            finals.append(chunk.final)
            done.release()

    engine.reset_prefix_cache()  # the same prompts come again in every round
    begin, paused_ms = time.perf_counter(), 0.0
    for prompt, count in work:
        engine.submit(prompt, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count), sink)
    if pause_at is not None:
        reached.wait()
        at = time.perf_counter()
        engine.pause("keep", **pause).result()
        engine.resume()
        paused_ms = (time.perf_counter() - at) * 1e3
    for _ in work:
        done.acquire()
    seconds = time.perf_counter() - begin
    tokens = sum(len(f.token_ids) for f in finals)
    return {"tokens": tokens, "seconds": seconds, "tok_s": tokens / seconds, "pause_ms": paused_ms}


def run_transformers(model: Any, work: list[tuple[list[int], int]], *, batched: bool) -> dict[str, Any]:
    """`generate` on one request after the other, or on one padded batch."""
    begin, tokens = time.perf_counter(), sum(count for _, count in work)
    groups = [work] if batched else [[w] for w in work]
    for group in groups:
        width = max(len(p) for p, _ in group)
        ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in group])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in group])
        count = max(c for _, c in group)
        model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=count, eos_token_id=None, pad_token_id=0
        )
    seconds = time.perf_counter() - begin
    return {"tokens": tokens, "seconds": seconds, "tok_s": tokens / seconds}


def run_vllm(url: str, work: list[tuple[list[int], int]]) -> dict[str, Any]:
    """All requests at once to a vLLM server."""
    import httpx

    with httpx.Client(base_url=url, timeout=600, trust_env=False) as http:
        model = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        http.post(
            "/reset_prefix_cache"
        )  # a server without its development routes answers 404: then it is warm

        def ask(job: tuple[list[int], int]) -> int:
            body = {
                "model": model,
                "prompt": job[0],
                "max_tokens": job[1],
                "temperature": 0,
                "ignore_eos": True,
            }
            answer = http.post("/v1/completions", json=body).raise_for_status().json()
            return int(answer["usage"]["completion_tokens"])

        begin = time.perf_counter()
        with ThreadPoolExecutor(len(work)) as pool:
            tokens = sum(pool.map(ask, work))
        seconds = time.perf_counter() - begin
    return {"tokens": tokens, "seconds": seconds, "tok_s": tokens / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="tiny")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=2, help="rounds of everything; the best of each counts")
    parser.add_argument("--longest", type=int, default=128, help="output tokens of the longest request")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--cache", type=Path, default=None, help="where made models are kept")
    parser.add_argument("--vllm", default=None, help="URL of a vLLM server of the same model")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    folder = resolve_model(args.model, args.cache or model_cache())
    begin = time.perf_counter()
    loaded = load_model(folder, max_model_len=MAX_LEN)
    loading = time.perf_counter() - begin
    begin = time.perf_counter()
    engine = Engine(loaded, EngineOptions(max_num_seqs=args.requests, max_model_len=MAX_LEN))
    proving = time.perf_counter() - begin
    work = workload(args.requests, loaded.vocabulary, args.longest)
    rows: dict[str, list[dict[str, Any]]] = {}
    with engine, torch.inference_mode():
        run_engine(engine, work[:2])
        if args.vllm:
            run_vllm(args.vllm, work[:2])
        run_transformers(loaded.module, [(p, 4) for p, _ in work[:2]], batched=True)
        half = sum(c for _, c in work) // 2
        for _ in range(args.repeat):
            rows.setdefault("engine", []).append(run_engine(engine, work))
            kept = run_engine(engine, work, half, clear_cache=False)
            rows.setdefault("engine, one keep-pause", []).append(kept)
            recomputed = run_engine(engine, work, half, clear_cache=True)
            rows.setdefault("engine, one keep-pause, recomputed", []).append(recomputed)
            single = run_transformers(loaded.module, work, batched=False)
            rows.setdefault("transformers, one by one", []).append(single)
            padded = run_transformers(loaded.module, work, batched=True)
            rows.setdefault("transformers, one padded batch", []).append(padded)
            if args.vllm:
                rows.setdefault("vLLM server", []).append(run_vllm(args.vllm, work))
    best = {name: max(found, key=lambda r: r["tok_s"]) for name, found in rows.items()}
    report = {
        "model": args.model,
        "requests": args.requests,
        "threads": torch.get_num_threads(),
        "load_s": round(loading, 2),
        "prove_and_digest_s": round(proving, 2),
        "rows": best,
    }
    if args.json:
        print(json.dumps(report))
        return
    print(f"{args.model}: {args.requests} requests, {report['threads']} threads")
    print(f"load {loading:.2f} s, prove and digest {proving:.2f} s")
    for name, row in best.items():
        pause = f"  pause to resume {row['pause_ms']:.1f} ms" if row.get("pause_ms") else ""
        print(
            f"{name:36} {row['tok_s']:8.1f} tok/s  ({row['tokens']} tokens in {row['seconds']:.2f} s){pause}"
        )


if __name__ == "__main__":
    main()
