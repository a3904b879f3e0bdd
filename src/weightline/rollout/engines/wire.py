"""How a follower speaks to a server with a weightline plugin inside: the engine's own HTTP routes, answers in
files.

A request names a file in the follower's runtime folder and the plugin writes its answer there: server and
follower must see that folder under the same path.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import msgspec

from weightline.errors import ConflictError, InvalidInput, RefitError, Unavailable, WeightlineError, from_dict

if TYPE_CHECKING:
    import httpx

CONTROL_TIMEOUT = 30.0
"""Seconds for a call that moves no bytes (a pause waits for the running step)."""
DATA_TIMEOUT = 600.0
"""Seconds for a call that reads, writes or digests weights."""
POLL = 0.002
"""Seconds between two looks for an answer that a background job of the plugin writes."""


class PluginWire:
    """One server. Raises `Unavailable` (no answer), `InvalidInput` (not such a server), `RefitError`,
    `ConflictError`."""

    kind: ClassVar[str]
    hint: ClassVar[str]
    """How to start such a server, for whoever started another one."""
    alive: ClassVar[str]
    """A route that answers at once, whatever the engine does."""

    def __init__(
        self,
        url: str,
        *,
        holder: str,
        timeout: float | None = None,
        transport: httpx.BaseTransport | None = None,
        runtime_dir: Path | None = None,
    ) -> None:
        import httpx

        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InvalidInput(
                f"engine URL {url!r} does not start with http://", hint="for example http://127.0.0.1:8000"
            )
        self.options = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        self.url = parts._replace(query="", fragment="").geturl().rstrip("/")
        self.holder = holder
        self._control = httpx.Timeout(timeout or CONTROL_TIMEOUT, connect=2.0)
        self._data = timeout or DATA_TIMEOUT
        self._transport = transport
        self._http = self._client()
        self._runtime_dir = runtime_dir
        self._folder: Any = None

    def _client(self) -> httpx.Client:
        import httpx

        # The server closes connections that were idle for 5 s: one about to be closed is not used again.
        return httpx.Client(
            base_url=self.url,
            timeout=self._control,
            trust_env=False,  # no proxy: an engine is a neighbour, and a proxy would see its traffic
            transport=self._transport,
            limits=httpx.Limits(keepalive_expiry=2.0),
        )

    @property
    def folder(self) -> Path:
        """The runtime folder of this follower for this engine, made on first use."""
        if self._folder is None:
            from weightline.rollout.replica import Replica

            self._folder = Replica(self.kind, self.holder, parent=self._runtime_dir)
        return Path(self._folder.folder)

    def close(self) -> None:
        """Close the connection and remove the folder."""
        self._http.close()
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def get(self, path: str) -> dict[str, Any]:
        """A GET of one of the engine's own routes."""
        return self._call("GET", path, None)

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """A POST to one of the engine's own routes."""
        return self._call("POST", path, body)

    def ask(self, action: str, *, update: bool = False, **fields: Any) -> dict[str, Any]:
        """A request to the plugin and its answer. `update`: as one of the engine's own weight updates, where
        it knows sessions; else at any time."""
        path = self.folder / f"{action}-{uuid.uuid4().hex[:12]}.json"
        request = {"action": action, "answer": str(path), **fields}
        try:
            self.carry(request, update=update)
            answer = self._answer(path, background=action in ("prepare", "digests"))
        finally:
            path.unlink(missing_ok=True)
        if "error" in answer:
            raise from_dict(answer["error"])
        return answer

    def carry(self, request: dict[str, Any], *, update: bool) -> None:
        """Bring `request` to the plugin over one of the engine's own routes."""
        raise NotImplementedError

    def _answer(self, path: Path, *, background: bool) -> dict[str, Any]:
        deadline = time.monotonic() + (self._data if background else 1.0)
        looked = time.monotonic()
        while True:
            try:
                return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
            except FileNotFoundError:
                pass
            now = time.monotonic()
            if now > deadline:
                raise RefitError(
                    f"engine {self.url}: the plugin left no answer in {path.parent}",
                    engine_state="unknown",
                    hint=f"server and follower must see that folder under the same path (and {self.hint})",
                )
            if now - looked > 5.0:
                looked = now
                self.get(self.alive)  # raises when the server is gone: no answer will come any more
            time.sleep(POLL)

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        import httpx

        try:
            response = self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            what = str(error) or type(error).__name__
            raise Unavailable(
                f"engine {self.url}: {path}: {what}", hint="is the engine running at that address?"
            ) from None
        if response.status_code >= 500 and self._transport is None:
            # A server may drop the connection after an error without saying so in the answer.
            self._http.close()
            self._http = self._client()
        if response.status_code >= 400:
            raise self._refusal(path, response.status_code, response.text)
        try:
            return msgspec.json.decode(response.content, type=dict[str, Any])
        except msgspec.DecodeError:
            return {}

    def _refusal(self, path: str, status: int, text: str) -> WeightlineError:
        message = f"engine {self.url}: {path}: HTTP {status}"
        if status in (404, 405):
            return InvalidInput(message, hint=self.hint)
        if status == 409:
            return ConflictError(message)
        if status in (502, 503, 504):
            return Unavailable(message, hint="the engine is starting or stopping")
        detail = " ".join(text.split())[:300]
        return RefitError(
            f"{message}: {detail}", engine_state="unknown", hint=f"see the engine's log; {self.hint}"
        )
