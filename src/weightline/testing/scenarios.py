"""The smaller scenarios: control routes, A to B to A, several outputs, stops, ids, labels alone, and whose
KV is read."""

from __future__ import annotations

from weightline.testing import rules
from weightline.testing.acceptance import TRIES, Form, Stage
from weightline.testing.client import ABORT_WHILE_PAUSED, Pause
from weightline.testing.flight import until
from weightline.testing.swaps import Mark


def control(stage: Stage) -> None:
    """Routes that change no weights."""
    client, found = stage.client, stage.found
    mark = stage.marker()
    found.add(
        "control.label",
        "the engine's label is the committed one",
        client.label() == mark.label,
        client.label(),
    )
    keep = _keep(stage)
    client.pause(keep)
    client.pause(keep)
    found.add("control.pause-twice", "a second pause changes nothing", client.paused(), "")
    client.resume()
    client.resume()
    found.add("control.resume-twice", "a second resume changes nothing", not client.paused(), "")
    for id, what, ok, text in client.surface():
        found.add(f"control.{id}", what, ok, text)
    found.add("control.unchanged", "the label is as it was", client.label() == mark.label, client.label())


def there_and_back(stage: Stage) -> None:
    """A to B to A by a rollback of the follower: three ranges."""
    keep = _keep(stage)
    for form in (Form(True, "tokens"), Form(False, "tokens")):
        for attempt in range(TRIES):
            a = stage.marker()
            length = stage.longest >> (TRIES - 1 - attempt)
            flight, lead = stage.fly(stage.ask(length, form)), stage.fly(stage.ask(length))
            lead.wait_tokens(3)
            stage.client.pause(keep)
            b = stage.swaps.commit(stage.plain, k := stage.next_k(stage.plain), stage.plain.weights(k))
            _refit(stage, b, keep)
            lead.wait_tokens(lead.tokens + 3)
            stage.client.pause(keep)
            stage.swaps.follower.at = a.version
            _refit(stage, a, keep)
            stage.swaps.follower.at = None
            stage.swaps.follower.hold = False
            reply = flight.reply()
            lead.reply()
            if len(reply.single.spans or ()) == 3:
                break
        id = f"back.{form.name}"
        rules.ended(stage.found, id, reply, "length")
        rules.covered(stage.found, id, reply.single)
        rules.labelled(stage.found, id, reply.single, a, b, a)
        rules.exact(stage.found, id, reply.single, a, b)


def _refit(stage: Stage, mark: Mark, pause: Pause) -> None:
    try:
        stage.swaps.refit(mark, pause)
    finally:
        stage.client.resume()


def several_outputs(stage: Stage) -> None:
    """n = 3 gives three lists."""
    keep = _keep(stage)
    for form in (Form(True, "tokens"), Form(False, "tokens")):
        for attempt in range(TRIES):
            old = stage.marker()
            length = stage.longest >> (TRIES - 1 - attempt)
            flight, lead = stage.fly(stage.ask(length, form, n=3)), stage.fly(stage.ask(length))
            lead.wait_tokens(4)
            new = stage.marker(pause=keep)
            reply = flight.reply()
            lead.reply()
            if all(len(o.spans or ()) == 2 for o in reply.outputs.values()):
                break
        id = f"several.{form.name}"
        stage.found.add(
            f"{id}.count", "n = 3 gives three outputs", set(reply.outputs) == {0, 1, 2}, sorted(reply.outputs)
        )
        for index in range(3):
            output = reply.output(index)
            rules.covered(stage.found, f"{id}.{index}", output)
            rules.labelled(stage.found, f"{id}.{index}", output, old, new)
            rules.exact(stage.found, f"{id}.{index}", output, old, new)


def stop_on_the_swap(stage: Stage) -> None:
    """The first token of the new weights ends the request: a range of one token."""
    keep = _keep(stage)
    for form in (Form(True, "tokens"), Form(False, "tokens")):
        for attempt in range(TRIES):
            old = stage.marker()
            length = stage.longest >> (TRIES - 1 - attempt)
            flight = stage.fly(stage.ask(length, form, stop_token_ids=(0,)))
            lead = stage.fly(stage.ask(length))
            lead.wait_tokens(4)
            stage.client.pause(keep)
            new = stage.zero()
            _refit(stage, new, keep)
            reply = flight.reply()
            lead.reply()
            if reply.single.finish == ["stop"]:
                break
        id = f"stop.{form.name}"
        rules.ended(stage.found, id, reply, "stop")
        rules.labelled(stage.found, id, reply.single, old, new)
        last = (reply.single.spans or [{}])[-1]
        one = last.get("end", 0) - last.get("start", 0) == 1
        stage.found.add(f"{id}.one", "the new range is the stop token alone", one, reply.single.spans)
        rules.exact(stage.found, id, reply.single, old, new)


def queued_then_aborted(stage: Stage) -> None:
    """A request that came during a pause and is aborted before it ran: no tokens, no spans, one terminal."""
    if ABORT_WHILE_PAUSED in stage.client.not_offered:
        return
    keep = _keep(stage)
    for form in (Form(True, "tokens"), Form(False, "tokens")):
        stage.client.pause(keep)
        try:
            flight = stage.fly(stage.ask(8, form))
            stage.waiting(1)
            stage.client.abort(flight.ask.id)
            until(lambda flight=flight: flight.done, timeout=5.0)  # type: ignore[misc]
        finally:
            stage.client.resume()
        reply = flight.reply()
        id = f"queued-abort.{form.name}"
        rules.ended(stage.found, id, reply, "abort")
        empty = reply.single.token_ids == [] and reply.single.spans == []
        text = f"{reply.single.token_ids} {reply.single.spans}"
        stage.found.add(f"{id}.empty", "no tokens, and weight_versions is []", empty, text)


def ids(stage: Stage) -> None:
    """Ids are free again after the end and after an abort; a late abort does nothing."""
    client, found = stage.client, stage.found
    mark = stage.marker()
    first = stage.ask(4)
    rules.ended(found, "ids.first", client.generate(first), "length")
    client.abort(first.id)
    found.add(
        "ids.late-abort", "aborting a request that has ended does nothing", client.label() == mark.label, ""
    )
    rules.ended(found, "ids.again", client.generate(first), "length")
    running = stage.fly(stage.ask(stage.longest))
    running.wait_tokens(2)
    client.abort(running.ask.id)
    rules.ended(found, "ids.aborted", running.reply(), "abort")
    rules.covered(found, "ids.aborted", running.reply().single)
    again = client.generate(stage.ask(4, id=running.ask.id))
    rules.ended(found, "ids.after-abort", again, "length")
    rules.labelled(found, "ids.after-abort", again.single, mark)
    empty = until(lambda: client.live_requests() == 0, timeout=10.0)
    found.add("ids.none-left", "no request is left behind", empty, f"{client.live_requests()} live")


def label_alone(stage: Stage) -> None:
    """A label that changes without weights: requests go on, and their tokens carry it from the next step
    on."""
    client, found, keep = stage.client, stage.found, _keep(stage)
    for attempt in range(TRIES):
        mark = stage.marker()
        flight = stage.fly(stage.ask(stage.longest >> (TRIES - 1 - attempt)))
        flight.wait_tokens(4)
        client.pause(keep)
        client.set_label("conform-label")
        found.add(
            "label.set", "weight_info says the label that was set", client.label() == "conform-label", ""
        )
        client.resume()
        reply = flight.reply()
        client.set_label(mark.label)
        if len(reply.single.spans or ()) == 2:
            break
    rules.ended(found, "label.alone", reply, "length")
    rules.whole(found, "label.alone", reply)
    got = [s["version"] for s in reply.single.spans or []]
    found.add(
        "label.alone.ranges",
        "two ranges, the old label and the new one",
        got == [mark.label, "conform-label"],
        got,
    )
    same = set(reply.single.token_ids) == {mark.token}
    found.add(
        "label.alone.weights", "the weights are as they were", same, sorted(set(reply.single.token_ids))
    )


def keys_and_values(stage: Stage) -> None:
    """Whose keys and values a token attends to: value rows carry the version, so the tokens say it."""
    found, client = stage.found, stage.client
    shared = stage.ask(6, prompt=stage.prefix).prompt
    before = stage.marker(stage.kv)
    for turn in ("first", "cached"):
        reply = client.generate(stage.ask(6, Form(False, "tokens"), id=f"conform-kv-{turn}"))
        rules.exact(found, f"kv.own.{turn}", reply.single, before)
    for _ in range(2):
        client.generate(_with_prompt(stage, shared))
    now = stage.marker(stage.kv)
    for turn in ("first", "again"):
        reply = client.generate(_with_prompt(stage, shared))
        rules.labelled(found, f"kv.prefix-cache.{turn}", reply.single, now)
        rules.exact(found, f"kv.prefix-cache.{turn}", reply.single, now)
    for pause in client.pauses:
        if pause.kv != "ended":
            _kv_of_running(stage, pause)


def _with_prompt(stage: Stage, prompt: tuple[int, ...]):  # type: ignore[no-untyped-def]
    import msgspec

    return msgspec.structs.replace(stage.ask(6, Form(False, "tokens")), prompt=prompt)


def _kv_of_running(stage: Stage, pause: Pause) -> None:
    for attempt in range(TRIES):
        old = stage.marker(stage.kv)
        flight = stage.fly(stage.ask(stage.longest >> (TRIES - 1 - attempt), prompt=24))
        flight.wait_tokens(4)
        new = stage.marker(stage.kv, pause)
        reply = flight.reply()
        if len(reply.single.spans or ()) == 2:
            break
    id = f"kv.{pause.name}"
    rules.ended(stage.found, id, reply, "length")
    rules.labelled(stage.found, id, reply.single, old, new)
    at = (reply.single.spans or [{}])[-1].get("start", 0)
    after = reply.single.token_ids[at:]
    if pause.kv == "recomputed":
        rules.exact(stage.found, id, reply.single, old, new)
        what = "running requests compute all keys and values anew"
        stage.found.add(f"{id}.recomputed", what, set(after) == {new.token}, after[:6])
    else:
        what = "running requests go on with the keys and values they had"
        first = after[: max(1, min(8, len(after)))]
        stage.found.add(f"{id}.kept", what, set(first) == {new.token + 1}, first)
        before = reply.single.token_ids[:at]
        stage.found.add(
            f"{id}.before", "before the swap all of them are its own", set(before) == {old.token}, before[:6]
        )


def _keep(stage: Stage) -> Pause:
    """The pause that freezes requests and moves nothing else."""
    keeping = [p for p in stage.client.pauses if not p.aborts and not p.drains]
    return next((p for p in keeping if p.kv == "kept"), keeping[0])
