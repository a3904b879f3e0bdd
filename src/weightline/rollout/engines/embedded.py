"""The embedded engine over HTTP: vLLM's pause and resume, and our control routes under `/weightline/` (see
docs/design/0001)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from weightline.errors import ConflictError, InvalidInput, RefitError, Unavailable, WeightlineError, from_dict
from weightline.rollout.engines.base import EngineDescription, Hold, Prepared, Refit
from weightline.types import Verification

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

CONTROL_TIMEOUT = 10.0
"""Seconds for a verb that moves no bytes (a keep-pause waits for one generation step)."""
DATA_TIMEOUT = 120.0
"""Seconds for a verb that reads, writes or digests weights."""


class _Session(msgspec.Struct, frozen=True):
    session: str
    elements: int = 0


class _Verified(msgspec.Struct, frozen=True):
    verified: Verification


class _Digests(msgspec.Struct, frozen=True):
    digests: dict[str, str]


class EmbeddedEngine:
    """`EnginePort` on an embedded engine at `url` ("http://host:port")."""

    def __init__(
        self,
        url: str,
        *,
        holder: str,
        control_timeout: float = CONTROL_TIMEOUT,
        data_timeout: float = DATA_TIMEOUT,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`holder` names this follower process: one live session per engine, and only its holder may replace
        it.

        Raises `InvalidInput` for a URL that is none.
        """
        import httpx

        if not url.startswith(("http://", "https://")):
            raise InvalidInput(
                f"engine URL {url!r} does not start with http://", hint="for example http://127.0.0.1:8000"
            )
        self.url = url.rstrip("/")
        self.holder = holder
        self._control = httpx.Timeout(control_timeout, connect=min(2.0, control_timeout))
        self._data = httpx.Timeout(data_timeout, connect=min(2.0, data_timeout))
        try:
            # No proxy from the environment: an engine is a neighbour, and a proxy would see its traffic.
            # The server closes connections that were idle for 5 s: one about to be closed is not used again.
            self._http = httpx.Client(
                base_url=self.url,
                timeout=self._control,
                trust_env=False,
                transport=transport,
                limits=httpx.Limits(keepalive_expiry=2.0),
            )
        except httpx.InvalidURL as error:
            raise InvalidInput(
                f"engine URL {url!r}: {error}", hint="for example http://127.0.0.1:8000"
            ) from None

    def describe(self) -> EngineDescription:
        return self._call("GET", "/weightline/describe", EngineDescription)

    def prepare(self, refit: Refit) -> Prepared:
        body = {**msgspec.to_builtins(refit, enc_hook=str), "file": str(refit.file), "holder": self.holder}
        del body["whole"]  # this engine takes changes to every tensor, and names no groups
        answer = self._call("POST", "/weightline/prepare", _Session, body, self._data)
        return Prepared(session=answer.session, elements=answer.elements)

    def pause(self, prepared: Prepared) -> None:  # noqa: ARG002 - vLLM's route knows no sessions; the engine counts it to the open one
        self._call("POST", "/pause?mode=keep&clear_cache=false", dict)

    def apply(self, prepared: Prepared) -> None:
        self._session("apply", prepared)

    def verify(self, prepared: Prepared) -> Verification:
        body = {"session": prepared.session}
        return self._call("POST", "/weightline/verify", _Verified, body, self._data).verified

    def invalidate(self, prepared: Prepared) -> None:
        self._session("invalidate", prepared)

    def label(self, prepared: Prepared) -> None:
        self._session("label", prepared)

    def resume(self) -> None:
        self._call("POST", "/resume", dict)

    def rollback(self, prepared: Prepared) -> None:
        self._session("rollback", prepared)

    def close_session(self, prepared: Prepared) -> None:
        self._session("close", prepared)

    def digests(self, names: tuple[str, ...] | None = None) -> dict[str, str]:
        body = {"names": None if names is None else list(names)}
        return self._call("POST", "/weightline/digests", _Digests, body, self._data).digests

    def set_hold(self, hold: Hold | None) -> None:
        self._call("POST", "/weightline/hold", dict, {"hold": msgspec.to_builtins(hold)})

    def close(self) -> None:
        self._http.close()

    def _session(self, verb: str, prepared: Prepared) -> None:
        self._call("POST", f"/weightline/{verb}", dict, {"session": prepared.session}, self._data)

    def _call(
        self, method: str, path: str, answer: type[T], body: dict[str, Any] | None = None, timeout: Any = None
    ) -> T:
        import httpx

        try:
            content = None if body is None else msgspec.json.encode(body)
            headers = None if body is None else {"content-type": "application/json"}
            response = self._http.request(
                method, path, content=content, headers=headers, timeout=timeout or self._control
            )
        except httpx.TransportError as error:
            what = str(error) or type(error).__name__
            raise Unavailable(
                f"engine {self.url}: {path}: {what}", hint="is the engine running at that address?"
            ) from None
        if response.status_code >= 400:
            raise self._refusal(path, response.status_code, response.content)
        try:
            return msgspec.json.decode(response.content, type=answer)
        except msgspec.DecodeError as error:
            raise RefitError(
                f"engine {self.url}: {path}: not an answer of an embedded engine: {error}",
                engine_state="unknown",
                hint="is this a `weightline engine`?",
            ) from None

    def _refusal(self, path: str, status: int, content: bytes) -> WeightlineError:
        try:
            data = msgspec.json.decode(content, type=dict[str, Any])
        except msgspec.DecodeError:
            data = {}
        if "kind" in data:
            inner = data.pop("error", None)  # vLLM's routes wrap the message in vLLM's error body
            if "message" not in data and isinstance(inner, dict):
                data["message"] = str(inner.get("message", ""))
            return from_dict(data)
        message = f"engine {self.url}: {path}: HTTP {status}"
        if status == 404 and path.startswith("/weightline/"):
            return InvalidInput(
                message, hint="this server has no control routes: is it a `weightline engine`?"
            )
        if status == 409:
            return ConflictError(message)
        if status in (502, 503, 504):
            return Unavailable(message, hint="the engine is starting or stopping")
        return RefitError(message, engine_state="unknown", hint="see the engine's log")
