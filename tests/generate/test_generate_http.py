"""The HTTP face: vLLM's routes and ours, over a real socket; and the process around it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from generate_server import Server, events, generate_body
from generate_world import VOCAB, Versions, marker_weights

from weightline.errors import FormatError, InvalidInput, Unavailable, WeightlineError, from_dict

pytestmark = pytest.mark.torch


@pytest.fixture
def server(models: Any, engines: Any) -> Iterator[Server]:
    opened = Server(engines(models("qwen3", marker=True), max_model_len=500))
    yield opened
    opened.close()


# vLLM's surface.


def test_an_answer_has_vllms_shape_and_ours_beside_it(server: Server) -> None:
    answer = server.generate(sampling_params={"logprobs": 2, "max_tokens": 3}, request_id="mine")
    assert answer["request_id"] == "generate-tokens-mine"
    (choice,) = answer["choices"]
    assert choice["index"] == 0
    assert choice["token_ids"] == [0, 0, 0]
    assert choice["finish_reason"] == "length"
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 3}]
    assert choice["kv_weight_versions"] == [{"version": "default", "start": 0, "end": 7}]
    assert choice["kv_recomputed_at"] == []
    content = choice["logprobs"]["content"]
    assert len(content) == 3
    assert (content[0]["token_id"], content[0]["rank"]) == (0, 1)
    assert len(content[0]["top_logprobs"]) == 2
    assert content[0]["top_logprobs"][0]["logprob"] == content[0]["logprob"] <= 0


def test_without_logprobs_the_field_is_null_and_the_header_names_the_request(server: Server) -> None:
    answer = server.http.post(
        "/inference/v1/generate", json=generate_body(request_id="body"), headers={"X-Request-Id": "header"}
    ).json()
    assert answer["request_id"] == "generate-tokens-header"
    assert answer["choices"][0]["logprobs"] is None


def test_n_gives_one_list_of_spans_for_each_sequence(server: Server) -> None:
    answer = server.generate(sampling_params={"n": 3, "temperature": 1.0, "seed": 1})
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert all(
        c["weight_versions"] == [{"version": "default", "start": 0, "end": 6}] for c in answer["choices"]
    )


def test_a_stream_sends_spans_on_its_last_chunk_only(server: Server) -> None:
    with server.http.stream("POST", "/inference/v1/generate", json=generate_body(stream=True)) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = events(response.iter_lines())
    choices = [c["choices"][0] for c in chunks]
    assert [t for c in choices for t in c["token_ids"]] == [0] * 6
    assert [c["weight_versions"] for c in choices[:-1]] == [None] * 5
    assert [c["finish_reason"] for c in choices] == [None] * 5 + ["length"]
    assert choices[-1]["weight_versions"] == [{"version": "default", "start": 0, "end": 6}]


def test_a_stream_of_several_sequences_ends_each_once(server: Server) -> None:
    body = generate_body(stream=True, sampling_params={"n": 3, "temperature": 1.0, "seed": 1, "logprobs": 0})
    with server.http.stream("POST", "/inference/v1/generate", json=body) as response:
        chunks = events(response.iter_lines())
    finals = [c["choices"][0] for c in chunks if c["choices"][0]["finish_reason"]]
    assert sorted(f["index"] for f in finals) == [0, 1, 2]
    assert all(f["weight_versions"][-1]["end"] == 6 for f in finals)


def test_an_aborted_stream_gets_its_last_chunk_though_it_has_no_token(server: Server) -> None:
    server.post("/pause?mode=keep")
    body = generate_body(stream=True, request_id="queued")
    got: list[Any] = []

    def read() -> None:
        with server.http.stream("POST", "/inference/v1/generate", json=body) as response:
            got.extend(events(response.iter_lines()))

    reader = threading.Thread(target=read)
    reader.start()
    server.wait_until(lambda state: state.waiting == 1)
    assert server.post("/abort_requests", {"request_ids": ["queued", "unknown"]}) == {
        "status": "aborted",
        "aborted": 2,
    }
    reader.join(60)
    (chunk,) = got
    choice = chunk["choices"][0]
    assert (choice["token_ids"], choice["finish_reason"], choice["weight_versions"]) == ([], "abort", [])
    assert server.post("/resume") == {"status": "resumed"}


def test_pause_resume_and_labels_answer_as_vllm_does(server: Server) -> None:
    assert server.http.get("/is_paused").json() == {"is_paused": False}
    assert server.http.get("/weight_info").json() == {"weight_version": "default"}
    for mode in ("abort", "wait", "keep"):
        assert server.post(f"/pause?mode={mode}&clear_cache=false") == {"status": "paused"}
        assert server.http.get("/is_paused").json() == {"is_paused": True}
        assert server.http.get("/health").status_code == 200
        assert server.post("/resume") == {"status": "resumed"}
    assert server.post("/pause") == {"status": "paused"}
    assert server.post("/resume") == {"status": "resumed"}
    assert server.post("/update_weight_version", {"new_version": "v1"}) == {
        "success": True,
        "new_version": "v1",
    }
    assert server.http.get("/weight_info").json() == {"weight_version": "v1"}
    assert server.http.get("/get_world_size").json() == {"world_size": 1}
    assert server.post("/reset_prefix_cache") == {"success": True}
    assert server.generate()["choices"][0]["weight_versions"][0]["version"] == "v1"


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("/pause?mode=gently", None, "mode"),
        ("/pause?clear_cache=perhaps", None, "clear_cache"),
        ("/update_weight_version", {"new_version": 3}, "new_version"),
        ("/update_weight_version", {}, "new_version"),
        ("/abort_requests", {"request_ids": [1]}, "request_ids"),
        ("/inference/v1/generate", [1], "request body"),
        ("/inference/v1/generate", {"sampling_params": {}}, "token_ids"),
        ("/inference/v1/generate", generate_body(token_ids=[]), "token_ids"),
        ("/inference/v1/generate", generate_body(token_ids=[VOCAB]), "token_ids"),
        ("/inference/v1/generate", generate_body(token_ids=[-1]), "token_ids"),
        ("/inference/v1/generate", generate_body(token_ids=["a"]), "token_ids"),
        ("/inference/v1/generate", generate_body(token_ids=[1] * 500), "max_model_len"),
        ("/inference/v1/generate", generate_body(output_mode="speech"), "output_mode"),
        *(
            ("/inference/v1/generate", generate_body(sampling_params={field: value}), field)
            for field, value in (
                ("n", 0),
                ("n", 5),
                ("temperature", -1),
                ("temperature", "hot"),
                ("top_p", 0),
                ("top_p", 1.5),
                ("top_k", -2),
                ("max_tokens", 0),
                ("max_tokens", True),
                ("logprobs", 21),
                ("seed", 2**63),
                ("stop_token_ids", ["x"]),
                ("presence_penalty", 2.5),
                ("bad_words", ["end"]),
                ("prompt_logprobs", 1),
                ("logit_bias", {"97": 1}),
                ("stop", ["end"]),
                ("beam_width", 4),
            )
        ),
    ],
)
def test_bad_input_is_a_400_that_names_the_field(server: Server, path: str, body: Any, names: str) -> None:
    answer = server.http.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert names in error["message"]
    assert error["code"] == 400
    assert error["type"] in ("BadRequestError", "Bad Request")
    assert "\n" not in error["message"]


def test_neutral_values_of_parameters_we_lack_are_accepted(server: Server) -> None:
    neutral = {
        "bad_words": [],
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_p": 0,
        "stop": None,
        "detokenize": False,
    }
    assert server.generate(sampling_params=neutral)["choices"][0]["token_ids"] == [0] * 6


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_row(server: Server, stream: bool) -> None:
    body = json.dumps(generate_body(stream=stream, sampling_params={"max_tokens": 480})).encode()
    head = f"POST /inference/v1/generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(server.socket.getsockname()) as client:
        client.sendall(head + body)
        server.wait_until(lambda state: state.running == 1)
        server.post("/pause?mode=keep")
    # Gone while frozen: noticed without a token having to come.
    server.wait_until(lambda state: state.running == 0)
    server.post("/resume")
    assert server.generate()["choices"][0]["finish_reason"] == "length"


# A refit over HTTP.


def test_a_running_stream_spans_a_refit_over_http(server: Server, models: Any, tmp_path: Path) -> None:
    versions = Versions(models("qwen3", marker=True), tmp_path)
    body = generate_body(stream=True, sampling_params={"max_tokens": 400})
    with server.http.stream("POST", "/inference/v1/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        order = versions.order(marker_weights(versions.weights["default"], 8), label="8@beef", version=8)
        opened = server.post("/weightline/prepare", msgspec.to_builtins(order))
        assert (opened["path"], opened["standby_bytes"]) == ("in_place", 0)
        assert opened["why"] == f"{opened['elements']} changed elements are fewer than 1000000"
        session = {"session": opened["session"]}
        assert server.http.post("/weightline/apply", json=session).status_code == 409
        server.post("/pause?mode=keep&clear_cache=false")
        server.post("/weightline/apply", session)
        refused = server.http.post("/resume")
        assert refused.status_code == 409
        assert refused.json()["kind"] == "conflict"
        assert server.post("/weightline/verify", session) == {"verified": "live"}
        server.post("/weightline/invalidate", session)
        assert server.post("/weightline/label", session) == {"label": "8@beef", "version": 8}
        server.post("/resume")
        server.post("/weightline/close", session)
        chunks = events(lines)
    last = chunks[-1]["choices"][0]
    before, after = last["weight_versions"]
    assert (before["version"], after["version"], after["end"]) == ("default", "8@beef", 400)
    tokens = [t for c in chunks for t in c["choices"][0]["token_ids"]]
    assert tokens[-(400 - after["start"]) :] == [8] * (400 - after["start"])
    assert set(tokens[: -(400 - after["start"])]) <= {0}


def test_one_route_switches_a_running_stream_to_standby_tensors(
    server: Server, models: Any, tmp_path: Path
) -> None:
    server.engine.refits.standby_from = 0
    versions = Versions(models("qwen3", marker=True), tmp_path)
    body = generate_body(stream=True, sampling_params={"max_tokens": 400})
    with server.http.stream("POST", "/inference/v1/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        order = versions.order(marker_weights(versions.weights["default"], 8), label="8@beef", version=8)
        opened = server.post("/weightline/prepare", msgspec.to_builtins(order))
        assert opened["path"] == "standby"
        switched = server.post("/weightline/switch", {"session": opened["session"], "clear_cache": True})
        assert switched.items() >= {"label": "8@beef", "version": 8, "verified": "live"}.items()
        assert switched["standby_bytes"] == opened["standby_bytes"] > 0
        assert server.http.get("/is_paused").json() == {"is_paused": False}
        server.post("/weightline/close", {"session": opened["session"]})
        chunks = events(lines)
    last = chunks[-1]["choices"][0]
    assert [s["version"] for s in last["weight_versions"]] == ["default", "8@beef"]
    assert last["kv_recomputed_at"] == [last["weight_versions"][1]["start"]]
    found = server.post("/weightline/digests", {"names": ["lm_head.weight"]})
    assert (found["digests"], found["label"], found["version"]) == (
        {"lm_head.weight": order.digests["lm_head.weight"]},
        "8@beef",
        8,
    )


def test_control_errors_are_weightline_errors(server: Server, models: Any, tmp_path: Path) -> None:
    versions = Versions(models("qwen3", marker=True), tmp_path)
    base = versions.weights["default"]
    order = versions.order(marker_weights(base, 2), label="v2", version=2, base=(1, "default"))
    answer = server.http.post("/weightline/prepare", json=msgspec.to_builtins(order))
    error = from_dict(answer.json())
    assert answer.status_code == error.status.http == 502
    assert error.kind == "refit"
    assert error.engine_state == "old"  # type: ignore[attr-defined]
    for path, body, status in (
        ("prepare", {"run": 3}, 400),
        ("apply", {}, 400),
        ("apply", {"session": "none"}, 409),
        ("digests", {"names": ["ghost"]}, 400),
    ):
        answer = server.http.post(f"/weightline/{path}", json=body)
        assert answer.status_code == status
        assert isinstance(from_dict(answer.json()), WeightlineError)


def test_the_followers_port_understands_this_engine(server: Server, models: Any, tmp_path: Path) -> None:
    """The records on both sides of the wire, held together: they are defined in two layers."""
    from weightline.generate.wire import EngineState, RefitOrder
    from weightline.rollout.engines.base import EngineDescription, Refit

    # This engine forms no groups, so nobody gives it whole tensors.
    assert set(EngineDescription.__struct_fields__) - {"groups"} <= set(EngineState.__struct_fields__)
    assert set(Refit.__struct_fields__) - {"whole"} == set(RefitOrder.__struct_fields__) - {"holder"}
    raw = server.http.get("/weightline/describe").content
    state = msgspec.json.decode(raw, type=EngineDescription)
    assert (state.kind, state.label, state.version, state.paused) == ("embedded", "default", None, False)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= {t.name for t in state.tensors}
    assert {t.dtype for t in state.tensors} == {"F32"}


def test_a_quarantined_engine_refuses_generation_and_stays_healthy(server: Server) -> None:
    server.engine.call(lambda: server.engine.refits.host.quarantine("test"))
    answer = server.http.post("/inference/v1/generate", json=generate_body())
    assert answer.status_code == 503
    assert "quarantined" in answer.json()["error"]["message"]
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/weightline/describe").json()["quarantined"] is True


# The process.


def _serve(queue: Any, folder: str) -> None:
    from weightline.generate import serve_engine

    serve_engine(
        Path(folder), port=0, max_model_len=128, threads=1, served_model_name="policy", ready=queue.put
    )


def test_a_signal_ends_running_requests_and_the_process_cleanly(models: Any) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_serve, args=(queue, str(models("qwen3", marker=True))))
    process.start()
    try:
        facts = queue.get(timeout=90)
        assert {"url", "port", "pid", "instance", "model"} <= set(facts)
        with httpx.Client(base_url=facts["url"], timeout=60, trust_env=False) as http:
            assert http.get("/health").status_code == 200
            assert http.get("/v1/models").json()["data"][0]["id"] == "policy"
            http.post("/pause?mode=keep")
            with http.stream("POST", "/inference/v1/generate", json=generate_body(stream=True)) as response:
                os.kill(process.pid or 0, signal.SIGTERM)
                (chunk,) = events(response.iter_lines())
        assert chunk["choices"][0]["finish_reason"] == "abort"
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        queue.close()
        queue.join_thread()


def test_a_port_in_use_is_named_before_anything_is_loaded(models: Any) -> None:
    from weightline.generate import serve_engine

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"127.0.0.1:{port}") as caught:
            serve_engine(models(), port=port)
    assert "--port" in caught.value.hint


@pytest.mark.parametrize(
    "break_it", ["absent", "no config", "no weights", "bad config", "not causal", "cut", "short"]
)
def test_a_bad_model_folder_is_one_line_that_names_it(break_it: str, models: Any, tmp_path: Path) -> None:
    import shutil

    from weightline.generate import serve_engine

    folder = tmp_path / "model"
    shutil.copytree(models(), folder)
    config, weights = folder / "config.json", folder / "model.safetensors"
    if break_it == "absent":
        shutil.rmtree(folder)
    elif break_it == "no config":
        config.unlink()
    elif break_it == "no weights":
        weights.unlink()
    elif break_it == "bad config":
        config.write_text('{"model_type": "no-such-model"}')
    elif break_it == "not causal":
        config.write_text('{"model_type": "vit"}')
    elif break_it == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        told = json.loads(config.read_text())
        config.write_text(json.dumps({**told, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}))
    with pytest.raises((InvalidInput, FormatError)) as caught:
        serve_engine(folder, port=0, max_model_len=128)
    assert str(folder) in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("options", "names"), [({"max_model_len": 4096}, "max_model_len"), ({"dtype": "int4"}, "dtype")]
)
def test_limits_and_dtype_are_checked(options: Any, names: str, models: Any) -> None:
    from weightline.generate import serve_engine

    with pytest.raises(InvalidInput, match=names):
        serve_engine(models(), port=0, **options)
