"""Our control routes under `/weightline/` (contract: docs/design/0001): how a follower refits the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weightline.errors import ConflictError, InvalidInput, WeightlineError
from weightline.generate.engine import Engine
from weightline.generate.wire import DigestsBody, HoldBody, RefitOrder, SessionBody, SwitchBody

log = logging.getLogger(__name__)
T = TypeVar("T")
Answer = Callable[[Request], Awaitable[Any]]


class ControlRoutes:
    """Each handler returns what becomes the JSON answer."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def routes(self) -> list[Route]:
        """For `Starlette`."""
        posts: dict[str, Answer] = {
            "prepare": self.prepare,
            "digests": self.digests,
            "hold": self.hold,
            "switch": self.switch,
            "apply": self._verb(self._apply),
            "verify": self._verb(self._verify),
            "invalidate": self._verb(self._invalidate),
            "label": self._verb(self._label),
            "rollback": self._verb(self._rollback),
            "close": self._verb(self._close),
        }
        return [
            Route("/weightline/describe", _answered(self.describe), methods=["GET"]),
            *(
                Route(f"/weightline/{name}", _answered(answer), methods=["POST"])
                for name, answer in posts.items()
            ),
        ]

    async def describe(self, _request: Request) -> Any:
        """What the engine serves."""
        return await asyncio.to_thread(self.engine.describe)

    async def prepare(self, request: Request) -> Any:
        """Open a session, decode and check its delta while the engine serves."""
        order = await _body(request, RefitOrder)
        session, _ = await asyncio.to_thread(self.engine.prepare, order)
        facts = await asyncio.wrap_future(self.engine.post(lambda: self.engine.refits.facts(session)))
        return {"session": session, **facts}

    async def switch(self, request: Request) -> Any:
        """Apply, verify and label between two steps of an engine that is not paused."""
        body = await _body(request, SwitchBody)
        refits = self.engine.refits

        def act() -> Any:
            identity = refits.switch(body.session, clear_cache=body.clear_cache)
            named = {"label": identity.label, "version": identity.version, "verified": "live"}
            return {**named, **refits.facts(body.session)}

        return await asyncio.wrap_future(self.engine.post(act))

    async def digests(self, request: Request) -> Any:
        """Additive digests of live tensors, recomputed in full."""
        body = await _body(request, DigestsBody)
        found, identity = await asyncio.to_thread(self.engine.digests, body.names)
        return {"digests": found, "label": identity.label, "version": identity.version}

    async def hold(self, request: Request) -> Any:
        """Remember for all followers that the engine stays where it is told to."""
        self.engine.hold = (await _body(request, HoldBody)).hold
        return {}

    def _verb(self, act: Callable[[str], dict[str, Any]]) -> Answer:
        """A verb of an open session, run on the engine thread between two steps."""

        async def answer(request: Request) -> Any:
            body = await _body(request, SessionBody)
            return await asyncio.wrap_future(self.engine.post(lambda: act(body.session)))

        return answer

    def _apply(self, session: str) -> dict[str, Any]:
        self.engine.refits.apply(session)
        return self.engine.refits.facts(session)

    def _verify(self, session: str) -> dict[str, Any]:
        self.engine.refits.verify(session)
        return {"verified": "live"}

    def _invalidate(self, session: str) -> dict[str, Any]:
        return {"invalidated": self.engine.refits.invalidate(session)}

    def _label(self, session: str) -> dict[str, Any]:
        try:
            identity = self.engine.refits.label(session)
        except ConflictError as error:
            self.engine.metrics.refused_labels += 1
            log.warning("label refused: %s", error)
            raise
        return {"label": identity.label, "version": identity.version}

    def _rollback(self, session: str) -> dict[str, Any]:
        self.engine.refits.rollback(session)
        return {"label": self.engine.identity.label, "version": self.engine.identity.version}

    def _close(self, session: str) -> dict[str, Any]:
        self.engine.refits.close(session)
        return {"closed": True}


def control_routes(engine: Engine) -> list[Route]:
    """Routes over a started engine."""
    return ControlRoutes(engine).routes()


async def _body(request: Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except msgspec.DecodeError as error:
        raise InvalidInput(
            f"{request.url.path}: request body: {error}", hint="see docs/design/0001 for the fields"
        ) from None


def _answered(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        try:
            content, status = await answer(request), 200
        except WeightlineError as error:
            content, status = error.to_dict(), error.status.http
        return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")

    return handle
