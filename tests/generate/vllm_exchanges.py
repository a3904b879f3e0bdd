"""The requests of which real vLLM answers are kept, and how an answer is put down: used by the recorder, by
the replay against the embedded engine, and by the check of the recording against a live vLLM.

Server: `tiny_model(qwen3)` of weightline.demo as model `m`, 8 sequences of at most 2048 tokens, fp32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

RECORDING = Path(__file__).parent / "recorded" / "vllm-0.32.json"
PROMPT = [5, 9, 200, 44, 61]
GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
SAMPLED = frozenset({"tokens sampled", "tokens n", "tokens stream n", "completion n", "chat n"})
"""Exchanges drawn at random: each engine has streams of its own."""
Exchange = dict[str, Any]


def _generate(name: str, sampling: dict[str, Any] | None = None, **body: Any) -> Exchange:
    """Greedy, six tokens, no stop token, unless told otherwise; None leaves a parameter out."""
    params = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, **(sampling or {})}
    params = {key: value for key, value in params.items() if value is not None}
    body = {"token_ids": PROMPT, "sampling_params": params, **body}
    return {"name": name, "method": "POST", "path": GENERATE, "body": body}


def _post(name: str, path: str, body: Any = None, **more: Any) -> Exchange:
    return {"name": name, "method": "POST", "path": path, "body": body, **more}


def _get(name: str, path: str) -> Exchange:
    return {"name": name, "method": "GET", "path": path, "body": None}


def _answers() -> list[Exchange]:
    sampled = {"temperature": 1.0, "seed": 3}
    return [
        _generate("tokens"),
        _generate("tokens with id", request_id="mine"),
        _generate("tokens with logprobs", {"logprobs": 2}),
        _generate("tokens with logprobs 0", {"logprobs": 0}),
        _generate("tokens sampled", {**sampled, "top_p": 0.9, "top_k": 20, "min_p": 0.01}),
        _generate("tokens n", {**sampled, "n": 3}),
        _generate("tokens min_tokens", {"ignore_eos": False, "min_tokens": 3}),
        _generate("tokens penalties", {"presence_penalty": 0.5, "frequency_penalty": 0.25}),
        _generate("tokens repetition", {"repetition_penalty": 1.3, "max_tokens": 12}),
        _generate("tokens logit_bias", {"logit_bias": {"33": 100.0}}),
        _generate("tokens allowed", {"allowed_token_ids": [7, 8, 9]}),
        _generate("tokens salt", cache_salt="salt", priority=0, model="m", return_token_ids=True),
        _generate("tokens stream", stream=True),
        _generate("tokens stream logprobs", {"logprobs": 1}, stream=True),
        _generate("tokens stream usage", stream=True, stream_options={"include_usage": True}),
        _generate("tokens stream n", {**sampled, "n": 2, "max_tokens": 3}, stream=True),
        _generate("text", output_mode="text"),
        _generate("text logprobs", {"logprobs": 2}, output_mode="text"),
        _generate("text long", {"max_tokens": 64}, output_mode="text"),
        _generate("text stream", {"max_tokens": 24}, output_mode="text", stream=True),
        _generate("text stream logprobs", {"logprobs": 1}, output_mode="text", stream=True),
        _generate("text special tokens", {"skip_special_tokens": False}, output_mode="text"),
    ]


def _refusals() -> list[Exchange]:
    fields: list[tuple[str, Any]] = [
        ("n", 0),
        ("n", 9),
        ("n", 2),
        ("temperature", -1),
        ("temperature", 3),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("max_tokens", 0),
        ("min_tokens", 9),
        ("logprobs", 21),
        ("logprobs", -2),
        ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("stop", [""]),
        ("stop_token_ids", ["x"]),
        ("seed", "x"),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [9999]),
        ("no_such_parameter", 1),
    ]
    return [
        *(_generate(f"refuse {field}={json.dumps(value)}", {field: value}) for field, value in fields),
        _generate("refuse stop without text", {"stop": "x", "detokenize": False}),
        _generate("refuse text without text", {"detokenize": False}, output_mode="text"),
        _generate("refuse empty prompt", token_ids=[]),
        _generate("refuse negative token", token_ids=[-1]),
        _generate("refuse token beyond the vocabulary", token_ids=[100000]),
        _generate("refuse token that is text", token_ids=["a"]),
        _generate("refuse long prompt", token_ids=[7] * 2048),
        _generate("refuse output_mode", output_mode="speech"),
        _generate("refuse salt", cache_salt=""),
        _generate("refuse model", model="other"),
        _generate("refuse priority", priority=5),
        _generate("refuse stream", stream="perhaps"),
        _generate("refuse stream_options", stream_options={"include_usage": True}),
        _post("refuse list", GENERATE, [1]),
        _post("refuse no tokens", GENERATE, {"sampling_params": {}}),
        _post("refuse no sampling_params", GENERATE, {"token_ids": PROMPT}),
        _post("refuse broken JSON", GENERATE, raw="{"),
        _post("refuse content type", GENERATE, raw="{}", content_type="text/plain"),
        _post("refuse pause mode", "/pause?mode=gently"),
        _post("refuse clear_cache", "/pause?clear_cache=perhaps"),
        _post("refuse int label", "/update_weight_version", {"new_version": 3}),
        _post("refuse null label", "/update_weight_version", {"new_version": None}),
        _post("refuse no label", "/update_weight_version", {}),
        _post("refuse no label body", "/update_weight_version"),
        _post("refuse abort body", "/abort_requests", raw="{"),
        _post("refuse abort list", "/abort_requests", [1]),
        _post("refuse rpc without method", "/collective_rpc", {}),
        _post("refuse rpc list", "/collective_rpc", [1]),
        _post("refuse rpc body", "/collective_rpc", raw="{"),
        _post("refuse reset flag", "/reset_prefix_cache?reset_running_requests=perhaps"),
        _get("refuse route", "/no_such_route"),
        _get("refuse method", "/pause"),
    ]


def _openai() -> list[Exchange]:
    plain = {"model": "m", "prompt": "hello there", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    chat = {"model": "m", "messages": said, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    sampled = {"temperature": 1.0, "seed": 3, "n": 2}
    return [
        _post("completion", COMPLETIONS, plain),
        _post("completion tokens", COMPLETIONS, {**plain, "prompt": PROMPT}),
        _post("completion batch", COMPLETIONS, {**plain, "prompt": ["one", "two"]}),
        _post("completion logprobs", COMPLETIONS, {**plain, "logprobs": 2}),
        _post("completion echo", COMPLETIONS, {**plain, "echo": True}),
        _post("completion n", COMPLETIONS, {**plain, **sampled}),
        _post("completion token ids", COMPLETIONS, {**plain, "return_token_ids": True}),
        _post("completion stream", COMPLETIONS, {**plain, "stream": True}),
        _post("completion stream usage", COMPLETIONS, {**plain, **usage}),
        _post("completion stream logprobs", COMPLETIONS, {**plain, "stream": True, "logprobs": 1}),
        _post(
            "completion default length", COMPLETIONS, {k: v for k, v in plain.items() if k != "max_tokens"}
        ),
        _post("chat", CHAT, chat),
        _post("chat logprobs", CHAT, {**chat, "logprobs": True, "top_logprobs": 2}),
        _post("chat n", CHAT, {**chat, **sampled}),
        _post("chat stream", CHAT, {**chat, "stream": True}),
        _post("chat stream usage", CHAT, {**chat, **usage}),
        _post("chat stream logprobs", CHAT, {**chat, "stream": True, "logprobs": True, "top_logprobs": 1}),
        _post("chat token ids", CHAT, {**chat, "return_token_ids": True}),
        _post("refuse completion model", COMPLETIONS, {**plain, "model": "other"}),
        _post("refuse completion prompt", COMPLETIONS, {k: v for k, v in plain.items() if k != "prompt"}),
        _post("refuse completion length", COMPLETIONS, {**plain, "max_tokens": 5000}),
        _post("refuse completion temperature", COMPLETIONS, {**plain, "temperature": -1}),
        _post("refuse completion options", COMPLETIONS, {**plain, "stream_options": {"include_usage": True}}),
        _post("refuse chat messages", CHAT, {k: v for k, v in chat.items() if k != "messages"}),
        _post("refuse chat empty", CHAT, {**chat, "messages": []}),
        _post("refuse chat top_logprobs", CHAT, {**chat, "top_logprobs": 2}),
        _post("refuse chat max_tokens", CHAT, {**chat, "max_tokens": 0}),
        _get("models", "/v1/models"),
        _get("version", "/version"),
        _get("ping", "/ping"),
    ]


def _control() -> list[Exchange]:
    long = {"max_tokens": 400}
    return [
        _get("health", "/health"),
        _get("paused at first", "/is_paused"),
        _get("label at first", "/weight_info"),
        _get("world size", "/get_world_size"),
        _post("reset cache", "/reset_prefix_cache"),
        _post("reset cache of running", "/reset_prefix_cache?reset_running_requests=true"),
        _post("abort none", "/abort_requests", {}),
        _post("abort unknown", "/abort_requests", {"request_ids": ["a", "b"]}),
        _post("pause keep", "/pause?mode=keep&clear_cache=false"),
        _post("pause again", "/pause?mode=keep"),
        _get("paused", "/is_paused"),
        _get("health while paused", "/health"),
        {**_generate("queued stream", long, request_id="q1", stream=True), "begin": True},
        {**_generate("queued", long, request_id="q2"), "begin": True},
        {
            **_generate("queued text stream", long, request_id="q3", stream=True, output_mode="text"),
            "begin": True,
        },
        {**_generate("admitted in the pause", request_id="q4"), "begin": True},
        {"settle": 4},
        _post(
            "abort queued",
            "/abort_requests",
            {"request_ids": [f"generate-tokens-{i}" for i in ("q1", "q2", "q3", "ghost")]},
        ),
        {"end": ["queued stream", "queued", "queued text stream"]},
        _post("label", "/update_weight_version", {"new_version": "v1"}),
        _get("new label", "/weight_info"),
        _post("resume", "/resume"),
        {"end": ["admitted in the pause"]},
        _post("resume again", "/resume"),
        _get("resumed", "/is_paused"),
        _generate("id again", request_id="q1"),
        _post("label while running", "/update_weight_version", {"new_version": ""}),
        _post("label back", "/update_weight_version", {"new_version": "default"}),
        _post("pause wait", "/pause?mode=wait"),
        _post("resume after wait", "/resume"),
        _post("pause", "/pause"),
        _post("resume after abort", "/resume"),
    ]


def exchanges() -> list[Exchange]:
    """All of them, in order. `begin`: sent in the background, and ended by a later `end`; `settle`: wait
    until so many requests have arrived.
    """
    return [*_answers(), *_refusals(), *_openai(), *_control()]


def with_stops(said: str, tokens: list[int]) -> list[Exchange]:
    """Requests that stop, made from the greedy text and tokens of "text long"."""
    middle, late = said[3:5], said[8:12]
    length = {"max_tokens": 64}
    return [
        _generate("stop id", {**length, "stop_token_ids": [tokens[4]]}),
        _generate("stop id text", {**length, "stop_token_ids": [tokens[4]]}, output_mode="text"),
        _generate("stop id stream", {**length, "stop_token_ids": [tokens[2]]}, stream=True),
        _generate("stop text", {**length, "stop": middle}, output_mode="text"),
        _generate("stop text in tokens", {**length, "stop": [late]}),
        _generate(
            "stop text kept", {**length, "stop": late, "include_stop_str_in_output": True}, output_mode="text"
        ),
        _generate("stop text stream", {**length, "stop": [late, "never"]}, output_mode="text", stream=True),
        _generate("stop text stream unmet", {"stop": ["never met"]}, output_mode="text", stream=True),
        _generate("stop and min_tokens", {**length, "stop": [middle], "min_tokens": 20}, output_mode="text"),
    ]


def put_down(response: httpx.Response) -> dict[str, Any]:
    """Status, media type and body; of a stream the list of its events. Volatile values become their kind."""
    kind = response.headers.get("content-type", "")
    text = response.text
    if kind.startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in text.split("\n") if line]
        body: Any = [line if line == "[DONE]" else _normal(json.loads(line)) for line in lines]
    elif kind.startswith("application/json"):
        body = _normal(json.loads(text)) if text else None
    else:
        body = text or None
    return {"status": response.status_code, "media": kind, "body": body}


_RANDOM_ID = re.compile(r"(?<=-)[0-9a-f]{16,32}(?=$|-)")


def _normal(value: Any, key: str = "") -> Any:
    if key in ("created", "created_at") and isinstance(value, int):
        return 0
    if key in ("id", "request_id") and isinstance(value, str):
        return _RANDOM_ID.sub("*", value)
    if key == "root":
        return "*"
    if isinstance(value, float) and key == "logprob":
        return round(value, 4)
    if isinstance(value, list):
        return [_normal(v) for v in value]
    if isinstance(value, dict):
        return {k: _normal(v, k) for k, v in value.items()}
    return value


def perform(url: str, wanted: list[Exchange], settle: Callable[[int], None]) -> dict[str, dict[str, Any]]:
    """Send them all; name -> answer. `settle(n)` waits until n requests have arrived."""
    answers: dict[str, dict[str, Any]] = {}
    begun: dict[str, Future[httpx.Response]] = {}
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as http, ThreadPoolExecutor(8) as pool:

        def send(exchange: Exchange) -> httpx.Response:
            content = exchange.get("raw")
            if content is None and exchange["body"] is not None:
                content = json.dumps(exchange["body"])
            headers = (
                {} if content is None else {"content-type": exchange.get("content_type", "application/json")}
            )
            return http.request(exchange["method"], exchange["path"], content=content, headers=headers)

        for exchange in wanted:
            if "settle" in exchange:
                settle(exchange["settle"])
            elif "end" in exchange:
                for name in exchange["end"]:
                    answers[name] = put_down(begun.pop(name).result())
            elif exchange.get("begin"):
                begun[exchange["name"]] = pool.submit(send, exchange)
            else:
                answers[exchange["name"]] = put_down(send(exchange))
    return answers


def perform_all(url: str, settle: Callable[[int], None]) -> dict[str, Any]:
    """Everything, stops included: what a recording holds."""
    answers = perform(url, exchanges(), settle)
    choice = answers["text long"]["body"]["choices"][0]
    stops = with_stops(choice["text"], choice["token_ids"])
    return {"answers": {**answers, **perform(url, stops, settle)}}
