"""What a follower asks of a plugin, in every engine: small JSON requests that name files in the follower's
runtime folder, where the answers are written too (`exchange`).

An answered refusal is no exception: an engine may drop its own session over one. `prepare` and `digests` are
answered by a background thread, everything else at once, on the thread that runs the engine's steps.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from weightline.plugins import folder, sums
from weightline.plugins.exchange import Refused, write_answer
from weightline.plugins.kind import Door, Kind
from weightline.plugins.live import LiveWeights
from weightline.plugins.session import Refits
from weightline.plugins.watchdog import Watchdog

PROTOCOL = 1
ROTATE = 4
"""Tensors whose digest is recomputed in full in the background after each refit, in turn."""


class Front:
    """One in each worker, made after the model was loaded and before it serves."""

    def __init__(
        self,
        kind: Kind,
        door: Door,
        *,
        facts: Callable[[], Mapping[str, Any]],
        unready: Callable[[], str] = lambda: "",
    ) -> None:
        """`facts`: what `hello` says of this engine beside what all say. `unready`: why nothing may be
        written now (an engine that can tell that it is not paused); empty when it may."""
        self.kind, self.facts, self.unready = kind, facts, unready
        self.log = logging.getLogger(f"{kind.name}.weightline")
        self.instance = uuid4().hex
        self.refusals: list[str] = []
        """Why this engine cannot be refitted; empty when it can."""
        self.weights: LiveWeights | None = None
        self.refits: Refits | None = None
        self.verbs: dict[str, Callable[[Mapping[str, Any]], dict[str, Any] | None]] = {
            "hello": self._hello,
            "prepare": self._prepare,
            "pausing": self._pausing,
            "apply": self._apply,
            "rollback": self.rollback,
            "close": self._close,
            "digests": self._digests,
            "heal": self._heal,
            "hold": self._hold,
        }
        """Action -> what it does; an engine may add its own."""
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._rotation = 0
        self._thread = threading.Thread(target=self._work, name="weightline", daemon=True)
        self._thread.start()
        self.watchdog = Watchdog(self, door, self.log)
        self.watchdog.start()

    def open(self, model: Any, source: str, revision: str | None) -> None:
        """Mapping and proofs; the comparison with the folder goes on in the background. A model that cannot
        be refitted serves all the same, and says why when asked."""
        try:
            where = folder.find(source, revision)
            self.weights = LiveWeights(self.kind, model, folder.read(where))
            self.refits = Refits(self.weights)
        except Refused as error:
            self.refusals.append(error.message)
            return
        weights = self.weights
        self._jobs.put(lambda: self._prove(weights))

    def _prove(self, weights: LiveWeights) -> None:
        weights.prove()
        whole = [place for place in weights.places.values() if place.group is not None]
        refused = [place for place in weights.places.values() if place.refusal and place.group is None]
        self.log.info(
            "weightline: %d tensors mapped, %d of them go as whole modules, %d are refused",
            len(weights.places), len(whole), len(refused),
        )  # fmt: skip
        for place in (whole + refused)[:20]:
            way = "goes with its whole module" if place.group is not None else "cannot be refitted"
            self.log.warning("weightline: %s %s: %s", place.name, way, place.refusal)

    def commit(self) -> None:
        """The label is about to move: what was applied is what the engine serves."""
        if self.refits is not None:
            self.refits.commit()

    def close(self) -> None:
        """Stop the threads."""
        self.watchdog.stop()
        self._jobs.put(None)

    # Requests.

    def serve(self, request: Mapping[str, Any]) -> None:
        """Act and write the answer. Raises `ValueError` for what is no request of a follower."""
        act = self.verbs.get(str(request.get("action")))
        if act is None:
            raise ValueError(f"weightline: unknown action {request.get('action')!r}")
        self._answer(Path(str(request.get("answer", ""))), lambda: act(request))

    def _answer(self, path: Path, act: Callable[[], dict[str, Any] | None]) -> None:
        """Run `act` and write what it returns; None means that a background job writes the answer."""
        try:
            result = act()
        except Refused as error:
            result = {"error": error.to_dict()}
        except Exception as error:
            self.log.exception("weightline: request failed")
            unknown = Refused(
                f"{type(error).__name__}: {error}", state="unknown", hint="see the engine's log"
            )
            result = {"error": unknown.to_dict()}
        if result is not None:
            write_answer(path, {"instance": self.instance, **result})

    def need(self) -> tuple[LiveWeights, Refits]:
        """Raises `Refused` when this engine cannot be refitted."""
        if self.refusals or self.weights is None or self.refits is None:
            raise Refused(
                "this engine cannot be refitted: " + "; ".join(self.refusals),
                kind="invalid_input",
                hint=f'see docs/engines/{self.kind.name}.md, "What is refused"',
            )
        return self.weights, self.refits

    def _hello(self, request: Mapping[str, Any]) -> dict[str, Any]:
        weights, refits = self.need()
        session = refits.session
        answer: dict[str, Any] = {
            "protocol": PROTOCOL,
            "run": refits.identity.run,
            "version": refits.identity.version,
            "label": refits.identity.label,
            "quarantined": refits.quarantined,
            "proved": weights.proved.is_set(),
            "session": None,
            "hold": refits.hold,
            **self.facts(),
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
        _, refits = self.need()
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
        _, refits = self.need()
        refits.find(str(request["session"])).pausing = True
        return {}

    def _apply(self, request: Mapping[str, Any]) -> dict[str, Any]:
        _, refits = self.need()
        why = self.unready()
        if why:
            raise Refused(f"cannot apply: {why}", hint="pause it first")
        return {"elements": refits.apply(str(request["session"]))}

    def rollback(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The action "rollback"."""
        _, refits = self.need()
        refits.rollback(str(request["session"]))
        return {"label": refits.identity.label}

    def _close(self, request: Mapping[str, Any]) -> dict[str, Any]:
        _, refits = self.need()
        refits.close(str(request["session"]))
        self._jobs.put(self.rotate)
        return {}

    def _digests(self, request: Mapping[str, Any]) -> None:
        weights, _ = self.need()
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
        _, refits = self.need()
        session = refits.session
        if session is not None and refits.silence(session) > session.timeout:
            self.watchdog.wake()
        return {}

    def _hold(self, request: Mapping[str, Any]) -> dict[str, Any]:
        _, refits = self.need()
        hold = request["hold"]
        refits.hold = None if hold is None else (str(hold[0]), int(hold[1]))
        return {}

    # Background.

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                self.log.exception("weightline: background job failed")

    def rotate(self) -> None:
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
                self.log.error("weightline: %s", refits.quarantined)
