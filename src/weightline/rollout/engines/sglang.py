"""A stock SGLang server over its own routes and the weightline plugin inside it (docs/engines/sglang.md)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from weightline.errors import RefitError
from weightline.rollout.engines.plugged import PluggedEngine
from weightline.rollout.engines.wire import PluginWire

if TYPE_CHECKING:
    from weightline.rollout.engines.base import Prepared, Refit

PREFIX = "weightline:"
"""What the plugin knows a request by, in the `action` of SGLang's `/weights_checker`."""


class SglangWire(PluginWire):
    """SGLang's `/weights_checker` reaches the scheduler process between two steps, paused or not."""

    kind = "sglang"
    alive = "/model_info"
    hint = "start an SGLang server with weightline installed beside it (its plugin loads by itself)"

    def carry(self, request: dict[str, Any], *, update: bool) -> None:  # noqa: ARG002
        self.post("/weights_checker", {"action": PREFIX + json.dumps(request, separators=(",", ":"))})


class SglangEngine(PluggedEngine):
    """`EnginePort` on an SGLang server at `url` ("http://host:port", "http://host:port?kv=keep").

    `kv=recompute`: requests are retracted, every cached prefix is dropped, and KV is computed anew under the
    new weights. `kv=keep`: requests are frozen in place and keep their KV; nothing is flushed, and no request
    of another version matches it. For the other options see `PluggedEngine`.
    """

    wire_class = SglangWire
    _serving = ""
    _inexact = "its plugin was not asked yet"

    def _heard(self, hello: dict[str, Any]) -> None:
        self._serving, self._inexact = str(hello["serving"]), str(hello["inexact"])

    def _label(self) -> str:
        # As of the last hello: a follower looks at its engine before every refit.
        return self._serving

    def _paused(self, hello: dict[str, Any]) -> bool:
        return bool(hello["paused"])

    def prepare(self, refit: Refit) -> Prepared:
        if self.kv == "keep" and self._inexact:
            raise RefitError(
                f"kv=keep on a server whose labels would not be exact: {self._inexact}",
                engine_state="old",
                hint="leave kv=recompute",
            )
        return super().prepare(refit)

    def pause(self, prepared: Prepared) -> None:
        self.wire.ask("pausing", session=prepared.session)
        mode = "in_place" if self._keeps(prepared) else "retract"
        self.wire.post("/pause_generation", {"mode": mode})

    def apply(self, prepared: Prepared) -> None:
        self.wire.ask("apply", update=True, session=prepared.session)
        self._applied = prepared.session

    def invalidate(self, prepared: Prepared) -> None:
        if not self._keeps(prepared):
            # Answers 400 when the cache is still in use.
            self.wire.post("/flush_cache")

    def label(self, prepared: Prepared) -> None:
        refit, _ = self._known(prepared)
        self.wire.ask("label", session=prepared.session)
        # The scheduler has it; now the front end, for what it says without asking the scheduler.
        self._set_label(refit.label)

    def resume(self) -> None:
        self.wire.post("/continue_generation", {"torch_empty_cache": False})

    def rollback(self, prepared: Prepared) -> None:
        _, before = self._known(prepared)
        self.wire.ask("rollback", session=prepared.session)
        self._set_label(before)

    def _keeps(self, prepared: Prepared) -> bool:
        """In place only from known weights: after a refit in full the label may be one that the engine had
        before, with other weights behind it."""
        return self.kv == "keep" and self._known(prepared)[0].have is not None

    def _set_label(self, label: str) -> None:
        self.wire.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})
