"""Rollouts: asked of real engines over HTTP, counted, written down, never sent twice."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from demo_engine import DemoEngine, demo_engine

from weightline.audit import rollout_file
from weightline.demo.models import tiny_model
from weightline.demo.rollouts import Counts, RolloutClient, RolloutOptions
from weightline.demo.task import TokensTask
from weightline.errors import InvalidInput, Unavailable

pytestmark = pytest.mark.torch
LABEL = "1@00000001"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("rollouts") / "tiny")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[DemoEngine]:
    with demo_engine(folder, label=LABEL) as engine:
        yield engine


@pytest.fixture
def engine(served: DemoEngine) -> Iterator[DemoEngine]:
    served.spoiled.faults.clear()
    served.spoiled.seen.clear()
    yield served
    served.engine.resume()
    served.engine.set_label(LABEL)


def client(urls: list[str], path: Path, **fields: Any) -> RolloutClient:
    options = {"group_size": 3, "max_tokens": 12, "in_flight": 2, "seed": 7, "start_timeout": 60.0}
    known = {k: fields.pop(k) for k in ("on_drop", "serves") if k in fields}
    known.setdefault("serves", LABEL.__eq__)
    return RolloutClient(
        urls,
        TokensTask(512, seed=1),
        run="r",
        options=RolloutOptions(**(options | fields)),
        path=path / "rollouts.jsonl",
        **known,
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "rollouts.jsonl").read_text().splitlines()]


def test_every_finished_request_is_one_line_that_an_audit_reads(engine: DemoEngine, tmp_path: Path) -> None:
    rollouts = client([engine.url], tmp_path)
    rollouts.start()
    groups = rollouts.take(2) + rollouts.take(1)
    counts = rollouts.stop()
    assert [len(g.samples) for g in groups] == [3, 3, 3]
    written = lines(tmp_path)
    assert counts == Counts(len(written), sum(len(w["choices"][0]["token_ids"]) for w in written), 0, 0)
    assert sorted(w["request_id"] for w in written) == sorted(engine.spoiled.seen)
    assert len(set(engine.spoiled.seen)) == len(engine.spoiled.seen)
    started = len(engine.spoiled.seen) // 4
    assert 3 <= started <= 5  # three were taken; up to two more had been launched when it was stopped
    read = list(rollout_file.read(tmp_path / "rollouts.jsonl", run="r"))
    greedy = [r for r in read if r.not_replayable() is None]
    assert len(greedy) == started
    assert all(w["engine"] == engine.url for w in written)
    assert all(len(r.choices[0].logprobs or ()) == len(r.choices[0].token_ids) for r in read)
    assert all(r.choices[0].kv_weight_versions is not None for r in read)
    samples = {g.prompt.index: [s.token_ids for s in g.samples] for g in groups}
    for index, tokens in samples.items():
        assert len(set(tokens)) == 3, index  # seeds differ within a group


def test_the_same_seed_asks_for_the_same_samples(engine: DemoEngine, tmp_path: Path) -> None:
    runs = []
    for name in "ab":
        (tmp_path / name).mkdir()
        rollouts = client([engine.url], tmp_path / name, in_flight=1)
        rollouts.start()
        runs.append([s.token_ids for g in rollouts.take(1) for s in g.samples])
        rollouts.stop()
    assert runs[0] == runs[1]


def test_a_fixed_number_of_groups_is_in_flight(engine: DemoEngine, tmp_path: Path) -> None:
    engine.engine.pause("keep").result(60)
    rollouts = client([engine.url], tmp_path, in_flight=3)
    rollouts.start()
    arrived = threading.Event()

    def watch() -> None:
        while len(engine.spoiled.seen) < 12 and not arrived.wait(0.01):
            pass
        arrived.set()

    thread = threading.Thread(target=watch)
    thread.start()
    assert arrived.wait(30)
    thread.join()
    assert len(engine.spoiled.seen) == 3 * 4
    assert rollouts.counts.requests == 0
    engine.engine.resume()
    rollouts.take(3)
    assert 3 * 4 <= rollouts.stop().requests <= 6 * 4


def test_a_version_that_changes_within_requests_makes_them_mixed(engine: DemoEngine, tmp_path: Path) -> None:
    rollouts = client([engine.url], tmp_path, in_flight=1, group_size=2, max_tokens=200, serves=bool)
    groups: list[Any] = []
    taker = threading.Thread(target=lambda: groups.extend(rollouts.take(1)))
    rollouts.start()
    taker.start()
    number = 1
    while taker.is_alive():  # as a follower does, again and again while requests run
        number += 1
        engine.engine.pause("keep").result(60)
        engine.engine.set_label(f"{number}@{number:08x}")
        engine.engine.resume()
        taker.join(0.01)
    counts = rollouts.stop()
    assert [len(g.samples) for g in groups] == [2]
    assert all(s.mixed for s in groups[0].samples if len(s.token_ids) == 200)
    assert counts.dropped == 0
    assert counts.mixed == sum(len(w["choices"][0]["weight_versions"]) > 1 for w in lines(tmp_path)) > 0
    for line in rollout_file.read(tmp_path / "rollouts.jsonl"):
        assert line.choices[0].weight_versions[-1].end == len(line.choices[0].token_ids)


def short(choice: dict[str, Any]) -> None:
    choice["weight_versions"][-1]["end"] -= 1


def aborted(choice: dict[str, Any]) -> None:
    choice["finish_reason"] = "abort"


def no_logprobs(choice: dict[str, Any]) -> None:
    choice["logprobs"] = None


def fewer_logprobs(choice: dict[str, Any]) -> None:
    choice["logprobs"]["content"].pop()


def no_labels(choice: dict[str, Any]) -> None:
    del choice["weight_versions"]


@pytest.mark.parametrize("fault", ["error", "cut", short, aborted, no_logprobs, fewer_logprobs, no_labels])
def test_a_request_without_a_proper_answer_is_dropped_and_not_sent_again(
    engine: DemoEngine, tmp_path: Path, fault: Any
) -> None:
    engine.spoiled.faults["0-1"] = fault
    told: list[tuple[str, str, str]] = []
    rollouts = client([engine.url], tmp_path, in_flight=1, on_drop=lambda *a: told.append(a))
    rollouts.start()
    groups = rollouts.take(1)
    counts = rollouts.stop()
    assert [len(g.samples) for g in groups] == [2]
    assert counts.dropped == 1
    assert counts.requests == len(lines(tmp_path)) + 1
    assert engine.spoiled.seen.count("0-1") == 1
    assert [(request, url) for request, url, _ in told] == [("0-1", engine.url)]
    assert "0-1" not in {w["request_id"] for w in lines(tmp_path)}


def test_requests_are_spread_over_engines(engine: DemoEngine, folder: Path, tmp_path: Path) -> None:
    with demo_engine(folder, label=LABEL) as other:
        rollouts = client([engine.url, other.url], tmp_path)
        rollouts.start()
        rollouts.take(2)
        rollouts.stop()
        assert engine.spoiled.seen
        assert other.spoiled.seen
        assert set(engine.spoiled.seen).isdisjoint(other.spoiled.seen)


def test_nothing_is_sent_before_an_engine_serves_a_version_of_the_run(
    engine: DemoEngine, tmp_path: Path
) -> None:
    engine.engine.set_label("somebody-elses")
    asked = threading.Event()

    def serves(label: str) -> bool:
        asked.set()
        return label == LABEL

    rollouts = client([engine.url], tmp_path, serves=serves)
    rollouts.start()
    assert asked.wait(30)
    assert engine.spoiled.seen == []
    engine.engine.set_label(LABEL)
    assert len(rollouts.take(1)) == 1
    rollouts.stop()


def test_an_engine_that_never_comes_up_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    rollouts = client([url], tmp_path, start_timeout=0.3)
    rollouts.start()
    with pytest.raises(Unavailable, match=url):
        rollouts.take(1, timeout=30)
    with pytest.raises(Unavailable, match=url):
        rollouts.take(1, timeout=30)
    rollouts.stop()


def test_an_engine_may_come_up_late(folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    rollouts = client([f"http://127.0.0.1:{port}"], tmp_path, in_flight=1)
    rollouts.start()
    with demo_engine(folder, label=LABEL, port=port):
        assert len(rollouts.take(1)) == 1
        rollouts.stop()


@pytest.mark.parametrize("fields", [{"group_size": 1}, {"in_flight": 0}, {"max_tokens": 0}])
def test_options_that_mean_nothing_are_refused(tmp_path: Path, fields: dict[str, int]) -> None:
    with pytest.raises(InvalidInput):
        client(["http://127.0.0.1:1"], tmp_path, **fields)
    with pytest.raises(InvalidInput, match="no engine"):
        client([], tmp_path)
