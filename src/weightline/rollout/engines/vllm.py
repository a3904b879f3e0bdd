"""A stock vLLM server over its own routes and the weightline plugin inside it (docs/engines/vllm.md)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from weightline.errors import RefitError
from weightline.rollout.engines.plugged import PluggedEngine
from weightline.rollout.engines.wire import PluginWire

if TYPE_CHECKING:
    from weightline.rollout.engines.base import Prepared, Refit


class VllmWire(PluginWire):
    """vLLM's update routes carry requests of any shape, and return nothing."""

    kind = "vllm"
    alive = "/weight_info"
    hint = (
        'start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend":"weightline"}\', '
        "with weightline installed beside vLLM"
    )

    def carry(self, request: dict[str, Any], *, update: bool) -> None:
        if update:
            self.post("/update_weights", {"update_info": request})
        else:
            self.post("/init_weight_transfer_engine", {"init_info": request})


class VllmEngine(PluggedEngine):
    """`EnginePort` on a vLLM server at `url` ("http://host:port", "http://host:port?kv=keep").

    `kv=keep` is only for a server without prefix caching. For the other options see `PluggedEngine`.
    """

    wire_class = VllmWire
    _prefix_caching = True

    def _heard(self, hello: dict[str, Any]) -> None:
        self._prefix_caching = bool(hello["prefix_caching"])

    def _label(self) -> str:
        return str(self.wire.get("/weight_info").get("weight_version"))

    def _paused(self, _hello: dict[str, Any] | None = None) -> bool:
        return bool(self.wire.get("/is_paused").get("is_paused"))

    def prepare(self, refit: Refit) -> Prepared:
        if self.kv == "keep" and self._prefix_caching:
            raise RefitError(
                "kv=keep on a server with prefix caching: other requests would read older weights' KV",
                engine_state="old",
                hint="start vLLM with --no-enable-prefix-caching, or leave kv=recompute",
            )
        return super().prepare(refit)

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
            self._end_update()
            self.wire.post("/start_weight_update", {})
        self.wire.ask("apply", update=True, session=prepared.session)
        self._applied = prepared.session

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
        self._end_update()
        if self._label() != before:
            self.wire.post("/update_weight_version", {"new_version": before})

    def _need_pause(self, verb: str) -> None:
        """vLLM does not check it: an update while steps run would mix two versions in one pass."""
        if not self._paused():
            raise RefitError(
                f"cannot {verb}: somebody resumed the engine", engine_state="old", hint="pause it first"
            )

    def _end_update(self) -> None:
        # There is no way to ask whether a session is open.
        with contextlib.suppress(RefitError):
            self.wire.post("/finish_weight_update", {})
