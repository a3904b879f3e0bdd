"""The acceptance of the span proposal (SP9) and the rules around it, one deterministic scenario after the
other.

An update zeroes the head, so greedy decoding emits token 0 from then on; before it a marker version emits a
token that is not 0.
"""

from __future__ import annotations

from msgspec import Struct

from weightline.testing import rules
from weightline.testing.client import Ask, Client, OutputMode, Pause
from weightline.testing.flight import Flight, until
from weightline.testing.marker import MarkerModel
from weightline.testing.report import Findings
from weightline.testing.swaps import OWN, Mark, Swaps

TRIES = 4
"""A scenario whose requests ended before the pause came is run again so often, with more tokens."""


class Form(Struct, frozen=True):
    """How a request is asked and answered."""

    stream: bool
    mode: OutputMode

    @property
    def name(self) -> str:
        """For check ids."""
        return f"{'stream' if self.stream else 'whole'}.{self.mode}"


class Stage:
    """What every scenario needs: the engine, its swaps, requests with fresh ids and prompts, and where
    checks go."""

    def __init__(
        self,
        client: Client,
        swaps: Swaps,
        plain: MarkerModel,
        kv: MarkerModel,
        *,
        longest: int,
        prefix: int,
        modes: tuple[OutputMode, ...],
    ) -> None:
        self.client, self.swaps, self.plain, self.kv = client, swaps, plain, kv
        self.found = Findings()
        self.longest, self.prefix = longest, prefix
        self.forms = [Form(stream, mode) for stream in (True, False) for mode in modes]
        self._k = 0
        self._asked = 0

    def ask(self, tokens: int, form: Form | None = None, *, prompt: int = 6, **more: object) -> Ask:
        """A request whose prompt begins like no other."""
        self._asked += 1
        low, span = 3, self.plain.vocabulary - 3
        head = (low + self._asked % span, low + self._asked // span % span)
        body = tuple(low + (self._asked * 31 + i * 7) % span for i in range(max(0, prompt - 2)))
        form = form or Form(True, "tokens")
        fields = {"id": f"conform-{self.swaps.line.run[:6]}-{self._asked}", **more}
        return Ask(prompt=head + body, max_tokens=tokens, stream=form.stream, mode=form.mode, **fields)  # type: ignore[arg-type]

    def fly(self, ask: Ask) -> Flight:
        """Send it."""
        return Flight(self.client, ask)

    def marker(self, model: MarkerModel | None = None, pause: Pause = OWN) -> Mark:
        """Bring the engine to the next marker version, whose token is not 0."""
        model = model or self.plain
        return self.swaps.marker(model, self.next_k(model), pause)

    def next_k(self, model: MarkerModel) -> int:
        """The number of the next marker version."""
        self._k += 1
        while model.token(self._k) == 0:
            self._k += 1
        return self._k

    def zero(self) -> Mark:
        """Commit a version with a zeroed head (the engine does not have it yet)."""
        return self.swaps.commit(None, self._k, self.plain.zeroed(self._k))

    def waiting(self, count: int) -> None:
        """Until the engine knows of `count` requests; a second at most: some count only while they run."""
        until(lambda: self.client.live_requests() >= count, timeout=1.0)


def run(stage: Stage) -> None:
    """Every scenario; checks go to `stage.found`. The engine serves a marker version afterwards."""
    from weightline.testing import scenarios

    scenarios.control(stage)
    for pause in stage.client.pauses:
        if pause.aborts:
            aborting(stage, pause)
        elif pause.drains:
            draining(stage, pause)
        else:
            keeping(stage, pause)
    scenarios.there_and_back(stage)
    scenarios.several_outputs(stage)
    scenarios.stop_on_the_swap(stage)
    scenarios.queued_then_aborted(stage)
    scenarios.ids(stage)
    scenarios.label_alone(stage)
    scenarios.keys_and_values(stage)


def keeping(stage: Stage, pause: Pause) -> None:
    """Running requests are frozen, the head is zeroed, they go on; others come during the pause and after
    it."""
    client, found = stage.client, stage.found
    for attempt in range(TRIES):
        old = stage.marker()
        length = stage.longest >> (TRIES - 1 - attempt)
        flights = [(form, stage.fly(stage.ask(length, form))) for form in stage.forms]
        stage.waiting(len(flights))
        lead = stage.fly(stage.ask(length))
        lead.wait_tokens(4)
        client.pause(pause)
        early = lead.done or any(flight.done for _, flight in flights)
        paused = client.paused()
        admitted = [(form, stage.fly(stage.ask(6, form))) for form in stage.forms]
        stage.waiting(len(admitted) + 1)
        new = stage.zero()
        try:
            stage.swaps.refit(new, pause)
            label = client.label()
        finally:
            client.resume()
        done = [(form, flight.reply()) for form, flight in flights]
        lead.reply()
        if not early and all(len(reply.single.spans or ()) == 2 for _, reply in done):
            break
    name = pause.name
    found.add(f"{name}.paused", "the engine says that it is paused", paused, paused)
    found.add(
        f"{name}.weight-info", "weight_info names the new label before resume", label == new.label, label
    )
    found.add(
        f"{name}.resumed", "the engine says that it is not paused after resume", not client.paused(), ""
    )
    for form, reply in done:
        id = f"{name}.{form.name}"
        rules.ended(found, id, reply, "length")
        rules.whole(found, id, reply)
        rules.delivered(found, id, reply)
        rules.covered(found, id, reply.single)
        rules.labelled(found, id, reply.single, old, new)
        rules.boundary(found, id, reply.single, old, new)
        if form.mode == "text":
            rules.text_is_there(found, id, reply)
    for form, flight in admitted:
        _new_only(stage, f"{name}.admitted.{form.name}", flight, new)
    for form in stage.forms:
        _new_only(stage, f"{name}.after.{form.name}", stage.fly(stage.ask(5, form)), new)


def _new_only(stage: Stage, id: str, flight: Flight, mark: Mark) -> None:
    reply = flight.reply()
    rules.ended(stage.found, id, reply, "length")
    rules.labelled(stage.found, id, reply.single, mark)
    rules.exact(stage.found, id, reply.single, mark)


def aborting(stage: Stage, pause: Pause) -> None:
    """Running requests end with what they have; one comes with a long prompt just before."""
    client, found = stage.client, stage.found
    for attempt in range(TRIES):
        old = stage.marker()
        length = stage.longest >> (TRIES - 1 - attempt)
        flights = [(form, stage.fly(stage.ask(length, form))) for form in stage.forms]
        stage.waiting(len(flights))
        lead = stage.fly(stage.ask(length))
        lead.wait_tokens(4)
        late = [(form, stage.fly(stage.ask(8, form, prompt=stage.longest // 2))) for form in stage.forms]
        client.pause(pause)
        new = stage.zero()
        try:
            stage.swaps.refit(new, pause)
        finally:
            client.resume()
        done = [(form, flight.reply()) for form, flight in flights]
        lead.reply()
        lates = [(form, flight.reply()) for form, flight in late]
        if all(reply.single.finish == ["abort"] for _, reply in done):
            break
    for form, reply in done:
        id = f"{pause.name}.{form.name}"
        rules.ended(found, id, reply, "abort")
        rules.delivered(found, id, reply)
        rules.covered(found, id, reply.single)
        rules.labelled(found, id, reply.single, *([old] if reply.single.token_ids else []))
        rules.exact(found, id, reply.single, old)
        count = len(reply.single.token_ids)
        found.add(
            f"{id}.partial", "it ends with the tokens it had", count < reply.ask.max_tokens, f"{count} tokens"
        )
    for form, reply in lates:
        id = f"{pause.name}.long-prompt.{form.name}"
        reason = reply.single.finish[0] if reply.single.finish else ""
        rules.ended(found, id, reply, reason if reason in ("abort", "length") else "abort")
        rules.covered(found, id, reply.single)
        spans = reply.single.spans
        found.add(f"{id}.spans", "[] or one span", spans is not None and len(spans) <= 1, spans)
        rules.exact(found, id, reply.single, old, new)
    for form in stage.forms:
        _new_only(stage, f"{pause.name}.after.{form.name}", stage.fly(stage.ask(5, form)), new)


def draining(stage: Stage, pause: Pause) -> None:
    """Running requests run to their end under the old weights; those that come meanwhile are of one
    version."""
    client, found = stage.client, stage.found
    old = stage.marker()
    length = stage.longest // 4
    flights = [(form, stage.fly(stage.ask(length, form))) for form in stage.forms]
    stage.waiting(len(flights))
    lead = stage.fly(stage.ask(length))
    lead.wait_tokens(2)
    later = stage.fly(stage.ask(length))  # keeps the engine busy while others come
    meanwhile = [(form, stage.fly(stage.ask(4, form))) for form in stage.forms]
    client.pause(pause)
    new = stage.zero()
    try:
        stage.swaps.refit(new, pause)
    finally:
        client.resume()
    for form, flight in flights:
        id, reply = f"{pause.name}.{form.name}", flight.reply()
        rules.ended(found, id, reply, "length")
        rules.whole(found, id, reply)
        rules.delivered(found, id, reply)
        rules.labelled(found, id, reply.single, old)
        rules.exact(found, id, reply.single, old)
    for form, flight in meanwhile:
        id, reply = f"{pause.name}.meanwhile.{form.name}", flight.reply()
        rules.ended(found, id, reply, "length")
        spans = reply.single.spans or []
        found.add(f"{id}.one", "it is of one version", len(spans) == 1, spans)
        rules.exact(found, id, reply.single, old, new)
    lead.reply()
    later.reply()
    for form in stage.forms:
        _new_only(stage, f"{pause.name}.after.{form.name}", stage.fly(stage.ask(5, form)), new)
