"""Refits in the scheduler process of SGLang.

`POST /weights_checker {"action": "weightline:{json}"}` reaches the scheduler between two steps, whether or
not the engine is paused; its answer is a file (`plugins/front.py`). Label and weights move in one such call:
nobody can resume the engine between them. What others do to the weights over SGLang's own routes is noticed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.metadata import version as installed
from typing import Any

import torch

from weightline.plugins.exchange import Refused
from weightline.plugins.front import Front
from weightline.plugins.sglang import boundary
from weightline.plugins.sglang.hooks import Hook
from weightline.plugins.sglang.kind import PREFIX, SglangDoor, SglangKind
from weightline.plugins.sglang.namespaces import Namespaces, renew

ATTRIBUTE = "weightline"
"""Where a scheduler keeps its `SchedulerFront`."""
UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_tensor",
    "update_weights_from_distributed",
    "update_weights_from_ipc",
    "resume_memory_occupation",
)
"""SGLang's own ways to change weights."""


class SchedulerFront(Front):
    """`Front` of one scheduler."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(SglangKind(), SglangDoor(), facts=self._facts, unready=self._unready)
        self.scheduler = scheduler
        self.namespaces: Namespaces | None = None
        """None where refits are refused: requests keep their own keys."""
        self.verbs |= {"label": self._label, "rollback": self._rollback}
        self.refusals += unsupported_parts(scheduler)
        if not self.refusals:
            config = scheduler.model_config
            self.open(scheduler.tp_worker.model_runner.model, config.model_path, config.revision)
            self.namespaces = Namespaces(serving_label())

    def _facts(self) -> dict[str, Any]:
        return {
            "sglang": installed("sglang"),
            "serving": serving_label(),
            "paused": bool(self.scheduler._engine_paused),
            "inexact": boundary.unsure(self.scheduler),
        }

    def _unready(self) -> str:
        if not self.scheduler._engine_paused:
            return "the engine is not paused"
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a pause in place leaves the last launched batch running
        return ""

    def _label(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Commit what was applied and move the label, in one breath. Idempotent."""
        _, refits = self.need()
        session = refits.find(str(request["session"]))
        if session.state not in ("applied", "committed"):
            raise Refused(f"cannot label: the refit is {session.state}", kind="conflict")
        refits.commit()
        self.scheduler.record_weight_version_change(new_version=session.order.label)
        return {}

    def _rollback(self, request: Mapping[str, Any]) -> dict[str, Any]:
        _, refits = self.need()
        session = refits.find(str(request["session"]))
        answer = super().rollback(request)
        if session.labelled:
            self.scheduler.record_weight_version_change(new_version=session.before.label)
        return answer

    def may_resume(self) -> bool:
        """Somebody resumes the engine: unlabelled weights must not sample a token."""
        session = None if self.refits is None else self.refits.session
        if self.refits is not None and session is not None and session.state == "applied":
            self.log.warning("weightline: resumed in the middle of a refit; the old weights are put back")
            try:
                self.refits.rollback(session.id)
            except Refused as error:
                self.log.error("weightline: the engine stays paused: %s", error.message)
                return False
        return True


def serving_label() -> str:
    """The label that the scheduler gives to new tokens."""
    from sglang.srt.runtime_context import get_serving

    return str(get_serving().weight_version)


def unsupported_parts(scheduler: Any) -> list[str]:
    """What of this server's configuration refits are not offered for."""
    arguments = scheduler.server_args
    found = []
    for name, field in (
        ("tensor-parallel", "tp_size"),
        ("pipeline-parallel", "pp_size"),
        ("data-parallel", "dp_size"),
    ):
        if getattr(arguments, field) > 1:
            found.append(f"{name} size {getattr(arguments, field)} is not supported")
    if arguments.disaggregation_mode != "null":
        found.append("prefill and decode are disaggregated: KV of older weights may still arrive")
    if arguments.speculative_algorithm is not None:
        found.append("speculative decoding is on: the draft model would keep older weights")
    if arguments.enable_lora:
        found.append("LoRA adapters are enabled: they wrap the modules that a refit writes to")
    if arguments.enable_memory_saver:
        found.append("the memory saver is on: it takes weights away behind a refit")
    if arguments.hicache_storage_backend is not None:
        found.append("a KV storage backend is attached: its cache survives a flush")
    if getattr(arguments, "weight_cache_mode", "off") != "off":
        found.append("weights are shared with a cache daemon: a refit would change those of other engines")
    if getattr(arguments, "enable_streaming_session", False):
        found.append("streaming sessions are enabled: they carry KV from turn to turn, past every namespace")
    if arguments.cpu_offload_gb > 0:
        found.append("weights are offloaded to host memory: their storage comes and goes")
    return found


def front_of(scheduler: Any) -> SchedulerFront | None:
    """The front of a scheduler; None when it has none (a second one of a process that makes several)."""
    found: SchedulerFront | None = vars(scheduler).get(ATTRIBUTE)
    return found


def _made(original: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    original(scheduler, *args, **kwargs)
    setattr(scheduler, ATTRIBUTE, SchedulerFront(scheduler))


def _asked(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    front = front_of(updater.scheduler)
    if front is None or not request.action.startswith(PREFIX):
        return original(updater, request)
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    try:
        front.serve(json.loads(request.action[len(PREFIX) :]))
    except (ValueError, OSError) as error:
        return CheckWeightsReqOutput(success=False, message=f"weightline: {error}")
    return CheckWeightsReqOutput(success=True, message="")


def _updating(how: str) -> Callable[..., Any]:
    def updated(original: Callable[..., Any], updater: Any, request: Any) -> Any:
        front = front_of(updater.scheduler)
        if front is None or front.refits is None or front.weights is None:
            return original(updater, request)
        try:
            with front.weights.written():
                return original(updater, request)
        finally:
            front.refits.foreign(how)
            renew(updater.scheduler)

    return updated


def _resumed(original: Callable[..., None], scheduler: Any, request: Any) -> None:
    front = front_of(scheduler)
    if front is None or front.may_resume():
        original(scheduler, request)


_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = (
    Hook(f"{_SCHEDULER}.__init__", _made),
    Hook(f"{_SCHEDULER}.continue_generation", _resumed),
    Hook(f"{_UPDATER}.check_weights", _asked),
    *(Hook(f"{_UPDATER}.{name}", _updating(name)) for name in UPDATES),
)
