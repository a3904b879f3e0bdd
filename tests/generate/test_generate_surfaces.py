"""Spans on every HTTP surface, and the routes around generation: metrics, labels, named calls."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from generate_server import Server, events, generate_body
from generate_world import Versions, marker_weights
from vllm_exchanges import CHAT, COMPLETIONS, GENERATE, RECORDING

pytestmark = pytest.mark.torch

ROUTES: dict[str, dict[str, Any]] = {
    "tokens": {"path": GENERATE, "body": {}},
    "text": {"path": GENERATE, "body": {"output_mode": "text"}},
    "completions": {"path": COMPLETIONS, "body": {"return_weight_versions": True}},
    "chat": {"path": CHAT, "body": {"return_weight_versions": True}},
}


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Server]:
    from weightline.generate import Engine

    with Engine.open(tiny, max_num_seqs=8, max_model_len=600, prefix_tokens=0) as engine:
        opened = Server(engine)
        yield opened
        opened.close()


@pytest.fixture(autouse=True)
def as_it_was(server: Server) -> Iterator[None]:
    """Every test finds the engine running under its first label."""
    yield
    server.post("/resume")
    server.post("/update_weight_version", {"new_version": "default"})


def request(route: str, tokens: int, **body: Any) -> tuple[str, dict[str, Any]]:
    """Path and body of a greedy request of `tokens` tokens on that route."""
    told = {**ROUTES[route]["body"], **body}
    sampling = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    if route in ("tokens", "text"):
        return GENERATE, generate_body(sampling_params=sampling, **told)
    prompt = (
        {"prompt": "one two"} if route == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    )
    return ROUTES[route]["path"], {**prompt, **sampling, **told}


def choices(chunks: list[Any]) -> list[Any]:
    return [c for chunk in chunks for c in chunk["choices"]]


def relabel(server: Server, label: str) -> None:
    """Until a token has come under the new label."""
    server.post("/pause?mode=keep&clear_cache=false")
    server.post("/update_weight_version", {"new_version": label})
    sampled = server.engine.stepper.sampled
    server.post("/resume")
    server.wait_until(lambda _: server.engine.stepper.sampled > sampled)


@pytest.mark.parametrize("route", ROUTES)
def test_there_and_back_again_is_three_ranges_on_the_last_chunk_only(server: Server, route: str) -> None:
    path, body = request(route, 500, stream=True)
    with server.http.stream("POST", path, json=body) as response:
        lines = response.iter_lines()
        first = next(lines)
        relabel(server, "B")
        relabel(server, "default")
        chunks = [json.loads(first.removeprefix("data: ")), *events(lines)]
    *early, last = choices(chunks)
    assert not any(c.get("weight_versions") for c in early)
    spans = last["weight_versions"]
    assert [s["version"] for s in spans] == ["default", "B", "default"]
    assert [s["start"] for s in spans] == [0, *(s["end"] for s in spans[:-1])]
    assert spans[-1]["end"] == 500


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_before_the_first_token_is_told_with_an_empty_list(
    server: Server, route: str, stream: bool
) -> None:
    server.post("/pause?mode=keep")
    path, body = request(route, 20, stream=stream)
    got: list[Any] = []

    def read() -> None:
        if stream:
            with server.http.stream("POST", path, json=body) as response:
                got.extend(choices(events(response.iter_lines())))
        else:
            got.extend(server.post(path, body)["choices"])

    reader = threading.Thread(target=read)
    reader.start()
    server.wait_until(lambda state: state.waiting == 1)
    assert server.post("/abort_requests", {})["aborted"] == 1
    reader.join(60)
    ended = [c for c in got if c["finish_reason"]]
    assert [(c["finish_reason"], c["weight_versions"]) for c in ended] == [("abort", [])]


@pytest.mark.parametrize("route", ["completions", "chat"])
@pytest.mark.parametrize("stream", [False, True])
def test_openai_routes_have_spans_only_when_asked(server: Server, route: str, stream: bool) -> None:
    for asked in (False, True):
        path, body = request(route, 4, stream=stream, return_weight_versions=asked)
        if stream:
            with server.http.stream("POST", path, json=body) as response:
                found = choices(events(response.iter_lines()))
        else:
            found = server.post(path, body)["choices"]
        lists = [c["weight_versions"] for c in found if "weight_versions" in c]
        assert lists == ([[{"version": "default", "start": 0, "end": 4}]] if asked else [])


def test_n_choices_and_several_prompts_have_a_list_each(server: Server) -> None:
    path, body = request("completions", 3, prompt=["one", "two"], n=2, temperature=1.0)
    found = server.post(path, body)["choices"]
    assert [c["index"] for c in found] == [0, 1, 2, 3]
    assert all(c["weight_versions"] == [{"version": "default", "start": 0, "end": 3}] for c in found)


@pytest.mark.parametrize("stream", [False, True])
def test_a_strict_client_gets_the_older_form_without_any_of_the_new_fields(
    server: Server, stream: bool
) -> None:
    path, body = request("tokens", 4, stream=stream, return_weight_versions=False)
    if stream:
        with server.http.stream("POST", path, json=body) as response:
            found = choices(events(response.iter_lines()))
    else:
        found = server.post(path, body)["choices"]
    older = {
        "index",
        "logprobs",
        "finish_reason",
        "stop_reason",
        "token_ids",
        "routed_experts",
        "sampling_mask",
    }
    assert all(set(c) == older for c in found)


@pytest.mark.parametrize("route", ["completions", "chat"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(server: Server, route: str, stream: bool) -> None:
    import socket

    path, body = request(route, 500, stream=stream)
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    with socket.create_connection(server.socket.getsockname()) as client:
        client.sendall(head + raw)
        server.wait_until(lambda state: state.running == 1)
        server.post("/pause?mode=keep")
    server.wait_until(lambda state: state.running == 0)


def numbers(server: Server) -> dict[str, float]:
    """Name of a sample (with its reason or bound) -> value; every line must read as one."""
    text = server.http.get("/metrics").text
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("# "):
            assert re.fullmatch(r"# (HELP|TYPE) [a-zA-Z0-9_:]+ .+", line)
            continue
        read = re.fullmatch(r'([a-zA-Z0-9_:]+)\{((?:[a-z_]+="[^"]*",?)+)\} ([0-9.e+-]+)', line)
        assert read, line
        more = re.search(r'(?:finished_reason|le)="([^"]*)"', read[2])
        found[read[1] + (f"[{more[1]}]" if more else "")] = float(read[3])
    return found


def test_metrics_count_what_happened_under_vllms_names(server: Server) -> None:
    before = numbers(server)
    server.post(*request("tokens", 5))
    server.post("/pause?mode=keep")
    after = numbers(server)
    grew = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert grew["vllm:prompt_tokens_total"] == 5
    assert grew["vllm:generation_tokens_total"] == 5
    assert grew["vllm:request_success_total[length]"] == 1
    assert grew["vllm:time_to_first_token_seconds_count"] == 1
    assert grew["vllm:e2e_request_latency_seconds_bucket[+Inf]"] == 1
    theirs = set(json.loads(RECORDING.read_text())["metrics"])
    ours = {
        line.split()[2] for line in server.http.get("/metrics").text.splitlines() if "# TYPE vllm" in line
    }
    assert ours <= theirs


def test_a_label_without_weights_is_answered_as_vllm_does_and_counted(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    name = "weightline:labels_without_weights_total"
    before = numbers(server)[name]
    for label in ("claim", "claim"):
        answer = server.post("/update_weight_version", {"new_version": label})
        assert answer == {"success": True, "new_version": label}
    assert numbers(server)[name] == before + 1
    assert "claim" in caplog.text


def test_a_label_without_weights_and_weights_without_a_label_are_refused_on_our_own_route(
    models: Any, engines: Any, tmp_path: Path
) -> None:
    folder = models("qwen3", marker=True)
    server = Server(engines(folder))
    try:
        versions = Versions(folder, tmp_path)
        order = versions.order(marker_weights(versions.weights["default"], 8), label="8@beef", version=8)
        session = {"session": server.post("/weightline/prepare", msgspec.to_builtins(order))["session"]}
        server.post("/pause?mode=keep")
        assert server.http.post("/weightline/label", json=session).status_code == 409
        assert server.http.get("/weight_info").json() == {"weight_version": "default"}
        server.post("/weightline/apply", session)
        assert server.http.post("/weightline/label", json=session).status_code == 409
        assert server.http.post("/resume").status_code == 409
        told = numbers(server)
        assert told["weightline:refused_labels_total"] == 2
        assert told["weightline:weights_without_label_total"] == 1
        assert told["weightline:labels_without_weights_total"] == 0
        server.post("/weightline/verify", session)
        assert server.post("/weightline/label", session) == {"label": "8@beef", "version": 8}
        server.post("/resume")
        assert server.generate()["choices"][0]["weight_versions"][0]["version"] == "8@beef"
    finally:
        server.close()


def test_only_named_methods_can_be_called(server: Server) -> None:
    assert server.post("/collective_rpc", {"method": "check_health"}) == {"results": [None]}
    assert server.post("/collective_rpc", {"method": "get_weight_version"}) == {"results": ["default"]}
    body = {"method": "weight_digests", "args": ["lm_head.weight"]}
    (digests,) = server.post("/collective_rpc", body)["results"]
    assert set(digests) == {"lm_head.weight"}
    for bad in (
        {"method": "stop"},
        {"method": "__class__"},
        {"method": "check_health", "args": ["x"]},
        {"method": "check_health", "kwargs": {"a": "b"}},
        {"method": "weight_digests", "args": ["ghost"]},
    ):
        answer = server.http.post("/collective_rpc", json=bad)
        assert answer.status_code == 400, bad
        assert str(bad["method"]) in answer.text or "ghost" in answer.text


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (COMPLETIONS, "suffix", "x"),
        (COMPLETIONS, "best_of", 2),
        (COMPLETIONS, "no_such_field", 1),
        (COMPLETIONS, "prompt", [[]]),
        (COMPLETIONS, "prompt", [1, "a"]),
        (COMPLETIONS, "cache_salt", ""),
        (CHAT, "tools", [{"type": "function"}]),
        (CHAT, "response_format", {"type": "json_object"}),
        (CHAT, "messages", [{"content": "x"}]),
        (CHAT, "messages", [{"role": "user", "content": [{"type": "image_url"}]}]),
        (GENERATE, "kv_transfer_params", {"a": 1}),
    ],
)
def test_what_is_not_implemented_is_a_400_that_names_it(
    server: Server, path: str, field: str, value: Any
) -> None:
    route = {COMPLETIONS: "completions", CHAT: "chat", GENERATE: "tokens"}[path]
    answer = server.http.post(path, json={**request(route, 2)[1], field: value})
    assert answer.status_code == 400
    names = "token_ids" if value == [[]] else field if field != "messages" else "message"
    assert names in answer.json()["error"]["message"]


def test_the_other_abort_route_wants_ids_and_says_nothing(server: Server) -> None:
    assert server.http.post("/inference/v1/abort_requests", json={}).status_code == 400
    answer = server.http.post("/inference/v1/abort_requests", json={"request_ids": ["ghost"]})
    assert (answer.status_code, answer.content) == (200, b"")
