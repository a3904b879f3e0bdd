"""A live SGLang server under its default overlap scheduler, refitted in place: labels, cache, faults."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_weights import read_folder
from real_world import Traffic, World
from sglang_server import Server

from weightline.core import spans
from weightline.errors import RefitError
from weightline.rollout import check
from weightline.testing import conformance
from weightline.types import WeightVersionSpan

pytestmark = pytest.mark.sglang

SUITE_TOKENS = int(os.environ.get("WEIGHTLINE_SUITE_TOKENS", "20000"))
"""Tokens of the conformance suite."""


@pytest.fixture(scope="module")
def server(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tiny("qwen3"), tmp_path_factory.mktemp("sglang") / "server.log")
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(params=["?kv=keep", ""], ids=["in-place", "retracted"])
def world(request: pytest.FixtureRequest, server: Server, tmp_path: Path) -> Iterator[World]:
    """A store of its own: the server comes from somebody else's version, and is refitted in full first."""
    opened = World(tmp_path, server, read_folder(server.model), query=request.param)
    try:
        yield opened
    finally:
        opened.close()


def _to_next(world: World) -> int:
    version = world.commit()
    world.follow_to(world.follower(), version)
    return version


def _serves(world: World, version: int) -> None:
    """The engine serves `version`: label, bits, and tokens."""
    port = world.port("looking")
    engine = port.describe()
    assert (engine.version, engine.label, engine.paused) == (version, world.label_of(version), False)
    report = check(world.line, port, version)
    assert (report.ok, report.mismatches) == (True, ())
    answer = world.server.generate([7, 8, 9], 6)
    assert answer["token_ids"] == [version] * 6
    assert answer["weight_versions"] == [{"version": world.label_of(version), "start": 0, "end": 6}]


def test_every_label_is_right_while_follow_refits_and_no_request_is_dropped(world: World) -> None:
    _to_next(world)
    follower = world.follower()
    traffic = Traffic(world.server, streams=6, count=200)
    while traffic.tokens < 3000:
        world.follow_to(follower, world.commit())
    markers = {world.label_of(v): v for v in range(1, world.version + 1)}
    crossings = 0
    for answer in traffic.stop():
        assert answer["finish_reason"] == "length"
        found = tuple(WeightVersionSpan(**span) for span in answer["weight_versions"])
        spans.validate(found, 200)
        assert [markers[label] for label in spans.per_token(found)] == answer["token_ids"]
        crossings += len(found) - 1
    assert crossings > 0
    _serves(world, world.version)
    assert {event["verified"] for event in world.events if event["event"] == "refit"} == {"live"}


def test_no_token_comes_from_another_versions_prefix_and_one_versions_are_shared(world: World) -> None:
    _to_next(world)
    prompt = [1 + i % 300 for i in range(300)]
    assert world.server.generate(prompt, 2)["cached_tokens"] == 0
    assert world.server.generate(prompt, 2)["cached_tokens"] >= 256
    _to_next(world)
    assert world.server.generate(prompt, 2)["cached_tokens"] == 0
    assert world.server.generate(prompt, 2)["cached_tokens"] >= 256


@pytest.mark.parametrize("last", ["prepare", "pause", "apply", "label"])
def test_a_follower_that_dies_leaves_an_engine_that_serves_what_its_label_says(
    world: World, last: str
) -> None:
    old = _to_next(world)
    new = world.commit()
    dead = world.port("dead", session_timeout=0.5)
    follower = world.follower(dead)
    verbs = ["prepare", "pause", "apply", "verify", "invalidate", "label", "resume"]

    def dies(*_arguments: Any) -> None:
        raise KeyboardInterrupt

    for verb in (verbs[verbs.index(last) + 1], "rollback", "resume", "close_session"):
        setattr(dead, verb, dies)
    traffic = Traffic(world.server, streams=2, count=50)
    with pytest.raises(KeyboardInterrupt):
        follower.step()
    port = world.port("other")
    deadline = time.monotonic() + 30
    while port.describe().paused or port._hello()["session"] is not None:
        assert time.monotonic() < deadline, "the engine's watchdog did not end the refit"
    _serves(world, new if last == "label" else old)
    assert all(answer["finish_reason"] == "length" for answer in traffic.stop())
    world.follow_to(world.follower(), new)
    _serves(world, new)


def test_weights_that_others_change_are_noticed_and_mended_in_full(world: World) -> None:
    version = _to_next(world)
    update = {"model_path": str(world.server.model), "weight_version": "somebody's"}
    assert world.server.post("/update_weights_from_disk", update).json()["success"] is True
    assert world.port("looking").describe().version is None
    world.follow_to(world.follower(), version)
    _serves(world, version)


def test_a_rollback_steps_back_and_a_name_without_a_home_is_refused(world: World) -> None:
    old = _to_next(world)
    new = _to_next(world)
    world.follow_to(world.follower(at=old), old)
    _serves(world, old)
    world.follow_to(world.follower(), new)
    stray = {**world.weights, "model.layers.9.mlp.up_proj.weight": world.weights["model.norm.weight"]}
    world.engine.commit(stray, step=99, anchor=True)
    follower = world.follower()
    follower.step()
    refused = [event for event in world.events if event["event"] == "refused"]
    assert "model.layers.9.mlp.up_proj.weight" in str(refused[-1])
    _serves(world, new)


def test_every_misfit_is_listed_at_once_and_the_engine_stays_as_it_was(world: World) -> None:
    """SGLang itself takes a wrong q_proj in silence, and a wrong norm ends the server."""
    version = _to_next(world)
    query, norm = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
    wrong = {query: world.weights[query][:-1], norm: world.weights[norm].double()}
    world.engine.commit({**world.weights, **wrong}, step=99, anchor=True)
    world.follower().step()
    refused = str([event for event in world.events if event["event"] == "refused"][-1])
    assert [name for name in wrong if name not in refused] == []
    _serves(world, version)


def test_the_conformance_suite_passes(server: Server) -> None:
    """All three pauses, swaps in place among them, under the overlap scheduler."""
    options = conformance.Options(tokens=SUITE_TOKENS, swaps=SUITE_TOKENS // 400, workers=16)
    report = conformance.run("sglang", f"{server.url}?kv=keep", server.model, options=options)
    assert [check for check in report.checks if not check.ok] == []
    assert report.figures["mixed"] > 20


def test_a_restarted_server_is_brought_to_the_newest_version(server: Server, tmp_path: Path) -> None:
    """Last: it is another process afterwards, and says "default" until a follower has been there."""
    world = World(tmp_path, server, read_folder(server.model))
    try:
        version = _to_next(world)
        follower = world.follower()
        follower.step()
        instance = follower.port.describe().instance
        server.kill()
        follower.step()
        server.start()
        assert server.label() == "default"
        world.follow_to(follower, version)
        assert follower.port.describe().instance != instance
        _serves(world, version)
    finally:
        world.close()


@pytest.mark.soak
def test_without_the_correction_keeping_kv_is_refused_and_the_token_in_flight_shows(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    server = Server(tiny("qwen3"), tmp_path / "server.log")
    try:
        server.start(WEIGHTLINE_SGLANG_BOUNDARY="0")
        world = World(tmp_path, server, read_folder(server.model), query="?kv=keep")
        version = world.commit()
        with pytest.raises((RefitError, TimeoutError)):
            world.follow_to(world.follower(), version, within=5.0)
        assert "has a token in flight" in str(world.events[-1])
        world.close()
    finally:
        server.kill()
