"""What the embedded adapter makes of an engine's answers: also of late, wrong and hostile ones."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import httpx
import msgspec
import pytest

from weightline.errors import (
    ConflictError,
    InvalidInput,
    RefitError,
    Unavailable,
    VersionGone,
    WeightlineError,
)
from weightline.rollout.engines import KINDS, EmbeddedEngine, open_engine
from weightline.rollout.engines.base import EngineDescription, Prepared, Refit

DESCRIPTION = EngineDescription(
    kind="embedded", label="default", version=None, run=None, instance="i", paused=False, quarantined=False,
    tensors=(),
)  # fmt: skip
REFIT = Refit(
    run="r",
    version=2,
    label="2@aa",
    have=1,
    have_label="1@aa",
    file=Path("/store/d.safetensors"),
    digests={"w": "00"},
)
PREPARED = Prepared(session="s-1", elements=3)


def answering(status=200, content=b"{}", seen=None):
    def handle(request):
        if seen is not None:
            seen.append(request)
        return httpx.Response(status, content=content)

    return EmbeddedEngine("http://engine", holder="me", transport=httpx.MockTransport(handle))


def test_a_description_is_decoded_and_fields_of_newer_engines_are_ignored():
    content = msgspec.json.encode({**msgspec.to_builtins(DESCRIPTION), "shine": 7})
    assert answering(content=content).describe() == DESCRIPTION


def test_every_verb_goes_to_its_route_with_its_session():
    seen = []
    engine = answering(
        content=b'{"session":"s-1","elements":3,"verified":"live","digests":{"w":"00"}}', seen=seen
    )
    assert engine.prepare(REFIT) == PREPARED
    engine.pause(PREPARED)
    engine.apply(PREPARED)
    assert engine.verify(PREPARED) == "live"
    engine.invalidate(PREPARED)
    engine.label(PREPARED)
    engine.resume()
    engine.rollback(PREPARED)
    engine.close_session(PREPARED)
    assert engine.digests(("w",)) == {"w": "00"}
    paths = [str(request.url).removeprefix("http://engine") for request in seen]
    verbs = ["apply", "verify", "invalidate", "label", "resume", "rollback", "close", "digests"]
    assert paths == ["/weightline/prepare", "/pause?mode=keep&clear_cache=false"] + [
        f"/{verb}" if verb == "resume" else f"/weightline/{verb}" for verb in verbs
    ]
    assert msgspec.json.decode(seen[0].content) == {
        "run": "r", "version": 2, "label": "2@aa", "have": 1, "have_label": "1@aa",
        "file": "/store/d.safetensors", "digests": {"w": "00"}, "holder": "me",
    }  # fmt: skip
    assert {request.method for request in seen} == {"POST"}
    assert msgspec.json.decode(seen[2].content) == {"session": "s-1"}


@pytest.mark.parametrize(
    "error",
    [
        RefitError("no tensor w", engine_state="old", hint="look"),
        RefitError("torn", engine_state="unknown"),
        ConflictError("another session", hint="wait"),
        VersionGone("gone"),
    ],
)
def test_an_error_of_the_engine_arrives_as_it_was_raised(error):
    content = msgspec.json.encode(error.to_dict())
    with pytest.raises(type(error)) as caught:
        answering(error.status.http, content).apply(PREPARED)
    assert caught.value.to_dict() == error.to_dict()


def test_an_error_in_vllms_body_keeps_its_message_and_kind():
    body = {
        "error": {"message": "new weights are live", "code": 409},
        "kind": "conflict",
        "hint": "label first",
    }
    with pytest.raises(ConflictError, match="new weights are live") as caught:
        answering(409, msgspec.json.encode(body)).resume()
    assert caught.value.hint == "label first"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, InvalidInput),
        (409, ConflictError),
        (502, Unavailable),
        (503, Unavailable),
        (504, Unavailable),
        (500, RefitError),
    ],
)
@pytest.mark.parametrize("content", [b"", b"<html>", b"[]", b'{"detail":"x"}', b"\xff\xfe"])
def test_an_error_without_our_body_is_told_by_its_status(status, kind, content):
    with pytest.raises(kind) as caught:
        answering(status, content).apply(PREPARED)
    assert "http://engine" in caught.value.message
    assert caught.value.hint or kind is ConflictError


@pytest.mark.parametrize("content", [b"", b"<html>", b"[]", b"{}", b'{"label": 7}', b"\xff"])
def test_an_answer_that_is_no_description_is_refused(content):
    with pytest.raises(RefitError, match="not an answer of an embedded engine") as caught:
        answering(content=content).describe()
    assert caught.value.engine_state == "unknown"


def test_nobody_at_the_address_is_unavailable_at_once():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    engine = EmbeddedEngine(f"http://127.0.0.1:{port}", holder="me")
    with pytest.raises(Unavailable) as caught:
        engine.describe()
    assert str(port) in caught.value.message
    assert caught.value.hint
    engine.close()


def test_an_engine_that_never_answers_costs_a_bounded_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine = EmbeddedEngine(
            f"http://127.0.0.1:{silent.getsockname()[1]}", holder="me", control_timeout=0.2, data_timeout=0.2
        )
        began = time.monotonic()
        for call in (
            engine.describe,
            engine.resume,
            lambda: engine.apply(PREPARED),
            lambda: engine.pause(PREPARED),
        ):
            with pytest.raises(Unavailable):
                call()
        assert time.monotonic() - began < 10
        engine.close()


def test_an_engine_that_hangs_up_in_mid_answer_is_unavailable():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def half():
            connection, _ = server.accept()
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{")
            connection.close()

        thread = threading.Thread(target=half)
        thread.start()
        engine = EmbeddedEngine(f"http://127.0.0.1:{server.getsockname()[1]}", holder="me")
        with pytest.raises(Unavailable):
            engine.describe()
        thread.join()
        engine.close()


def test_the_proxy_of_the_environment_is_not_used(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        engine = EmbeddedEngine(f"http://127.0.0.1:{server.getsockname()[1]}", holder="me")
        engine.resume()
        thread.join()
        engine.close()


@pytest.mark.parametrize(
    "engine", ["", "embedded", "embedded=", "=http://x", "http://x", "tgi=http://x", "embedded=ftp://x"]
)
def test_a_malformed_engine_is_refused_with_a_hint(engine):
    with pytest.raises(InvalidInput) as caught:
        open_engine(engine, holder="me")
    assert caught.value.hint
    assert issubclass(InvalidInput, WeightlineError)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_an_adapter(kind):
    engine = open_engine(f"{kind}=http://127.0.0.1:1", holder="me")
    engine.close()
