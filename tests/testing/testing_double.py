"""An engine double: a small HTTP server that speaks the RL surface over a real one-layer transformer in
numpy, with each classic fault of labelling, caching and ending as a switch. Healthy without a switch.

Its model is the part of a marker model that reaches the output: embedding, values of layer 0 under uniform
attention, head. Keys and values are kept for each position as the live weights computed them, prefixes of
whole blocks are cached, streams bring three tokens a chunk.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import numpy as np

from weightline import codec
from weightline.core.spans import from_tokens

FAULTS = (
    "label at admission",
    "label at reply time",
    "label one token early",
    "label one token late",
    "label per chunk",
    "stale kv served",
    "final chunk dropped",
    "double finish",
    "prefix cache shared across versions",
)
VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 96, 40, 4, 2, 12
ROWS = 16
"""Sequences that run at once."""
BLOCK = 16
CHUNK = 3
LAYER = "model.layers.0."


def write_model(folder: Path) -> Path:
    """A random one-layer Llama in float32, as a Hugging Face folder without a tokenizer."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        LAYER + "input_layernorm.weight": (HIDDEN,),
        LAYER + "post_attention_layernorm.weight": (HIDDEN,),
        LAYER + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        LAYER + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        LAYER + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        LAYER + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        LAYER + "mlp.gate_proj.weight": (64, HIDDEN),
        LAYER + "mlp.up_proj.weight": (64, HIDDEN),
        LAYER + "mlp.down_proj.weight": (HIDDEN, 64),
    }
    folder.mkdir()
    save_file(
        {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    config = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass(eq=False)
class Sequence:
    prompt: list[int]
    limit: int
    stops: list[int]
    admitted: str
    """The label when the request came."""
    output: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    flushed: list[str] = field(default_factory=list)
    """The label when the chunk of each token went out."""
    values: list[np.ndarray] = field(default_factory=list)
    total: np.ndarray = field(default_factory=lambda: np.zeros(KV_HEADS * HEAD_DIM))
    """Sum of `values`."""
    namespace: int = 0
    sent: int = 0
    reason: str | None = None


class Request:
    def __init__(self, body: dict[str, Any], label: str) -> None:
        sampling = body["sampling_params"]
        self.id = str(body.get("request_id"))
        self.sequences = [
            Sequence(body["token_ids"], sampling["max_tokens"], sampling.get("stop_token_ids", []), label)
            for _ in range(sampling.get("n", 1))
        ]
        self.chunks: deque[tuple[int, list[int], str | None]] = deque()
        """(index, new tokens, finish reason) on the way to the client."""
        self.news = threading.Condition()

    @property
    def live(self) -> list[Sequence]:
        return [s for s in self.sequences if s.reason is None]


class Engine:
    """The step loop in a thread; one lock around everything."""

    def __init__(self, folder: Path, fault: str | None = None) -> None:
        from safetensors.numpy import load_file

        self.folder, self.fault = folder, fault
        self.weights = {n: a.copy() for n, a in load_file(folder / "model.safetensors").items()}
        self.label, self.version, self.run = "default", None, None
        self.state = "running"
        self.namespace = 0
        self.recompute = False
        self.cache: dict[tuple[int, tuple[int, ...]], list[np.ndarray]] = {}
        self.running: list[tuple[Request, Sequence]] = []
        self.queue: deque[tuple[Request, Sequence]] = deque()
        self.session: dict[str, Any] | None = None
        self.lock = threading.RLock()
        self.wake = threading.Condition(self.lock)
        self.stopping = False
        self.gap = threading.Event()
        self.thread = threading.Thread(target=self._loop, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        with self.wake:
            self.stopping = True
            self.wake.notify_all()
        self.thread.join()

    # Requests.

    def submit(self, body: dict[str, Any]) -> Request:
        with self.wake:
            request = Request(body, self.label)
            self.queue.extend((request, s) for s in request.sequences)
            self.wake.notify_all()
            return request

    def abort(self, wanted: Any) -> None:
        with self.lock:
            for request, sequence in [*self.running, *self.queue]:
                if wanted(request):
                    self._finish(request, sequence, "abort")

    def _finish(self, request: Request, sequence: Sequence, reason: str) -> None:
        sequence.reason = reason
        for place in (self.running, self.queue):
            if (request, sequence) in place:
                place.remove((request, sequence))
        self._maybe_drained()
        self._flush(request, sequence, reason)

    def _flush(self, request: Request, sequence: Sequence, reason: str | None) -> None:
        tokens = sequence.output[sequence.sent :]
        sequence.sent = len(sequence.output)
        sequence.flushed += [self.label] * len(tokens)
        with request.news:
            request.chunks.append((request.sequences.index(sequence), tokens, reason))
            request.news.notify_all()

    def spans(self, sequence: Sequence) -> list[dict[str, Any]]:
        with self.lock:
            true, now = sequence.labels, self.label
        claimed = {
            "label at admission": [sequence.admitted] * len(true),
            "label at reply time": [now] * len(true),
            "label one token early": [*true[1:], *true[-1:]],
            "label one token late": [*true[:1], *true[:-1]],
            "label per chunk": sequence.flushed,
        }.get(self.fault or "", true)
        return [msgspec.to_builtins(span) for span in from_tokens(claimed)]

    # The loop.

    def _loop(self) -> None:
        while True:
            with self.wake:
                self.wake.wait_for(lambda: self.stopping or self._may_step())
                if self.stopping:
                    self.abort(lambda _: True)
                    return
                self._step()
            # Locks are not fair: without a gap nobody else would get this one.
            self.gap.wait(0.0003)

    def _may_step(self) -> bool:
        return self.state != "paused" and bool(self.running or (self.state == "running" and self.queue))

    def _step(self) -> None:
        while self.state == "running" and self.queue and len(self.running) < ROWS:
            request, sequence = self.queue.popleft()
            sequence.namespace = self.namespace
            self._match_prefix(sequence)
            self.running.append((request, sequence))
        for request, sequence in list(self.running):
            token = self._sample(sequence)
            sequence.output.append(token)
            sequence.labels.append(self.label)
            if token in sequence.stops:
                self._finish(request, sequence, "stop")
            elif len(sequence.output) == sequence.limit:
                self._finish(request, sequence, "length")
            elif len(sequence.output) - sequence.sent == CHUNK:
                self._flush(request, sequence, None)

    def _maybe_drained(self) -> None:
        if self.state == "draining" and not self.running:
            self.state = "paused"
            self.wake.notify_all()

    def _sample(self, sequence: Sequence) -> int:
        w = self.weights
        context = sequence.prompt + sequence.output
        new = context[len(sequence.values) :]
        if new:
            x = _norm(w["model.embed_tokens.weight"][new], w[LAYER + "input_layernorm.weight"])
            made = x @ w[LAYER + "self_attn.v_proj.weight"].T
            sequence.values += list(made)
            sequence.total = sequence.total + made.sum(0)
            self._remember(sequence)
        mean = (sequence.total / len(sequence.values)).reshape(KV_HEADS, HEAD_DIM)
        heads = np.repeat(mean, HEADS // KV_HEADS, axis=0).reshape(-1)
        x = w["model.embed_tokens.weight"][context[-1]] + w[LAYER + "self_attn.o_proj.weight"] @ heads
        return int((w["lm_head.weight"] @ _norm(x, w["model.norm.weight"])).argmax())

    def _match_prefix(self, sequence: Sequence) -> None:
        for blocks in range((len(sequence.prompt) - 1) // BLOCK, 0, -1):
            found = self.cache.get((sequence.namespace, tuple(sequence.prompt[: blocks * BLOCK])))
            if found is not None:
                sequence.values, sequence.total = list(found), np.sum(found, 0)
                return

    def _remember(self, sequence: Sequence) -> None:
        blocks = len(sequence.prompt) // BLOCK
        if blocks and sequence.namespace == self.namespace and len(self.cache) < 256:
            key = (sequence.namespace, tuple(sequence.prompt[: blocks * BLOCK]))
            self.cache.setdefault(key, list(sequence.values[: blocks * BLOCK]))

    # Pausing.

    def pause(self, mode: str, clear: bool) -> None:
        with self.wake:
            if mode == "abort":
                self.abort(lambda _: True)
            if mode == "wait" and self.running and self.state == "running":
                self.state = "draining"
                self.wake.wait_for(lambda: self.state == "paused")
            self.state = "paused"
            self.recompute = self.recompute or clear

    def resume(self) -> None:
        with self.wake:
            if self.recompute and self.fault != "stale kv served":
                for _, sequence in self.running:
                    sequence.values, sequence.total = [], np.zeros(KV_HEADS * HEAD_DIM)
                    sequence.namespace = self.namespace
            self.recompute = False
            self.state = "running"
            self.wake.notify_all()

    # Refits.

    def prepare(self, body: dict[str, Any]) -> dict[str, Any]:
        delta = codec.read_delta(Path(body["file"]))
        with self.lock:
            changes = [delta.change(name) for name in delta.changed]
            self.session = {"id": f"s{body['version']}", "order": body, "changes": changes}
            return {"session": self.session["id"], "elements": delta.elements}

    def verb(self, name: str, session: str) -> dict[str, Any]:
        with self.lock:
            assert self.session is not None
            assert self.session["id"] == session
            order = self.session["order"]
            if name == "apply":
                assert self.state == "paused"
                for change in self.session["changes"]:
                    live = self.weights[change.spec.name].reshape(-1).view(change.bits.dtype)
                    live[slice(None) if change.index is None else change.index] = change.bits
            elif name == "verify":
                digests = {n: codec.digest_of(codec.bits_of(self.weights[n])) for n in order["digests"]}
                assert digests == order["digests"]
                return {"verified": "live"}
            elif name == "invalidate" and self.fault != "prefix cache shared across versions":
                self.namespace += 1
                self.cache.clear()
            elif name == "label":
                self.label, self.version, self.run = order["label"], order["version"], order["run"]
            elif name == "close":
                self.session = None
            return {}

    def describe(self) -> dict[str, Any]:
        with self.lock:
            specs = [msgspec.to_builtins(codec.spec_of(n, a)) for n, a in self.weights.items()]
            return {
                "kind": "embedded",
                "label": self.label,
                "version": self.version,
                "run": self.run,
                "instance": "double",
                "paused": self.state == "paused",
                "quarantined": False,
                "tensors": specs,
                "running": len(self.running),
                "waiting": len(self.queue),
                "model": str(self.folder),
            }


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


class Handler(BaseHTTPRequestHandler):
    """vLLM's routes, and the embedded engine's control routes."""

    engine: Engine

    def log_message(self, *_: object) -> None:
        pass

    def _json(self, answer: Any, status: int = 200) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        engine = self.engine
        self._json(
            {
                "/weightline/describe": engine.describe,
                "/is_paused": lambda: {"is_paused": engine.state == "paused"},
                "/weight_info": lambda: {"weight_version": engine.label},
                "/health": dict,
            }[self.path]()
        )

    def do_POST(self) -> None:
        engine, parts = self.engine, urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
        path = parts.path
        if path == "/inference/v1/generate":
            with contextlib.suppress(OSError):  # the client went away; `_generate` has ended the request
                self._generate(body)
        elif path == "/pause":
            if query.get("mode") not in ("keep", "abort", "wait"):
                return self._json({"error": "mode"}, 400)
            engine.pause(query["mode"], query.get("clear_cache", "true") == "true")
            self._json({"status": "paused"})
        elif path == "/resume":
            engine.resume()
            self._json({"status": "resumed"})
        elif path == "/update_weight_version":
            if not isinstance(body.get("new_version"), str):
                return self._json({"error": "new_version"}, 400)
            with engine.lock:
                engine.label = body["new_version"]
            self._json({"success": True, "new_version": engine.label})
        elif path == "/abort_requests":
            ids = {i.removeprefix("generate-tokens-") for i in body["request_ids"]}
            engine.abort(lambda request: request.id in ids)
            self._json({"status": "aborted", "aborted": len(ids)})
        elif path == "/weightline/prepare":
            self._json(engine.prepare(body))
        else:
            self._json(engine.verb(path.removeprefix("/weightline/"), body["session"]))
        return None

    def _generate(self, body: dict[str, Any]) -> None:
        request = self.engine.submit(body)
        try:
            if body["stream"]:
                self._stream(request)
            else:
                self._whole(request)
        finally:
            self.engine.abort(lambda other: other is request)

    def _next(self, request: Request) -> tuple[int, list[int], str | None]:
        with request.news:
            request.news.wait_for(lambda: request.chunks)
            return request.chunks.popleft()

    def _stream(self, request: Request) -> None:
        engine, open_ = self.engine, len(request.sequences)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        while open_:
            index, tokens, reason = self._next(request)
            open_ -= reason is not None
            if reason is not None and not tokens and engine.fault == "final chunk dropped":
                continue
            self._event(request, index, tokens, reason)
            if reason is not None and engine.fault == "double finish":
                self._event(request, index, [], reason)
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, request: Request, index: int, tokens: list[int], reason: str | None) -> None:
        choice: dict[str, Any] = {"index": index, "token_ids": tokens, "finish_reason": reason}
        if reason is not None:
            choice["weight_versions"] = self.engine.spans(request.sequences[index])
        self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")

    def _whole(self, request: Request) -> None:
        open_ = len(request.sequences)
        while open_:
            open_ -= self._next(request)[2] is not None
        choices = [
            {
                "index": i,
                "token_ids": s.output,
                "finish_reason": s.reason,
                "weight_versions": self.engine.spans(s),
            }
            for i, s in enumerate(request.sequences)
        ]
        self._json({"choices": choices})


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class Double:
    """A double on a port of its own; `url`, and `close`."""

    def __init__(self, folder: Path, fault: str | None = None) -> None:
        self.engine = Engine(folder, fault)
        handler = type("Bound", (Handler,), {"engine": self.engine})
        self.server = Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.engine.stop()
        self.server.server_close()
