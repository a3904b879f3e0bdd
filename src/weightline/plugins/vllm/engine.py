"""The weight transfer engine `weightline`: vLLM's verbs in, refits out.

What crosses HTTP is small JSON that names files in the follower's runtime folder; answers are files there
too, because vLLM's routes return nothing. `POST /init_weight_transfer_engine {"init_info": {...}}` carries
everything that may happen at any time (hello, prepare, digests, rollback, close); `POST /update_weights`
carries `apply`, inside vLLM's own session (`/start_weight_update` … `/finish_weight_update`), whose end
commits. An answered refusal is no exception: vLLM would drop its session over it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any
from uuid import uuid4

from vllm.distributed.weight_transfer.base import WeightTransferEngine

from weightline.plugins import sums
from weightline.plugins.exchange import Refused, write_answer
from weightline.plugins.vllm import folder
from weightline.plugins.vllm.live import LiveWeights
from weightline.plugins.vllm.session import Refits
from weightline.plugins.vllm.watchdog import Watchdog

log = logging.getLogger("vllm.weightline")

PROTOCOL = 1
ROTATE = 4
"""Tensors whose digest is recomputed in full in the background after each refit, in turn."""


@dataclass
class Request:
    """One request of a follower, as vLLM hands it over."""

    body: dict[str, Any]


class WeightlineTransferEngine(WeightTransferEngine[Request, Request]):  # type: ignore[misc]
    """Created once in each worker, after the model was loaded and before it serves."""

    init_info_cls = Request
    update_info_cls = Request
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self.instance = uuid4().hex
        self.refusals: list[str] = []
        self.weights: LiveWeights | None = None
        self.refits: Refits | None = None
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._rotation = 0
        self._open(vllm_config, model)
        self._thread = threading.Thread(target=self._work, name="weightline", daemon=True)
        self._thread.start()
        self.watchdog = Watchdog(self)
        self.watchdog.start()

    def _open(self, vllm_config: Any, model: Any) -> None:
        """Mapping and proofs. A model that cannot be refitted serves all the same, and says why when
        asked."""
        self.refusals += unsupported_parts(vllm_config)
        try:
            where = folder.find(vllm_config.model_config.model, vllm_config.model_config.revision)
            self.weights = LiveWeights(model, folder.read(where), vllm_config)
            self.refits = Refits(self.weights)
        except Refused as error:
            self.refusals.append(error.message)
            return
        weights = self.weights
        self._jobs.put(lambda: self._prove(weights))

    @staticmethod
    def _prove(weights: LiveWeights) -> None:
        weights.prove()
        whole = [place for place in weights.places.values() if place.group is not None]
        refused = [place for place in weights.places.values() if place.refusal and place.group is None]
        log.info(
            "weightline: %d tensors mapped, %d of them go as whole modules, %d are refused",
            len(weights.places), len(whole), len(refused),
        )  # fmt: skip
        for place in (whole + refused)[:20]:
            way = "goes with its whole module" if place.group is not None else "cannot be refitted"
            log.warning("weightline: %s %s: %s", place.name, way, place.refusal)

    # vLLM's interface.

    def parse_init_info(self, init_dict: dict[str, Any]) -> Request:
        return Request(dict(init_dict))

    def parse_update_info(self, update_dict: dict[str, Any]) -> Request:
        return Request(dict(update_dict))

    def init_transfer_engine(self, init_info: Request) -> None:
        if init_info.body:
            self._serve(init_info.body)

    def receive_weights(self, update_info: Request) -> None:
        self._serve(update_info.body)

    def start_weight_update(self) -> None:
        """Nothing to do: writes go into the live storage."""

    def finish_weight_update(self) -> None:
        """vLLM's session ends, and sets the label next: an applied refit is committed."""
        if self.refits is not None:
            self.refits.commit()

    def shutdown(self) -> None:
        self.watchdog.stop()
        self._jobs.put(None)

    # Requests.

    def _serve(self, request: dict[str, Any]) -> None:
        answer = Path(str(request.get("answer", "")))
        verbs: dict[str, Callable[[Mapping[str, Any]], dict[str, Any] | None]] = {
            "hello": self._hello,
            "prepare": self._prepare,
            "pausing": self._pausing,
            "apply": self._apply,
            "rollback": self._rollback,
            "close": self._close,
            "digests": self._digests,
            "heal": self._heal,
            "hold": self._hold,
        }
        act = verbs.get(str(request.get("action")))
        if act is None:
            raise ValueError(f"weightline: unknown action {request.get('action')!r}")
        self._answer(answer, lambda: act(request))

    def _answer(self, path: Path, act: Callable[[], dict[str, Any] | None]) -> None:
        """Run `act` and write what it returns; None means that a background job writes the answer."""
        try:
            result = act()
        except Refused as error:
            result = {"error": error.to_dict()}
        except Exception as error:
            log.exception("weightline: request failed")
            unknown = Refused(
                f"{type(error).__name__}: {error}", state="unknown", hint="see the engine's log"
            )
            result = {"error": unknown.to_dict()}
        if result is not None:
            write_answer(path, {"instance": self.instance, **result})

    def _need(self) -> tuple[LiveWeights, Refits]:
        if self.refusals or self.weights is None or self.refits is None:
            raise Refused(
                "this engine cannot be refitted: " + "; ".join(self.refusals),
                kind="invalid_input",
                hint='see docs/engines/vllm.md, "What is refused"',
            )
        return self.weights, self.refits

    def _hello(self, request: Mapping[str, Any]) -> dict[str, Any]:
        weights, refits = self._need()
        session = refits.session
        answer: dict[str, Any] = {
            "protocol": PROTOCOL,
            "vllm": installed("vllm"),
            "run": refits.identity.run,
            "version": refits.identity.version,
            "label": refits.identity.label,
            "quarantined": refits.quarantined,
            "proved": weights.proved.is_set(),
            "prefix_caching": bool(self.vllm_config.cache_config.enable_prefix_caching),
            "session": None,
            "hold": refits.hold,
        }
        if session is not None:
            answer["session"] = {
                "id": session.id,
                "holder": session.holder,
                "state": session.state,
                "silent": refits.silence(session),
                "timeout": session.timeout,
            }
        if request.get("tensors"):
            answer["tensors"] = [[name, dtype, list(shape)] for name, dtype, shape in weights.specs()]
            answer["aliases"] = weights.aliases
            answer["groups"] = weights.groups()
        return answer

    def _prepare(self, request: Mapping[str, Any]) -> None:
        _, refits = self._need()
        self.watchdog.wake()
        session = refits.open(request)
        path = Path(str(request["answer"]))

        def job() -> None:
            def act() -> dict[str, Any]:
                refits.prepare(session, request)
                verified = "live" if session.whole is None else "loader_input"
                return {"session": session.id, "elements": session.elements, "verified": verified}

            self._answer(path, act)

        self._jobs.put(job)

    def _pausing(self, request: Mapping[str, Any]) -> dict[str, Any]:
        _, refits = self._need()
        refits.find(str(request["session"])).pausing = True
        return {}

    def _apply(self, request: Mapping[str, Any]) -> dict[str, Any]:
        _, refits = self._need()
        return {"elements": refits.apply(str(request["session"]))}

    def _rollback(self, request: Mapping[str, Any]) -> dict[str, Any]:
        _, refits = self._need()
        refits.rollback(str(request["session"]))
        return {"label": refits.identity.label}

    def _close(self, request: Mapping[str, Any]) -> dict[str, Any]:
        _, refits = self._need()
        refits.close(str(request["session"]))
        self._jobs.put(self._rotate)
        return {}

    def _digests(self, request: Mapping[str, Any]) -> None:
        weights, _ = self._need()
        path, names = Path(str(request["answer"])), request.get("names")

        def act() -> dict[str, Any]:
            wanted = list(names) if names is not None else [*weights.places, *weights.aliases]
            unknown = [n for n in wanted if weights.aliases.get(n, n) not in weights.places]
            if unknown:
                raise Refused(f"no such tensors: {', '.join(unknown)}", kind="invalid_input")
            # What the engine processed after loading has no bits to read: those names are left out.
            plain = [n for n in wanted if weights.places[weights.aliases.get(n, n)].group is None]
            return {"digests": {name: sums.render(weights.digest(name)) for name in plain}}

        self._jobs.put(lambda: self._answer(path, act))

    def _heal(self, _request: Mapping[str, Any]) -> dict[str, Any]:
        _, refits = self._need()
        session = refits.session
        if session is not None and refits.silence(session) > session.timeout:
            self.watchdog.wake()
        return {}

    def _hold(self, request: Mapping[str, Any]) -> dict[str, Any]:
        _, refits = self._need()
        hold = request["hold"]
        refits.hold = None if hold is None else (str(hold[0]), int(hold[1]))
        return {}

    # Background.

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("weightline: background job failed")

    def _rotate(self) -> None:
        """Recompute some digests from the live storage; one that rotted quarantines the engine."""
        weights, refits = self.weights, self.refits
        if weights is None or refits is None or refits.session is not None:
            return
        names = sorted(weights.carried)
        for _ in range(min(ROTATE, len(names))):
            name = names[self._rotation % len(names)]
            self._rotation += 1
            before = weights.generation
            try:
                found = weights.digest(name)
            except Refused:
                found = None
            if weights.generation != before or refits.session is not None:
                return
            if found is None or found != weights.carried.get(name):
                refits.quarantine(f"the live bytes of {name} changed behind every refit")
                log.error("weightline: %s", refits.quarantined)


def unsupported_parts(vllm_config: Any) -> list[str]:
    """What of this engine's configuration refits are not offered for."""
    found = []
    parallel = vllm_config.parallel_config
    for name, size in (
        ("tensor-parallel", parallel.tensor_parallel_size),
        ("pipeline-parallel", parallel.pipeline_parallel_size),
        ("data-parallel", parallel.data_parallel_size),
    ):
        if size > 1:
            found.append(f"{name} size {size} is not supported")
    if getattr(vllm_config, "kv_transfer_config", None) is not None:
        found.append("a KV connector is configured: its cache may survive a refit")
    if getattr(vllm_config, "ec_transfer_config", None) is not None:
        found.append("an encoder-cache connector is configured: its cache may survive a refit")
    if getattr(vllm_config, "lora_config", None) is not None:
        found.append("LoRA adapters are enabled: they wrap the modules that a refit writes to")
    return found
