"""What the adapters of all engines with a weightline plugin inside have in common.

The order of a refit is the follower's (`rollout/transaction.py`); an adapter says how each verb is done on
its engine. What crosses HTTP is small: bytes lie in a file that the engine's worker maps.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from weightline.errors import ConflictError, InvalidInput, RefitError, Unavailable
from weightline.rollout.engines.base import EngineDescription, Hold, Prepared, Refit
from weightline.rollout.engines.worker_file import worker_file, write_changes
from weightline.types import TensorSpec, Verification

if TYPE_CHECKING:
    from pathlib import Path

    import httpx

    from weightline.codec import Delta
    from weightline.rollout.engines.wire import PluginWire

SESSION_TIMEOUT = 30.0
"""Seconds of silence after which the engine itself ends a refit of ours."""
HEAL = 15.0
"""Seconds to wait for the engine to end the refit of a follower that is gone."""


class PluggedEngine:
    """The common part of `EnginePort` for engines with the plugin.

    URL options: `kv=recompute` (default): running requests recompute their KV under the new weights.
    `kv=keep`: they keep the KV that older weights computed. `session_timeout=SECONDS`: silence after which
    the engine itself ends a refit.
    """

    wire_class: ClassVar[type[PluginWire]]

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
        self.wire = self.wire_class(
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

    # What an engine's own adapter says.

    def _heard(self, hello: dict[str, Any]) -> None:
        """Note what `hello` says of this engine alone."""
        raise NotImplementedError

    def _label(self) -> str:
        """The label that new tokens carry."""
        raise NotImplementedError

    def _paused(self, _hello: dict[str, Any]) -> bool:
        """Is the engine paused, by whomever?"""
        raise NotImplementedError

    def _end_update(self) -> None:
        """End the engine's own update session, if it may have one open."""

    # What it serves.

    def describe(self) -> EngineDescription:
        hello = self._hello()
        session = hello["session"]
        if session is not None and session["silent"] > session["timeout"]:
            hello = self._healed()
        return EngineDescription(
            kind=self.wire.kind,
            label=self._label(),
            version=hello["version"],
            run=hello["run"],
            instance=hello["instance"],
            paused=self._paused(hello),
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
        self._session = hello["session"]
        self._heard(hello)
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
        if self._session is not None:
            self._end_own()
        before = self._label()
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
            self._end_update()
            self.wire.ask("close", session=session["id"])

    def verify(self, prepared: Prepared) -> Verification:
        """The worker reads back what it wrote as part of `apply`: an answered apply is a verified one. Of
        whole modules it knows what their loaders were given, and asks those that can be asked."""
        if self._applied != prepared.session and self._state(prepared) != "applied":
            raise RefitError("nothing is applied that could be verified", engine_state="old")
        return self._verified

    def close_session(self, prepared: Prepared) -> None:
        self.wire.ask("close", session=prepared.session)
        self._refits.pop(prepared.session, None)

    def set_hold(self, hold: Hold | None) -> None:
        self.wire.ask("hold", hold=None if hold is None else [hold.run, hold.version])

    def close(self) -> None:
        self.wire.close()

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
