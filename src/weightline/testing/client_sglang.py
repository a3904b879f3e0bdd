"""SGLang 0.5's RL surface: `/generate`, `/pause_generation` and what belongs to them."""

from __future__ import annotations

import http.client
import json
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from weightline.errors import InvalidInput
from weightline.rollout.engines.sglang import SglangEngine
from weightline.testing.client import ABORT_WHILE_PAUSED, Ask, OnEvent, OutputMode, Pause, Reply
from weightline.testing.wire import Wire, events

ID_END = "."
"""SGLang aborts every request whose id begins with the given one; with an end mark no id begins another."""
IN_PLACE = Pause("in_place", "kept")
PAUSES = (Pause("retract", "recomputed"), Pause("abort", "ended", aborts=True))


class SglangClient:
    """`Client` on an SGLang server with the weightline plugin."""

    kind = "sglang"
    output_modes: tuple[OutputMode, ...] = ("tokens", "text")
    """SGLang sends both at once; each is read for itself."""

    def __init__(self, url: str) -> None:
        self.wire = Wire(url)
        self.url = self.wire.url
        self.not_offered: dict[str, str] = {
            "kv_weight_versions": "SGLang does not say which version computed the KV",
            "pause wait": "SGLang has no pause that lets requests run to their end",
            ABORT_WHILE_PAUSED: "SGLang holds new requests at its front door, where no abort reaches them",
        }
        self.pauses: tuple[Pause, ...] = (IN_PLACE, *PAUSES)
        if parse_qs(urlsplit(url).query).get("kv") != ["keep"]:
            self.pauses = PAUSES
            self.not_offered["pause in_place"] = (
                "the follower drops all KV unless its URL says kv=keep; run sglang=URL?kv=keep for this part"
            )
        self._incremental: bool | None = None
        # Only the plugin tells whether a server is paused.
        self._plugin = SglangEngine(url, holder=f"conform-client-{uuid.uuid4().hex[:8]}")

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
        connection, response = self.wire.open("POST", "/generate", self._body(ask), timeout=patience)
        try:
            reply.status = response.status
            if response.status != 200:
                reply.error = response.read(400).decode(errors="replace")
            elif ask.stream:
                self._read_stream(response, reply, on_event)
            else:
                answer = json.loads(response.read())
                for index, choice in enumerate(answer if isinstance(answer, list) else [answer]):
                    self._take(reply, index, choice)
                reply.ends = 1
        finally:
            connection.close()

    def _body(self, ask: Ask) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "temperature": 0.0,
            "max_new_tokens": ask.max_tokens,
            "ignore_eos": not ask.stop_token_ids,
            "n": ask.n,
        }
        if ask.stop_token_ids:
            sampling["stop_token_ids"] = list(ask.stop_token_ids)
        return {
            "rid": ask.id + ID_END,
            "input_ids": list(ask.prompt),
            "sampling_params": sampling,
            "stream": ask.stream,
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
                continue
            output = reply.output(event.get("index", 0))
            output.after_final += bool(output.finish)
            before = len(output.token_ids)
            self._take(reply, output.index, event)
            output.chunks.append(len(output.token_ids) - before)
            tokens += output.chunks[-1]
            count += 1
            if on_event is not None:
                on_event(tokens)
            if count == reply.ask.disconnect_after:
                reply.left = True
                return

    def _take(self, reply: Reply, index: int, choice: dict[str, Any]) -> None:
        output, meta = reply.output(index), choice["meta_info"]
        ids = choice.get("output_ids") or []
        # Not told apart by `completion_tokens`: SGLang's list may already be longer than that says.
        output.token_ids += ids if self._only_new(reply.ask) else ids[len(output.token_ids) :]
        if reply.ask.mode == "text" and choice.get("text") is not None:
            output.text = choice["text"]
        found = meta.get("weight_versions")
        if meta.get("finish_reason") is None:
            output.early_spans += found is not None
            return
        output.finish.append(str(meta["finish_reason"]["type"]))
        # An output without tokens has one range without tokens there.
        output.spans = None if found is None else [s for s in found if s["end"] != s["start"]]

    def _only_new(self, ask: Ask) -> bool:
        """Does an event bring the new tokens alone, or all so far?"""
        if self._incremental is None:
            told = self.wire.expect("GET", "/server_info")
            self._incremental = bool(told.get("incremental_streaming_output"))
        return ask.stream and self._incremental

    def abort(self, id: str) -> None:
        self.wire.expect("POST", "/abort_request", {"rid": id + ID_END})

    # Control.

    def pause(self, pause: Pause) -> None:
        self.wire.expect("POST", "/pause_generation", {"mode": pause.name})

    def resume(self) -> None:
        self.wire.expect("POST", "/continue_generation", {"torch_empty_cache": False})

    def paused(self) -> bool:
        return self._plugin.describe().paused

    def label(self) -> str:
        return str(self.wire.expect("GET", "/model_info")["weight_version"])

    def set_label(self, label: str) -> None:
        body = {"new_version": label, "abort_all_requests": False}
        self.wire.expect("POST", "/update_weight_version", body)

    def live_requests(self) -> int:
        loads = self.wire.expect("GET", "/v1/loads")["loads"]
        return sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in loads)

    def model_folder(self) -> Path:
        folder = Path(str(self.wire.expect("GET", "/model_info")["model_path"]))
        if not folder.is_dir():
            raise InvalidInput(f"engine {self.url} names no model folder", hint="give it with --model DIR")
        return folder

    def surface(self) -> list[tuple[str, str, bool, str]]:
        found = []
        for id, what, path, body, wanted in (
            (
                "pause.bad-mode",
                "POST /pause_generation with an unknown mode is refused",
                "/pause_generation",
                {"mode": "nap"},
                (400, 422),
            ),
            (
                "label.missing",
                "POST /update_weight_version without new_version is refused",
                "/update_weight_version",
                {},
                (400, 422),
            ),
            (
                "abort.unknown",
                "aborting an unknown request is a 200 and does nothing",
                "/abort_request",
                {"rid": "conform-nobody."},
                (200,),
            ),
        ):
            status, answer = self.wire.call("POST", path, body)
            found.append((id, what, status in wanted, f"HTTP {status}: {str(answer)[:120]}"))
        unchanged = {"new_version": self.label(), "abort_all_requests": False}
        status, answer = self.wire.call("POST", "/update_weight_version", unchanged)
        fine = status == 200 and (answer or {}).get("success") is True
        found.append(("label.answer", "POST /update_weight_version answers success", fine, str(answer)[:120]))
        status, _ = self.wire.call("GET", "/health")
        found.append(("health", "GET /health is a 200", status == 200, f"HTTP {status}"))
        return found

    def close(self) -> None:
        self._plugin.close()
