"""The follower on a real engine process, a real store and a real (tiny, random) model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from rollout_live import LiveEngine, make_model, nudged, until, weights_of

from weightline import codec
from weightline.errors import InvalidInput, RefitError, StoreNotFound, VersionNotFound
from weightline.rollout import check, follow
from weightline.rollout.engines import EmbeddedEngine
from weightline.rollout.engines.base import Refit
from weightline.rollout.follower import Follower
from weightline.rollout.replica import Replica
from weightline.store import Store

pytestmark = pytest.mark.torch

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    make_model(folder, tied=True)
    return folder


@pytest.fixture(scope="session")
def engine(model):
    """One engine for most tests. Each test has its own store, a new run: its first refit is a full one."""
    live = LiveEngine(model)
    yield live
    live.kill()


@pytest.fixture(params=["tied", "untied"])
def either(request, tmp_path):
    """A model with and without tied embeddings, and an engine that serves it."""
    if request.param == "tied":
        yield request.getfixturevalue("model"), request.getfixturevalue("engine")
        return
    make_model(tmp_path / "untied", tied=False)
    live = LiveEngine(tmp_path / "untied")
    yield tmp_path / "untied", live
    live.kill()


@pytest.fixture
def line(tmp_path):
    from weightline.service import CheckpointEngine

    opened = CheckpointEngine(tmp_path / "store")
    yield opened
    opened.close()


@pytest.fixture
def followed(line, tmp_path):
    """Makes followers whose `step` the test calls."""
    made = []

    def make(live, id="engine-0", **options):
        port = EmbeddedEngine(live.url, holder=f"{id}-{len(made)}")
        replica = Replica(line.run, id, parent=tmp_path / "run")
        events = []
        follower = Follower(line, port, replica, id=id, on_event=events.append, **options)
        follower.events = events
        made.append(follower)
        return follower

    yield make
    for follower in made:
        follower.replica.close()
        follower.port.close()
    assert list((tmp_path / "run").iterdir()) == [] if made else True


def stored_digests(weights):
    return {name: codec.digest_of(codec.bits_of(tensor)) for name, tensor in weights.items()}


def serves(live, weights):
    """Does the engine hold exactly these bytes, tied names included?"""
    digests = live.digests()
    expected = stored_digests(weights)
    return {name: digests.get(name) for name in expected} == expected


def test_an_engine_that_starts_from_the_version_is_given_only_what_differs(model, line, followed):
    live = LiveEngine(model)
    try:
        follower = followed(live)
        weights = weights_of(model)
        line.commit(weights)
        assert follower.step() == 0.0, follower.events
        assert serves(live, weights)
        live.kill()
        live.start()
        nudged_norm = nudged(weights, 1, names=("model.norm.weight",))
        line.commit(nudged_norm)
        assert follower.step() == 0.0, follower.events
        assert serves(live, nudged_norm)
        refits = [(e["have"], e["elements"]) for e in follower.events if e["event"] == "refit"]
        assert refits == [(None, 0), (None, weights["model.norm.weight"].numel())]
    finally:
        live.kill()


def test_refit_k_equals_a_fresh_load(either, line, followed, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    folder, live = either
    follower = followed(live)
    weights = weights_of(folder)
    tied = "lm_head.weight" not in weights
    prompt = torch.tensor([[5, 9, 2, 77]])
    for k in (1, 2, 3):
        version = line.commit(weights, step=k, model_files=folder)
        label = line.record(version).label
        assert follower.step() == 0.0, follower.events
        assert live.label() == label
        assert not live.paused()
        Store.open(line.root).checkout(version, tmp_path / f"v{k}")
        fresh = AutoModelForCausalLM.from_pretrained(tmp_path / f"v{k}", dtype=torch.bfloat16)
        assert serves(live, dict(fresh.state_dict()))
        expected = (
            fresh.float()
            .eval()
            .generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=12,
                eos_token_id=None,
            )
        )
        choice = live.greedy([5, 9, 2, 77], 12)
        assert choice["token_ids"] == expected[0, 4:].tolist()
        assert choice["weight_versions"] == [{"version": label, "start": 0, "end": 12}]
        # The first step moves the embedding only: in the tied model that is the head too.
        weights = nudged(weights, k, names=(EMBEDDING,) if k == 1 else None)
    assert [e["have"] for e in follower.events if e["event"] == "refit"] == [None, 1, 2]
    assert tied == ("lm_head.weight" in live.describe()["aliases"])
    assert check(line, live.name).ok


def test_versions_are_taken_under_running_requests_and_nothing_is_dropped(engine, line, followed, model):
    weights = weights_of(model)
    line.commit(weights)
    follower = followed(engine)
    assert follower.step() == 0.0
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(engine.greedy, [k + 1, 3, 4], 120) for k in range(4)]
        until(lambda: engine.describe()["running"] == 4, what="four running requests")
        for k in range(3):
            weights = nudged(weights, k)
            line.commit(weights)
            assert follower.step() == 0.0, follower.events
        choices = [future.result(timeout=100) for future in running]
    labels = [line.record(v).label for v in (1, 2, 3, 4)]
    mixed = 0
    for choice in choices:
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (120, "length")
        spans = choice["weight_versions"]
        assert [s["start"] for s in spans] == [0, *[s["end"] for s in spans[:-1]]]
        assert spans[-1]["end"] == 120
        order = [labels.index(s["version"]) for s in spans]
        assert order == sorted(order)
        mixed += len(spans) > 1
    assert mixed
    refits = [e for e in follower.events if e["event"] == "refit"]
    assert all(e["verified"] == "live" and e["pause_ms"] > 0 for e in refits)
    assert [a.verified for a in line.record(4).acks] == ["live"]


def test_several_versions_behind_is_one_refit(engine, line, followed, model):
    weights = weights_of(model)
    line.commit(weights)
    follower = followed(engine)
    follower.step()
    for k in range(3):
        weights = nudged(weights, k)
        line.commit(weights)
    follower.step()
    follower.step()
    assert [(e["event"], e["have"], e["version"]) for e in follower.events] == [
        ("refit", None, 1), ("refit", 1, 4), ("ready", 4, 4)
    ]  # fmt: skip
    assert serves(engine, weights)


def test_a_flipped_byte_is_refused_and_the_engine_goes_on_with_the_old_version(engine, line, followed, model):
    weights = weights_of(model)
    line.commit(weights)
    follower = followed(engine)
    follower.step()
    line.commit(nudged(weights, 1))
    record = line.record(2)
    (blob,) = line.manifest(2).named("delta")
    path = line.root / record.folder / blob.name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(bytes(data))
    assert follower.step() > 0
    (refused,) = [e for e in follower.events if e["event"] == "refused"]
    assert refused["error"]["kind"] == "integrity"
    assert refused["engine_state"] == "old"
    assert serves(engine, weights)
    assert not engine.paused()
    assert engine.greedy([1, 2, 3], 4)["weight_versions"][0]["version"] == line.record(1).label


def test_after_a_version_is_lost_the_engine_stays_and_the_next_commit_is_an_anchor_that_it_takes(
    engine, line, followed, model
):
    """CE17, end to end: a lost version costs that version, and nobody has to do anything."""
    weights = weights_of(model)
    first, second, third = (nudged(weights, k) for k in (11, 12, 13))
    line.commit(first)
    follower = followed(engine)
    follower.step()
    line.commit(second)
    (line.root / line.record(2).folder / "delta.safetensors").unlink()
    assert follower.step() > 0
    assert follower.events[-1]["event"] == "refused"
    assert serves(engine, first)
    label = line.record(1).label
    assert engine.greedy([1, 2, 3], 4)["weight_versions"][0]["version"] == label
    # The trainer's process lives on: it is told, and what it commits rests on nothing that is lost.
    assert line.commit(third) == 3
    assert "delta.safetensors" in line.damaged
    assert (line.record(3).kind, line.record(3).base, line.record(3).parent) == ("anchor", None, 2)
    follower.step()
    assert serves(engine, third)
    assert not engine.paused()
    assert [ack.subscriber for ack in line.record(3).acks] == ["engine-0"]
    assert line.record(2).acks == ()
    store = Store.open(line.root)
    steps = [event.stage for event in store.events(3)]
    store.close()
    ours = ["notified", "fetched", "verified", "applied", "acknowledged"]
    assert steps == ["commit", "staged", "published", *ours]
    line.commit(second)
    assert line.damaged is None
    follower.step()
    assert serves(engine, second)


def test_a_model_of_another_shape_is_refused_with_every_name(engine, line, followed, model):
    weights = weights_of(model)
    wider = {name: tensor.repeat(2, *[1] * (tensor.ndim - 1)) for name, tensor in weights.items()}
    before = engine.digests()
    line.commit(wider)
    follower = followed(engine)
    assert follower.step() > 0
    message = follower.events[0]["error"]["message"]
    assert all(name in message for name in weights)
    assert engine.digests() == before
    assert not engine.paused()


@pytest.mark.faults
@pytest.mark.parametrize(("verb", "when"), [("apply", "before"), ("apply", "after")])
def test_an_engine_killed_in_mid_refit_is_healed_after_its_restart(engine, line, followed, model, verb, when):
    weights = weights_of(model)
    line.commit(weights)
    follower = followed(engine)
    follower.step()
    weights = nudged(weights, 1)
    line.commit(weights)
    act = getattr(follower.port, verb)

    def killing(prepared):
        if when == "after":
            act(prepared)
        engine.kill()
        return act(prepared)

    setattr(follower.port, verb, killing)
    assert follower.step() > 0
    assert follower.events[-1]["event"] == "refused"
    assert follower.events[-1]["engine_state"] == "unknown"
    assert follower.step() > 0
    assert (follower.events[-1]["event"], follower.events[-1]["reason"]) == ("waiting", "engine")
    setattr(follower.port, verb, act)
    engine.start()
    assert engine.label() == "default"
    assert follower.step() == 0.0, follower.events
    assert follower.events[-1]["have"] is None
    assert serves(engine, weights)
    assert not engine.paused()


DIES = """
import os, signal, sys
from pathlib import Path
from weightline.rollout.engines import EmbeddedEngine
from weightline.rollout.follower import Follower
from weightline.rollout.replica import Replica
from weightline.service import connect

root, url, runtime, verb = sys.argv[1:]

class Dying(EmbeddedEngine):
    pass

def die(self, prepared):
    os.kill(os.getpid(), signal.SIGKILL)

setattr(Dying, verb, die)
line = connect(Path(root).as_uri())
replica = Replica(line.run, "dying", parent=Path(runtime))
Follower(line, Dying(url, holder="dying"), replica, id="dying").step()
"""


@pytest.mark.faults
@pytest.mark.parametrize("verb", ["apply", "verify", "label"])
def test_the_engine_undoes_the_refit_of_a_killed_follower_and_the_next_one_heals(
    engine, line, followed, model, tmp_path, verb
):
    weights = weights_of(model)
    line.commit(weights)
    followed(engine).step()
    old, old_label = weights, line.record(1).label
    weights = nudged(weights, 1)
    line.commit(weights)
    dying = subprocess.run(
        [sys.executable, "-c", DIES, str(line.root), engine.url, str(tmp_path / "run"), verb],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert dying.returncode == -signal.SIGKILL, dying.stderr
    assert engine.paused()
    assert engine.label() == old_label
    assert len(list((tmp_path / "run").glob("follow-*-dying-*"))) == 1
    second = followed(engine, "second")
    assert second.step() > 0
    assert second.events[-1]["error"]["kind"] == "conflict"
    until(lambda: not engine.paused(), what="the engine's watchdog")
    assert engine.label() == old_label
    assert serves(engine, old)
    assert engine.describe()["session"] is None
    assert second.step() == 0.0
    assert serves(engine, weights)
    assert not list((tmp_path / "run").glob("follow-*-dying-*"))  # swept when the second one started


@pytest.mark.faults
def test_fifty_refits_leave_memory_descriptors_and_folders_flat(engine, line, followed, model, tmp_path):
    weights = weights_of(model)
    line.commit(weights)
    follower = followed(engine)
    follower.step()
    ours, theirs = psutil.Process(), psutil.Process(engine.pid)
    early = None
    for k in range(50):
        weights = nudged(weights, k, share=0.1)
        line.commit(weights)
        assert follower.step() == 0.0, follower.events[-1]
        if k == 19:
            early = (ours.num_fds(), theirs.num_fds(), theirs.memory_info().rss)
    assert early is not None
    assert ours.num_fds() <= early[0] + 2
    assert theirs.num_fds() <= early[1] + 2
    assert theirs.memory_info().rss < early[2] + 8 * 2**20
    mapped = [m.path for m in theirs.memory_maps() if str(tmp_path) in m.path]
    assert len(set(mapped)) <= 2
    assert [p.name for p in follower.replica.folder.iterdir()] == ["owner.json"]
    assert serves(engine, weights)


def test_check_tells_a_live_engine_from_another_version(engine, line, followed, model):
    weights = weights_of(model)
    line.commit(weights)
    line.commit(nudged(weights, 1, names=(EMBEDDING,)))
    followed(engine, at=1).step()
    report = check(line, engine.name)
    assert (report.ok, report.version, report.label_matches) == (True, 1, True)
    assert report.tensors == len(weights)
    other = check(line, engine.name, 2)
    assert (other.ok, other.mismatches) == (False, (EMBEDDING,))


def test_follow_keeps_an_engine_on_the_newest_version_until_it_is_stopped(engine, line, model, tmp_path):
    weights = weights_of(model)
    line.commit(weights)
    events, stop = [], threading.Event()
    runtime = tmp_path / "runtime"
    thread = threading.Thread(
        target=follow,
        args=(line.root.as_uri(), engine.name),
        kwargs={"id": "engine-7", "runtime_dir": runtime, "on_event": events.append, "stop": stop},
    )
    thread.start()
    try:
        until(lambda: [e for e in events if e["event"] == "ready"], what="ready")
        for k in range(3):
            weights = nudged(weights, k)
            version = line.commit(weights)
            until(lambda v=version: [a.version for a in line.record(v).acks], what=f"the ack of {version}")
            assert serves(engine, weights)
    finally:
        stop.set()
        thread.join(timeout=30)
    assert not thread.is_alive()
    assert list(runtime.iterdir()) == []
    assert [a.subscriber for a in line.record(4).acks] == ["engine-7"]


def test_follow_in_a_process_ends_cleanly_on_sigterm(engine, line, model, tmp_path):
    weights = weights_of(model)
    line.commit(weights)
    runtime = tmp_path / "runtime"
    command = [
        sys.executable, "-m", "weightline", "follow", str(line.root), "--engine", engine.name,
        "--id", "cli", "--runtime-dir", str(runtime), "--json",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    try:
        until(lambda: line.record(1).acks or process.poll() is not None, what="an ack")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert '"event":"refit"' in out.replace(" ", "")
    assert list(runtime.iterdir()) == []
    assert serves(engine, weights)
    assert not engine.paused()


@pytest.mark.faults
def test_follow_over_a_server_and_past_its_death(engine, model, tmp_path):
    from weightline.service import connect

    store, listen, runtime = tmp_path / "store", f"unix:{tmp_path}/wl.sock", tmp_path / "runtime"
    serve = [sys.executable, "-m", "weightline", "serve", str(store), "--listen", listen, "--json"]
    weights = weights_of(model)
    events, stop = [], threading.Event()

    def up():
        server = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        assert '"ready"' in server.stdout.readline()
        server.stdout.close()
        return server

    def down(server):
        server.kill()
        server.wait(timeout=20)

    server = up()
    url = f"unix://{tmp_path}/wl.sock"
    trainer = connect(url)
    trainer.commit(weights)
    thread = threading.Thread(
        target=follow,
        args=(url, engine.name),
        kwargs={"id": "served", "runtime_dir": runtime, "on_event": events.append, "stop": stop},
    )
    thread.start()
    try:
        until(lambda: trainer.record(1).acks, what="the first ack")
        down(server)
        assert engine.greedy([1, 2], 4)["weight_versions"][0]["version"] == engine.label()
        server = up()
        weights = nudged(weights, 1)
        version = trainer.commit(weights)
        ack = until(lambda: trainer.record(version).acks, timeout=60, what=f"an ack; {events}")[0]
        assert (ack.subscriber, ack.verified) == ("served", "live")
        assert serves(engine, weights)
    finally:
        stop.set()
        thread.join(timeout=30)
        trainer.close()
        down(server)
    assert not thread.is_alive()
    assert list(runtime.iterdir()) == []


def test_the_command_rolls_a_followed_engine_back_and_releases_it(engine, line, model, tmp_path):
    weights, events, stop = weights_of(model), [], threading.Event()
    for seed in (1, 2):
        line.commit(weights := nudged(weights, seed))
    options = {"id": "engine-7", "runtime_dir": tmp_path / "run", "on_event": events.append, "stop": stop}
    command = [sys.executable, "-m", "weightline", "rollback", str(line.root), "--engine", engine.name]
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(follow, f"file://{line.root}", engine.name, **options)
        try:
            until(lambda: engine.label() == line.record(2).label)
            done = subprocess.run([*command, "--json", "--id", "engine-7"], capture_output=True, check=True)
            report = json.loads(done.stdout)
            assert (report["before"], report["version"], report["held"]) == (2, 1, True)
            assert engine.label() == line.record(1).label
            line.commit(nudged(weights, 3))
            until(lambda: [e for e in events if e.get("reason") == "held" or e["version"] == 1])
            assert engine.label() == line.record(1).label
            said = subprocess.run([*command, "--release"], capture_output=True, check=True, text=True)
            assert "not held any more" in said.stdout
            until(lambda: engine.label() == line.record(3).label)
        finally:
            stop.set()
        following.result(timeout=30)
    refused = subprocess.run(
        [*command, "--release", "--to", "1"], capture_output=True, check=False, text=True
    )
    assert (refused.returncode, "exclude each other" in refused.stderr) == (2, True)


def test_what_follow_refuses(tmp_path, line):
    with pytest.raises(InvalidInput, match="'tgi' is unknown") as error:
        follow(str(line.root), "tgi=http://127.0.0.1:1", id="x")
    assert "sglang" in error.value.hint
    assert "embedded, vllm, sglang" in error.value.hint
    with pytest.raises(InvalidInput, match="not KIND=URL"):
        follow(str(line.root), "http://127.0.0.1:1", id="x")
    with pytest.raises(InvalidInput, match="does not start with http"):
        follow(str(line.root), "embedded=127.0.0.1:1", id="x")
    with pytest.raises(StoreNotFound):
        follow(str(tmp_path / "nothing"), "embedded=http://127.0.0.1:1", id="x", runtime_dir=tmp_path / "run")
    with pytest.raises(VersionNotFound):
        follow(str(line.root), "embedded=http://127.0.0.1:1", id="x", at=7, runtime_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_port_refuses_what_does_not_start_from_what_is_live(engine, line, followed, model):
    """A delta against another version than the live one: only the right base applies (v0, v4 and v5 get one
    with base v4).
    """
    weights = weights_of(model)
    for k in range(3):
        line.commit(weights)
        weights = nudged(weights, k)
    follower = followed(engine, at=1)
    follower.step()
    delta = line.fetch_delta(3, have=2)
    path = follower.replica.folder / "d.safetensors"
    codec.write_delta(delta, path)
    record = line.record(3)
    refit = Refit(
        run=line.run, version=3, label=record.label, have=2, have_label=line.record(2).label, file=path,
        digests={n: delta.change(n).digest for n in delta.changed},
    )  # fmt: skip
    with pytest.raises(RefitError) as error:
        follower.port.prepare(refit)
    assert error.value.engine_state == "old"
    path.unlink()
    assert engine.label() == line.record(1).label
