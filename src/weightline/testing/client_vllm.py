"""vLLM 0.32's RL surface: `/inference/v1/generate`, `/pause` and what belongs to them."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

from weightline.errors import InvalidInput, Unavailable
from weightline.testing.client import Ask, OnEvent, Output, OutputMode, Pause, Reply
from weightline.testing.wire import Wire, events

ID_PREFIX = "generate-tokens-"
"""vLLM knows a request under this and the id it was sent with."""
PAUSES = (
    Pause("keep", "kept"),
    Pause("keep-clear", "recomputed"),
    Pause("abort", "ended", aborts=True),
    Pause("wait", "ended", drains=True),
)
_QUERY = {
    "keep": "mode=keep&clear_cache=false",
    "keep-clear": "mode=keep&clear_cache=true",
    "abort": "mode=abort",
    "wait": "mode=wait",
}


class VllmClient:
    """`Client` on a vLLM server with its RL routes."""

    kind = "vllm"

    def __init__(self, url: str) -> None:
        self.wire = Wire(url)
        self.url = self.wire.url
        self.not_offered: dict[str, str] = {
            "kv_weight_versions": "vLLM does not say which version computed the KV"
        }
        self._pauses: tuple[Pause, ...] | None = None
        self._modes: tuple[OutputMode, ...] | None = None

    @property
    def pauses(self) -> tuple[Pause, ...]:
        """With prefix caching on, a pause that keeps KV leaves blocks of old weights where new requests find
        them, so the follower refuses it."""
        if self._pauses is None:
            self._pauses = PAUSES
            if 'enable_prefix_caching="True"' in self._metrics():
                self._pauses = tuple(pause for pause in PAUSES if pause.kv != "kept")
                self.not_offered["pause keep without clear"] = (
                    "this server caches prefixes; start it with --no-enable-prefix-caching for this part"
                )
        return self._pauses

    @property
    def output_modes(self) -> tuple[OutputMode, ...]:
        """Text needs a tokenizer, which a server may have been started without: one request tells."""
        if self._modes is not None:
            return self._modes
        reply = self.generate(Ask(id="conform-text", prompt=(3, 4), max_tokens=1, mode="text"))
        modes: tuple[OutputMode, ...] = ("tokens", "text") if reply.status == 200 else ("tokens",)
        self._modes = modes
        if reply.status != 200:
            self.not_offered["output mode text"] = reply.error[:200]
        return modes

    # Requests.

    def generate(self, ask: Ask, on_event: OnEvent | None = None) -> Reply:
        reply = Reply(ask=ask)
        try:
            self._generate(ask, reply, on_event)
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            if ask.disconnect_after is not None and isinstance(error, TimeoutError):
                reply.left = True
            else:
                reply.error = f"{type(error).__name__}: {error}"
        return reply

    def _generate(self, ask: Ask, reply: Reply, on_event: OnEvent | None) -> None:
        leaves = ask.disconnect_after
        patience = None if leaves is None or ask.stream else leaves / 100
        connection, response = self.wire.open(
            "POST", "/inference/v1/generate", self._body(ask), timeout=patience
        )
        try:
            reply.status = response.status
            if response.status != 200:
                reply.error = response.read(400).decode(errors="replace")
            elif ask.stream:
                self._read_stream(response, reply, on_event)
            else:
                for choice in json.loads(response.read())["choices"]:
                    self._take(reply.output(choice["index"]), choice)
                reply.ends = 1
        finally:
            connection.close()

    def _body(self, ask: Ask) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "temperature": 0.0,
            "max_tokens": ask.max_tokens,
            "ignore_eos": True,
            "n": ask.n,
        }
        if ask.n > 1:
            # vLLM refuses several greedy outputs; the likeliest token alone is the same.
            sampling |= {"temperature": 1.0, "top_k": 1}
        if ask.stop_token_ids:
            sampling["stop_token_ids"] = list(ask.stop_token_ids)
        return {
            "request_id": ask.id,
            "token_ids": list(ask.prompt),
            "sampling_params": sampling,
            "stream": ask.stream,
            "output_mode": ask.mode,
        }

    def _read_stream(
        self, response: http.client.HTTPResponse, reply: Reply, on_event: OnEvent | None
    ) -> None:
        count = tokens = 0
        for data in events(response):
            if data == "[DONE]":
                reply.ends += 1
                continue
            event = json.loads(data)
            if "error" in event:
                reply.error = str(event["error"])
            for choice in event.get("choices", ()):
                output = reply.output(choice["index"])
                if output.finish:
                    output.after_final += 1
                self._take(output, choice)
                output.chunks.append(len(choice.get("token_ids") or ()))
                tokens += output.chunks[-1]
            count += 1
            if on_event is not None:
                on_event(tokens)
            if count == reply.ask.disconnect_after:
                reply.left = True
                return

    def _take(self, output: Output, choice: dict[str, Any]) -> None:
        output.token_ids += choice.get("token_ids") or []
        if choice.get("text") is not None:
            output.text = (output.text or "") + choice["text"]
        found = choice.get("weight_versions")
        if choice.get("finish_reason") is None:
            output.early_spans += found is not None
            return
        output.finish.append(str(choice["finish_reason"]))
        output.spans = found
        output.kv_spans = choice.get("kv_weight_versions")

    def abort(self, id: str) -> None:
        self.wire.expect("POST", "/abort_requests", {"request_ids": [ID_PREFIX + id]})

    # Control.

    def pause(self, pause: Pause) -> None:
        self.wire.expect("POST", f"/pause?{_QUERY[pause.name]}")

    def resume(self) -> None:
        self.wire.expect("POST", "/resume")

    def paused(self) -> bool:
        return bool(self.wire.expect("GET", "/is_paused")["is_paused"])

    def label(self) -> str:
        return str(self.wire.expect("GET", "/weight_info")["weight_version"])

    def set_label(self, label: str) -> None:
        self.wire.expect("POST", "/update_weight_version", {"new_version": label})

    def live_requests(self) -> int:
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        lines = self._metrics().splitlines()
        return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if line.split("{", 1)[0] in names)

    def _metrics(self) -> str:
        try:
            connection, response = self.wire.open("GET", "/metrics")
            try:
                return response.read().decode()
            finally:
                connection.close()
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(
                f"engine {self.url}: /metrics: {error or type(error).__name__}",
                hint="is the engine running at that address?",
            ) from None

    def model_folder(self) -> Path:
        for model in self.wire.expect("GET", "/v1/models")["data"]:
            if Path(str(model.get("root"))).is_dir():
                return Path(model["root"])
        raise InvalidInput(f"engine {self.url} names no model folder", hint="give it with --model DIR")

    def surface(self) -> list[tuple[str, str, bool, str]]:
        found = [
            self._answers(
                "pause.bad-mode", "POST /pause with an unknown mode is a 400", "/pause?mode=nap", None, 400
            ),
            self._answers(
                "label.integer",
                "POST /update_weight_version with a number is a 400",
                "/update_weight_version",
                {"new_version": 7},
                400,
            ),
            self._answers(
                "label.missing",
                "POST /update_weight_version without new_version is a 400",
                "/update_weight_version",
                {},
                400,
            ),
            self._answers(
                "abort.unknown",
                "aborting an unknown request is a 200 and does nothing",
                "/abort_requests",
                {"request_ids": ["conform-nobody"]},
                200,
            ),
        ]
        label = self.label()
        answer = self.wire.call("POST", "/update_weight_version", {"new_version": label})
        what = "POST /update_weight_version answers success and the label"
        found.append(
            ("label.answer", what, answer == (200, {"success": True, "new_version": label}), str(answer))
        )
        for path, key, value in (("/pause?mode=keep", "status", "paused"), ("/resume", "status", "resumed")):
            answer = self.wire.call("POST", path)
            what = f"POST {path.split('?')[0]} answers {{'{key}': '{value}'}}"
            found.append((f"{value}.answer", what, answer == (200, {key: value}), str(answer)))
        health = self.wire.call("GET", "/health")[0]
        found.append(("health", "GET /health is a 200", health == 200, f"HTTP {health}"))
        return found

    def _answers(self, id: str, what: str, path: str, body: Any, wanted: int) -> tuple[str, str, bool, str]:
        status, answer = self.wire.call("POST", path, body)
        return (id, what, status == wanted, f"HTTP {status}: {str(answer)[:120]}")

    def close(self) -> None:
        return None
