"""Live vLLM servers, refitted in place: spans, cache, faults, restart. Three server starts in all."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from real_weights import read_folder
from real_world import Traffic, World, rollout_line
from vllm_server import Server

from weightline import codec
from weightline.audit import replay
from weightline.core import spans
from weightline.errors import ConflictError, RefitError, Unavailable
from weightline.rollout import check, release, rollback
from weightline.rollout.engines.base import Refit
from weightline.testing import conformance
from weightline.types import WeightVersionSpan

pytestmark = pytest.mark.vllm

TOKENS = int(os.environ.get("WEIGHTLINE_SPAN_TOKENS", "5000"))
"""Tokens checked with each kind of scheduling while `follow` does the refits."""
SUITE_TOKENS = int(os.environ.get("WEIGHTLINE_SUITE_TOKENS", "20000"))
"""Tokens of the conformance suite, with each kind of scheduling."""


ASYNCHRONOUS = ("--async-scheduling",)
PLAIN = ("--no-async-scheduling", "--no-enable-prefix-caching")
"""Also keeps the KV of running requests over a refit, which only a server without prefix caching may do."""


@pytest.fixture(scope="module", params=[ASYNCHRONOUS, PLAIN], ids=["asynchronous", "plain-kv-kept"])
def world(
    request: pytest.FixtureRequest, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    root = tmp_path_factory.mktemp("vllm")
    folder = tiny("qwen3")
    server = Server(folder, root / "server.log", *request.param)
    opened = None
    try:
        query = "?kv=keep" if request.param == PLAIN else ""
        opened = World(root, server.start(), read_folder(folder), query=query)
        yield opened
    finally:
        if opened is not None:
            opened.close()
        server.kill()


def _refit_to_next(world: World) -> int:
    version = world.commit()
    world.follow_to(world.follower(), version)
    return version


def _delta(world: World, port: Any, version: int) -> Refit:
    """What a follower would hand over to bring the engine to `version`."""
    record, engine = world.line.record(version), port.describe()
    path = world.root / f"handed-{version}-{time.monotonic_ns()}.safetensors"
    delta = world.line.fetch_delta(version, have=engine.version)
    codec.write_delta(delta, path, level="absolute")
    digests = {entry.spec.name: entry.digest for entry in world.line.manifest(version).tensors}
    return Refit(
        run=world.line.run,
        version=version,
        label=record.label,
        have=engine.version,
        have_label=engine.label,
        file=path,
        digests={name: digests[name] for name in delta.changed},
    )


def _serves(world: World, port: Any, version: int) -> None:
    """The engine serves `version`: label, bits, and tokens."""
    engine = port.describe()
    assert (engine.version, engine.label, engine.paused) == (version, world.label_of(version), False)
    report = check(world.line, port, version)
    assert (report.ok, report.mismatches) == (True, ())
    choice = world.server.generate([7, 8, 9], 6)
    assert choice["token_ids"] == [version] * 6
    assert choice["weight_versions"] == [{"version": world.label_of(version), "start": 0, "end": 6}]


def _every_token_is_what_its_label_says(world: World, answers: list[dict[str, Any]]) -> int:
    """No request was dropped, and each token is the marker of its label.

    Returns how many spans begin inside an output."""
    markers = {world.label_of(v): v for v in range(1, world.version + 1)}
    crossings = 0
    for answer in answers:
        assert answer["finish_reason"] == "length"
        found = tuple(WeightVersionSpan(**span) for span in answer["weight_versions"])
        spans.validate(found, len(answer["token_ids"]))
        assert [markers[label] for label in spans.per_token(found)] == answer["token_ids"]
        crossings += len(found) - 1
    return crossings


def test_every_label_of_every_token_is_right_while_the_engine_is_refitted(world: World) -> None:
    _refit_to_next(world)
    follower = world.follower()
    traffic = Traffic(world.server, streams=6, count=400)
    while traffic.tokens < TOKENS:
        world.follow_to(follower, world.commit())
    crossings = _every_token_is_what_its_label_says(world, traffic.stop())
    assert crossings > 0
    _serves(world, follower.port, world.version)
    refits = [event for event in world.events if event["event"] == "refit"]
    assert {event["verified"] for event in refits} == {"live"}


@pytest.mark.parametrize("mode", ["tokens", "text"])
def test_a_stream_crosses_a_refit_and_one_admitted_during_the_pause_is_all_new(
    world: World, mode: str
) -> None:
    old = _refit_to_next(world)
    new = world.commit()
    port = world.port()
    # All that takes time is done before the stream begins: it must still run when the pause comes.
    prepared = port.prepare(_delta(world, port, new))
    going = threading.Event()

    def begun(chunks: int) -> None:
        if chunks > 2:
            going.set()

    with ThreadPoolExecutor(2) as pool:
        crossing = pool.submit(
            world.server.stream,
            [3, 4, 5],
            1900,
            mode=mode,
            on_chunk=begun,
        )
        assert going.wait(60)
        port.pause(prepared)
        admitted = pool.submit(world.server.stream, [6, 7], 30, mode=mode)
        port.apply(prepared)
        assert port.verify(prepared) == "live"
        port.invalidate(prepared)
        port.label(prepared)
        port.resume()
        port.close_session(prepared)
        first, second = crossing.result(), admitted.result()
    assert [(s["version"]) for s in first["weight_versions"]] == [world.label_of(old), world.label_of(new)]
    assert [(s["version"]) for s in second["weight_versions"]] == [world.label_of(new)]
    assert (first["spans_before_the_last_chunk"], second["spans_before_the_last_chunk"]) == (0, 0)
    boundary = first["weight_versions"][1]["start"]
    if first["token_ids"]:
        assert first["token_ids"] == [old] * boundary + [new] * (1900 - boundary)
        assert second["token_ids"] == [new] * 30


def test_aborted_requests_tell_whose_tokens_they_have(world: World) -> None:
    version = _refit_to_next(world)
    going = threading.Event()

    def begun(chunks: int) -> None:
        if chunks > 2:
            going.set()

    with ThreadPoolExecutor(3) as pool:
        streamed = pool.submit(world.server.stream, [3, 4, 5], 1900, on_chunk=begun)
        plain = pool.submit(world.server.generate, [8, 9], 1900)
        assert going.wait(60)
        late = pool.submit(world.server.generate, [1 + i % 300 for i in range(1500)], 300)
        world.server.post("/pause?mode=abort")
        answers = [streamed.result(), plain.result()]
        world.server.post("/resume")
        answers.append(late.result())
    for answer in answers:
        count = len(answer["token_ids"])
        span = [{"version": world.label_of(version), "start": 0, "end": count}] if count else []
        assert answer["weight_versions"] == span
        assert answer["token_ids"] == [version] * count
    assert [answer["finish_reason"] for answer in answers[:2]] == ["abort", "abort"]
    _serves(world, world.port(), version)


def test_no_token_is_served_from_another_versions_prefix(world: World) -> None:
    _refit_to_next(world)
    prompt = [1 + i % 300 for i in range(300)]
    world.server.generate(prompt, 2)
    before = world.server.prefix_hits()
    world.server.generate(prompt, 2)
    warm = world.server.prefix_hits()
    assert (warm - before >= 128) == (world.server.flags == ASYNCHRONOUS)
    _refit_to_next(world)
    world.server.generate(prompt, 2)
    assert world.server.prefix_hits() == warm
    world.server.generate(prompt, 2)
    assert (world.server.prefix_hits() > warm) == (world.server.flags == ASYNCHRONOUS)


def test_keeping_kv_is_refused_where_other_requests_could_read_it(world: World) -> None:
    old = _refit_to_next(world)
    new = world.commit()
    port = world.port(query="?kv=keep")
    if world.server.flags == ASYNCHRONOUS:
        with pytest.raises(RefitError, match="kv=keep on a server with prefix caching"):
            port.prepare(_delta(world, port, new))
        _serves(world, port, old)
    world.follow_to(world.follower(), new)
    _serves(world, port, new)


@pytest.mark.once
@pytest.mark.parametrize("last", ["prepare", "pause", "apply", "label"])
def test_a_follower_that_dies_leaves_an_engine_that_serves_what_its_label_says(
    world: World, last: str
) -> None:
    old = _refit_to_next(world)
    new = world.commit()
    dead = world.port("dead", session_timeout=0.5)
    refit = _delta(world, dead, new)
    traffic = Traffic(world.server, streams=2, count=50)
    prepared = dead.prepare(refit)
    for verb in ("pause", "apply", "label"):
        if last != "prepare":
            getattr(dead, verb)(prepared)
        if last in ("prepare", verb):
            break
    port = world.port("other")
    deadline = time.monotonic() + 30
    while port.describe().paused or port._hello()["session"] is not None:
        assert time.monotonic() < deadline, "the engine's watchdog did not end the refit"
    _serves(world, port, new if last == "label" else old)
    assert all(answer["finish_reason"] == "length" for answer in traffic.stop())
    with pytest.raises(ConflictError):
        dead.wire.ask("rollback", session=prepared.session)
    world.follow_to(world.follower(), new)
    _serves(world, port, new)


@pytest.mark.once
def test_wrong_bytes_and_wrong_digests_never_reach_the_engine(world: World) -> None:
    old = _refit_to_next(world)
    new = world.commit()
    port = world.port()
    refit = _delta(world, port, new)
    name = next(iter(refit.digests))
    wrong = {**refit.digests, name: "0" * 32}
    with pytest.raises(RefitError, match="after this refit its digest would be") as caught:
        port.prepare(
            Refit(
                run=refit.run,
                version=refit.version,
                label=refit.label,
                have=refit.have,
                have_label=refit.have_label,
                file=refit.file,
                digests=wrong,
            )
        )
    assert name in caught.value.message
    _serves(world, port, old)
    world.follow_to(world.follower(), new)


@pytest.mark.once
def test_a_second_follower_is_refused_and_a_session_of_somebody_else_is_closed(world: World) -> None:
    _refit_to_next(world)
    new = world.commit()
    first, second = world.port("first"), world.port("second")
    prepared = first.prepare(_delta(world, first, new))
    with pytest.raises(ConflictError, match="held by first"):
        second.prepare(_delta(world, second, new))
    first.rollback(prepared)
    first.close_session(prepared)
    assert world.server.post("/start_weight_update", {}).status_code == 200
    world.follow_to(world.follower(), new)
    _serves(world, first, new)


@pytest.mark.once
def test_a_pause_of_somebody_else_stays_and_an_update_without_pause_is_refused(world: World) -> None:
    old = _refit_to_next(world)
    new = world.commit()
    port = world.port()
    prepared = port.prepare(_delta(world, port, new))
    with pytest.raises(RefitError, match="cannot apply: somebody resumed the engine"):
        port.apply(prepared)
    port.rollback(prepared)
    port.close_session(prepared)
    _serves(world, port, old)
    world.server.post("/pause?mode=keep")
    follower = world.follower()
    follower.step()
    engine = port.describe()
    assert (engine.version, engine.paused) == (new, True)
    world.server.post("/resume")
    _serves(world, port, new)


@pytest.mark.once
def test_a_rollback_steps_back_and_weights_changed_behind_us_are_mended_in_full(world: World) -> None:
    old = _refit_to_next(world)
    new = _refit_to_next(world)
    port = world.port()
    back = world.follower(at=old)
    world.follow_to(back, old)
    _serves(world, port, old)
    world.follow_to(world.follower(), new)
    assert world.server.post("/weight_checker", {"action": "reset"}).status_code == 200
    assert not check(world.line, port, new).ok
    world.server.post("/update_weight_version", {"new_version": "mystery"})
    world.follow_to(world.follower(), new)
    _serves(world, port, new)


@pytest.mark.once
def test_a_request_that_cannot_be_kept_whole_is_not_dropped_by_a_failed_refit(world: World) -> None:
    """apply fails in the follower's own hands: rollback, old label, every request goes on."""
    old = _refit_to_next(world)
    new = world.commit()
    port = world.port()
    traffic = Traffic(world.server, streams=3, count=100)
    prepared = port.prepare(_delta(world, port, new))
    port.pause(prepared)
    port.apply(prepared)
    assert port.verify(prepared) == "live"
    port.invalidate(prepared)
    port.label(prepared)
    port.rollback(prepared)
    port.resume()
    port.close_session(prepared)
    assert {a["finish_reason"] for a in traffic.stop()} == {"length"}
    _serves(world, port, old)


@pytest.mark.once
def test_follow_processes_that_are_killed_at_any_moment_leave_no_wrong_token(world: World) -> None:
    """The command itself, killed while it refits, without a chance to clean up; the last one ends it."""
    _refit_to_next(world)
    traffic = Traffic(world.server, streams=4, count=200)
    for moment in (0.0, 0.04, 0.08, 0.12):
        with world.follow_process() as follow:
            world.follow_process_to(follow, world.commit())
            world.commit()
            time.sleep(moment)  # the moment of death is what is tried here
            follow.kill()
    newest = world.commit()
    with world.follow_process() as follow:
        world.follow_process_to(follow, newest)
        port = world.port("looking")
        _serves(world, port, newest)
    _every_token_is_what_its_label_says(world, traffic.stop())


def test_rollouts_of_a_small_client_replay_as_their_labels_say(world: World, tmp_path: Path) -> None:
    """Requests as JSON Lines, written from vLLM's own answers, go through the audit of this package."""
    _refit_to_next(world)
    follower = world.follower()
    traffic = Traffic(world.server, streams=3, count=120)
    while len(traffic.answers) < 6:
        world.follow_to(follower, world.commit())
    kept = "keep" in world.query
    path = tmp_path / "rollouts.jsonl"
    lines = [rollout_line(world.line.run, answer, kv_kept=kept) for answer in traffic.stop()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = replay(world.line, world.server.model, path, control=True)
    assert report.requests_checked == len(lines)
    assert report.mixed_requests_checked > 0
    assert report.mismatches == 0
    assert report.control is not None
    assert report.control.mismatches > 0


HANGS = [("workers", "apply"), ("http", "apply")]
MORE_HANGS = [(who, verb) for who in ("workers", "http") for verb in ("prepare", "pause", "label", "resume")]


@pytest.mark.once
@pytest.mark.parametrize(
    ("who", "verb"), [*HANGS, *(pytest.param(*hang, marks=pytest.mark.soak) for hang in MORE_HANGS)]
)
def test_a_part_of_the_server_that_hangs_longer_than_a_call_may_take(
    world: World, who: str, verb: str
) -> None:
    """The answer is lost; whether the verb took effect shows later. Nothing is dropped or mislabelled."""
    _refit_to_next(world)
    port = world.port("slow", timeout=0.7, session_timeout=3.0)
    follower = world.follower(port)
    traffic = Traffic(world.server, streams=2, count=60)
    new, hung = world.commit(), []
    original = getattr(port, verb)

    def hangs(*arguments: Any) -> Any:
        if hung:
            return original(*arguments)
        hung.append(verb)
        with world.server.hanging(who, 2.0):
            return original(*arguments)

    setattr(port, verb, hangs)
    world.follow_to(follower, new, within=90.0)
    assert hung == [verb]
    _every_token_is_what_its_label_says(world, traffic.stop())
    _serves(world, world.port("looking"), new)


@pytest.mark.once
def test_a_rollback_holds_and_a_running_follower_leaves_it_there(world: World) -> None:
    old = _refit_to_next(world)
    newest = _refit_to_next(world)
    with world.follow_process() as follow:
        world.follow_process_to(follow, newest)
        report = rollback(world.line, f"vllm={world.server.url}{world.query}", id="follow")
        assert (report.before, report.version, report.held) == (newest, old, True)
        later = world.commit()
        time.sleep(2.5)  # what is shown is that nothing happens: two looks of the follower
        _serves(world, world.port("looking"), old)
        release(world.line, f"vllm={world.server.url}{world.query}")
        world.follow_process_to(follow, later)


def test_the_conformance_suite_passes(world: World) -> None:
    """Last but one: it replaces all weights with its own."""
    options = conformance.Options(tokens=SUITE_TOKENS, swaps=SUITE_TOKENS // 500, workers=8)
    report = conformance.run("vllm", world.server.url, world.server.model, options=options)
    assert [check for check in report.checks if not check.ok] == []
    assert report.ok
    follower = world.follower()
    world.follow_to(follower, world.commit())
    _serves(world, follower.port, world.version)


def test_a_restarted_server_is_brought_to_the_newest_version(world: World) -> None:
    """Restarted with vLLM's own packing of linears: from then on they go as whole modules."""
    if world.server.flags != ASYNCHRONOUS:
        # One more start is enough; the other server shows that a killed one is told from a silent one.
        world.server.kill()
        with pytest.raises(Unavailable):
            world.port().describe()
        return
    version = _refit_to_next(world)
    follower = world.follower()
    follower.step()
    instance = follower.port.describe().instance
    world.server.kill()
    follower.step()
    world.server.start(WEIGHTLINE_VLLM_PACKED="1")
    assert world.server.get("/weight_info") == {"weight_version": "default"}
    world.follow_to(follower, version)
    engine = follower.port.describe()
    assert engine.instance != instance
    assert len(engine.groups) > 10
    _serves(world, follower.port, version)
    traffic = Traffic(world.server, streams=4, count=100)
    for _ in range(3):
        world.follow_to(follower, world.commit())
    _every_token_is_what_its_label_says(world, traffic.stop())
    _serves(world, follower.port, world.version)
    assert [event["verified"] for event in world.events if event["event"] == "refit"][-4:] == [
        "loader_input"
    ] * 4
    report = check(world.line, follower.port, world.version)
    assert (report.ok, len(report.unreadable)) == (True, len(engine.groups))
    _a_dead_follower_is_undone_from_the_replica(world)
    rollback(world.line, f"vllm={world.server.url}")
    _serves(world, world.port("looking"), world.version - 1)


def _a_dead_follower_is_undone_from_the_replica(world: World) -> None:
    old, new = world.version, world.commit()
    dead = world.port("dead", session_timeout=0.5)
    follower = world.follower(dead)
    before = follower.port.describe()

    def dies(*_arguments: Any) -> None:
        raise KeyboardInterrupt

    for verb in ("verify", "rollback", "resume", "close_session"):
        setattr(dead, verb, dies)
    with pytest.raises(KeyboardInterrupt):
        follower.step()
    looking = world.port("looking")
    deadline = time.monotonic() + 30
    while looking.describe().paused or looking._hello()["session"] is not None:
        assert time.monotonic() < deadline, "the engine's watchdog did not end the refit"
    assert looking.describe().label == before.label
    _serves(world, looking, old)
    world.follow_to(world.follower(), new)
    _serves(world, looking, new)
