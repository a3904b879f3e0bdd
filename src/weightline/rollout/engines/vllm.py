"""A stock vLLM server over its own routes and the weightline plugin inside it (docs/engines/vllm.md).

The order of a refit is the follower's (`rollout/transaction.py`); here is how each verb is done. What crosses
HTTP is small: bytes lie in a file that the worker maps.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from typing import TYPE_CHECKING, Any

import msgspec

from weightline.errors import ConflictError, InvalidInput, RefitError, Unavailable
from weightline.rollout.engines.base import EngineDescription, Hold, Prepared, Refit
from weightline.rollout.engines.vllm_file import worker_file, write_changes
from weightline.rollout.engines.vllm_wire import VllmWire
from weightline.types import TensorSpec, Verification

if TYPE_CHECKING:
    from pathlib import Path

    import httpx

    from weightline.codec import Delta

SESSION_TIMEOUT = 30.0
"""Seconds of silence after which the engine itself ends a refit of ours."""
HEAL = 15.0
"""Seconds to wait for the engine to end the refit of a follower that is gone."""


class VllmEngine:
    """`EnginePort` on a vLLM server at `url` ("http://host:port", "http://host:port?kv=keep").

    `kv=recompute` (default): running requests recompute their KV under the new weights. `kv=keep`: they keep
    the KV that older weights computed; only for a server without prefix caching. `session_timeout=SECONDS`:
    silence after which the engine itself ends a refit.
    """

    def __init__(
        self,
        url: str,
        *,
        holder: str,
        timeout: float | None = None,
        session_timeout: float | None = None,
        transport: httpx.BaseTransport | None = None,
        runtime_dir: Path | None = None,
    ) -> None:
        """`holder` names this follower process. `timeout` (seconds) bounds each call; `runtime_dir` is a
        folder that the server sees under the same path. Raises `InvalidInput` for a URL that is none."""
        self.wire = VllmWire(
            url, holder=holder, timeout=timeout, transport=transport, runtime_dir=runtime_dir
        )
        self.holder = holder
        self.session_timeout = session_timeout or self._seconds(url, "session_timeout", SESSION_TIMEOUT)
        self.kv = self.wire.options.get("kv", "recompute")
        if self.kv not in ("recompute", "keep"):
            raise InvalidInput(f"engine URL {url!r}: kv={self.kv}", hint="use kv=recompute or kv=keep")
        unknown = self.wire.options.keys() - {"kv", "session_timeout"}
        if unknown:
            raise InvalidInput(
                f"engine URL {url!r}: unknown option {', '.join(sorted(unknown))}",
                hint="the options are kv and session_timeout",
            )
        self._instance = ""
        self._replaced: set[str] = set()
        """Engine processes that answered before this one: none of them can come back."""
        self._tensors: tuple[TensorSpec, ...] = ()
        self._aliases: dict[str, str] = {}
        self._groups: dict[str, int] = {}
        self._prefix_caching = True
        self._applied = ""
        """Session whose `apply` was answered."""
        self._verified: Verification = "none"
        self._session: dict[str, Any] | None = {}
        """The refit session that the engine last spoke of; empty before its first word."""
        self._written: dict[Path, str] = {}
        """The last file of `write_refit` and its SHA-256."""
        self._refits: dict[str, tuple[Refit, str]] = {}
        """Session -> refit and the label before it."""

    def _seconds(self, url: str, name: str, default: float) -> float:
        text = self.wire.options.get(name)
        try:
            value = default if text is None else float(text)
        except ValueError:
            value = -1.0
        if not 0.0 < value < 1e6:
            raise InvalidInput(f"engine URL {url!r}: {name}={text}", hint="give a number of seconds")
        return value

    # What it serves.

    def describe(self) -> EngineDescription:
        hello = self._hello()
        session = hello["session"]
        if session is not None and session["silent"] > session["timeout"]:
            hello = self._healed()
        label = str(self.wire.get("/weight_info").get("weight_version"))
        paused = bool(self.wire.get("/is_paused").get("is_paused"))
        return EngineDescription(
            kind="vllm",
            label=label,
            version=hello["version"],
            run=hello["run"],
            instance=hello["instance"],
            paused=paused,
            quarantined=bool(hello["quarantined"]),
            tensors=self._tensors,
            aliases=self._aliases,
            groups=self._groups,
            hold=None if hello["hold"] is None else Hold(*hello["hold"]),
        )

    def _hello(self) -> dict[str, Any]:
        hello = self.wire.ask("hello", tensors=not self._instance)
        if hello["instance"] in self._replaced:
            raise InvalidInput(
                f"engine {self.wire.url}: several engines answer there in turn",
                hint="a follower drives one engine: give each replica behind a load balancer its own URL",
            )
        if not hello["proved"]:
            raise Unavailable(
                f"engine {self.wire.url} is still comparing its weights with its checkpoint",
                hint="it answers as soon as it is done",
            )
        if hello["instance"] != self._instance:
            if "tensors" not in hello:
                hello = self.wire.ask("hello", tensors=True)
            self._tensors = tuple(TensorSpec(n, dtype, tuple(shape)) for n, dtype, shape in hello["tensors"])
            self._aliases = dict(hello["aliases"])
            self._groups = dict(hello["groups"])
            self._replaced.add(self._instance)
            self._instance = hello["instance"]
        self._prefix_caching = bool(hello["prefix_caching"])
        self._session = hello["session"]
        return hello

    def _healed(self) -> dict[str, Any]:
        """Let the engine end the refit of a follower that is gone, and wait for it."""
        self.wire.ask("heal")
        deadline = time.monotonic() + HEAL
        while True:
            hello = self._hello()
            session = hello["session"]
            if session is None or session["silent"] <= session["timeout"] or time.monotonic() > deadline:
                return hello
            time.sleep(0.1)

    def digests(self, names: tuple[str, ...] | None = None) -> dict[str, str]:
        answer = self.wire.ask("digests", names=None if names is None else list(names))
        return dict(answer["digests"])

    # One refit.

    def prepare(self, refit: Refit) -> Prepared:
        if self.kv == "keep" and self._prefix_caching:
            raise RefitError(
                "kv=keep on a server with prefix caching: other requests would read older weights' KV",
                engine_state="old",
                hint="start vLLM with --no-enable-prefix-caching, or leave kv=recompute",
            )
        if self._session is not None:
            self._end_own()
        before = str(self.wire.get("/weight_info").get("weight_version"))
        path, sha256 = refit.file, self._written.get(refit.file)
        try:
            if sha256 is None:
                path = self.wire.folder / f"refit-{refit.version}-{uuid.uuid4().hex[:8]}.safetensors"
                sha256 = worker_file(refit, path)
            answer = self.wire.ask(
                "prepare",
                file=str(path.absolute()),
                sha256=sha256,
                run=refit.run,
                version=refit.version,
                label=refit.label,
                have=refit.have,
                holder=self.holder,
                url=self.wire.url,
                timeout=self.session_timeout,
                whole=msgspec.to_builtins(refit.whole),
            )
        finally:
            if path != refit.file:
                path.unlink(missing_ok=True)  # what the worker mapped stays mapped
        session = str(answer["session"])
        self._refits = {session: (refit, before)}
        self._verified = answer["verified"]
        return Prepared(session=session, elements=int(answer["elements"]))

    def write_refit(self, delta: Delta, path: Path) -> int:
        nbytes, sha256 = write_changes(delta, path)
        self._written = {path: sha256}
        return nbytes

    def _end_own(self) -> None:
        """A refit of ours whose end was lost: take it back before the next one."""
        session = self._hello()["session"]
        if session is not None and session["holder"] == self.holder and session["state"] == "applied":
            self.wire.ask("rollback", session=session["id"])
            self._finish_any()
            self.wire.ask("close", session=session["id"])

    def pause(self, prepared: Prepared) -> None:
        self.wire.ask("pausing", session=prepared.session)
        clear = "true" if self.kv == "recompute" else "false"
        self.wire.post(f"/pause?mode=keep&clear_cache={clear}")

    def apply(self, prepared: Prepared) -> None:
        self._need_pause("apply")
        try:
            self.wire.post("/start_weight_update", {})
        except RefitError:
            # vLLM has a session open: ours, when this is a repetition, or one that somebody left behind.
            if self._state(prepared) == "applied":
                return
            self._finish_any()
            self.wire.post("/start_weight_update", {})
        self.wire.ask("apply", update=True, session=prepared.session)
        self._applied = prepared.session

    def verify(self, prepared: Prepared) -> Verification:
        """The worker reads back what it wrote as part of `apply`: an answered apply is a verified one. Of
        whole modules it knows what their loaders were given, and asks those that can be asked."""
        if self._applied != prepared.session and self._state(prepared) != "applied":
            raise RefitError("nothing is applied that could be verified", engine_state="old")
        return self._verified

    def invalidate(self, prepared: Prepared) -> None:  # noqa: ARG002
        if not self._prefix_caching:
            return
        if self.wire.post("/reset_prefix_cache").get("success") is not True:
            raise RefitError(
                "the prefix cache could not be reset: some request still holds blocks of it",
                engine_state="unknown",
                hint="a KV transfer may be in flight; the follower tries again",
            )

    def label(self, prepared: Prepared) -> None:
        refit, _ = self._known(prepared)
        self._need_pause("label")
        try:
            self.wire.post("/finish_weight_update", {"weight_version": refit.label})
        except RefitError:
            # A repetition after a lost answer: vLLM's session is over, the label perhaps not yet set.
            if self._state(prepared) != "committed":
                raise
            self.wire.post("/update_weight_version", {"new_version": refit.label})

    def resume(self) -> None:
        self.wire.post("/resume")

    def rollback(self, prepared: Prepared) -> None:
        _, before = self._known(prepared)
        self.wire.ask("rollback", session=prepared.session)
        self._finish_any()
        if str(self.wire.get("/weight_info").get("weight_version")) != before:
            self.wire.post("/update_weight_version", {"new_version": before})

    def close_session(self, prepared: Prepared) -> None:
        self.wire.ask("close", session=prepared.session)
        self._refits.pop(prepared.session, None)

    def set_hold(self, hold: Hold | None) -> None:
        self.wire.ask("hold", hold=None if hold is None else [hold.run, hold.version])

    def close(self) -> None:
        self.wire.close()

    # Small things.

    def _state(self, prepared: Prepared) -> str:
        session = self._hello()["session"]
        return str(session["state"]) if session is not None and session["id"] == prepared.session else "gone"

    def _known(self, prepared: Prepared) -> tuple[Refit, str]:
        try:
            return self._refits[prepared.session]
        except KeyError:
            raise ConflictError(
                f"no refit session {prepared.session} is open", hint="prepare again"
            ) from None

    def _need_pause(self, verb: str) -> None:
        """vLLM does not check it: an update while steps run would mix two versions in one pass."""
        if self.wire.get("/is_paused").get("is_paused") is not True:
            raise RefitError(
                f"cannot {verb}: somebody resumed the engine", engine_state="old", hint="pause it first"
            )

    def _finish_any(self) -> None:
        """End vLLM's own session if one is open; there is no way to ask."""
        with contextlib.suppress(RefitError):
            self.wire.post("/finish_weight_update", {})
