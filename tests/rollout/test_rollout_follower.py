"""What a follower does with its engine, against a real store and an engine double on manual time."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from rollout_double import BF16, ERRORS, Fault, Port, bit_equal, random_weights, stepped, true_labels

from weightline import codec
from weightline.errors import ConflictError, Unavailable, VersionGone
from weightline.rollout import check
from weightline.rollout.follower import BACKOFF, DELTA_FAILURES


def refits(engine):
    return engine.calls.count("prepare")


def test_an_engine_is_brought_to_the_newest_version_and_acknowledged(rig):
    follower = rig.follower()
    assert follower.step() == 0.0
    rig.settle(follower, 4)
    (event,) = rig.named("refit")
    assert event == json.loads(json.dumps(event))
    assert {
        "event", "engine", "version", "label", "have", "elements", "nbytes", "pause_ms", "total_ms", "phases"
    } <= event.keys()  # fmt: skip
    assert (event["engine"], event["version"], event["have"]) == ("engine-0", 4, None)
    assert event["label"] == rig.line.record(4).label
    assert {
        "plan",
        "fetch",
        "prepare",
        "pause",
        "apply",
        "verify",
        "invalidate",
        "label",
        "resume",
        "close",
    } == event["phases"].keys()
    ack = next(a for a in rig.line.record(4).acks if a.subscriber == "engine-0")
    assert (ack.verified, ack.pause_ms) == ("live", event["pause_ms"])
    assert [e["event"] for e in rig.events] == ["refit", "ready"]


def test_several_versions_behind_is_one_merged_delta_and_one_install(rig):
    rig.put_at(1)
    rig.settle(rig.follower(), 4)
    (event,) = rig.named("refit")
    assert (event["have"], event["version"]) == (1, 4)
    assert event["elements"] < sum(a.size for a in rig.versions[4].values())
    assert refits(rig.engine) == 1


def test_the_same_version_is_left_alone(rig):
    rig.put_at(4)
    follower = rig.follower()
    for _ in range(3):
        follower.step()
    assert refits(rig.engine) == 0
    assert [e["event"] for e in rig.events] == ["ready"]


def test_a_restarted_engine_is_not_ready_before_it_is_at_the_newest_version(rig):
    follower = rig.follower()
    rig.settle(follower, 4)
    rig.engine.restart()
    rig.events.clear()
    rig.settle(follower, 4)
    follower.step()
    assert [(e["event"], e["have"]) for e in rig.events] == [("refit", None), ("ready", 4)]


@pytest.mark.parametrize(
    "change", [{"run": "another"}, {"label": "set by hand"}, {"version": 99}, {"quarantined": True}]
)
def test_an_engine_in_an_unexpected_state_gets_the_full_version(rig, change):
    rig.put_at(3)
    for name, value in change.items():
        setattr(rig.engine, name, value)
    rig.settle(rig.follower(), 4)
    assert [e["have"] for e in rig.named("refit")] == [None]


def test_a_pinned_engine_goes_back_and_holds(rig):
    rig.put_at(4)
    follower = rig.follower(at=2)
    rig.settle(follower, 2)
    for _ in range(3):
        follower.step()
    assert rig.engine.version == 2
    assert true_labels(rig.engine)


def test_a_held_engine_does_not_move_and_a_restart_brings_it_back(rig):
    rig.put_at(2)
    follower = rig.follower(hold=True)
    for _ in range(3):
        follower.step()
    assert (rig.engine.version, refits(rig.engine)) == (2, 0)
    rig.engine.restart()
    rig.settle(follower, 2)


def test_a_held_engine_that_never_had_a_version_is_left_alone(rig):
    follower = rig.follower(hold=True)
    follower.step()
    follower.step()
    assert [(e["event"], e["reason"]) for e in rig.events] == [("waiting", "held")]
    assert rig.engine.label == "default"


def test_an_empty_store_is_waited_for(own_rig):
    follower = own_rig.follower()
    follower.step()
    assert [(e["event"], e["reason"]) for e in own_rig.events] == [("waiting", "empty")]
    own_rig.commit(random_weights(1))
    own_rig.settle(follower, 1)


def test_an_engine_is_given_absolute_values_and_the_file_is_gone_afterwards(rig):
    rig.put_at(3)
    follower = rig.follower()
    handed = []
    prepare = follower.port.prepare
    follower.port.prepare = lambda refit: (
        handed.append((refit, codec.read_delta(refit.file).level)),
        prepare(refit),
    )[1]
    rig.settle(follower, 4)
    ((refit, level),) = handed
    assert (refit.have, level) == (3, "absolute")
    assert not refit.file.exists()


def test_nothing_is_left_in_the_runtime_folder_between_refits_and_after_the_end(rig):
    follower = rig.follower()
    rig.settle(follower, 4)
    assert [p.name for p in follower.replica.folder.iterdir()] == ["owner.json"]
    follower.replica.close()
    assert list(rig.folder.iterdir()) == []


def flip(path: Path, at: float = 0.5) -> None:
    """A rotten byte. The blob is read-only by custom only."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 0x10
    path.chmod(0o644)
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("at", [0.0, 0.3, 0.6, 0.99])
def test_a_flipped_byte_in_the_blob_is_refused_and_the_engine_stays_at_the_old_version(own_rig, at):
    weights = random_weights(1)
    own_rig.commit(weights)
    follower = own_rig.follower()
    own_rig.settle(follower, 1)
    own_rig.commit(stepped(weights, 2))
    assert own_rig.line.record(2).kind == "delta"
    (blob,) = own_rig.line.manifest(2).named("delta")
    flip(own_rig.line.root / own_rig.line.record(2).folder / blob.name, at)
    calls = len(own_rig.engine.calls)
    for _ in range(3):
        assert follower.step() > 0
    assert set(own_rig.engine.calls[calls:]) == {"describe"}
    assert own_rig.engine.version == 1
    assert bit_equal(own_rig.engine, own_rig.versions[1])
    refused = own_rig.named("refused")
    assert refused[0]["error"]["kind"] in ("integrity", "format")
    assert refused[0]["error"]["hint"]
    assert {e["engine_state"] for e in refused} == {"old"}
    assert own_rig.line.record(2).acks == ()


def test_a_rotten_delta_beside_an_anchor_is_refused_and_the_anchor_heals(own_rig):
    weights = random_weights(1)
    own_rig.commit(weights)
    follower = own_rig.follower()
    own_rig.settle(follower, 1)
    own_rig.commit(stepped(weights, 2), anchor=True)
    (blob,) = own_rig.line.manifest(2).named("delta")
    flip(own_rig.line.root / own_rig.line.record(2).folder / blob.name)
    assert follower.step() > 0
    assert own_rig.named("refused")[0]["full_next"]
    own_rig.settle(follower, 2)
    assert [e["have"] for e in own_rig.named("refit")] == [None, None]


def test_a_delta_that_fails_again_and_again_is_replaced_by_the_full_version(rig):
    rig.put_at(3)
    rig.engine.faults = [Fault("apply", "before", ERRORS["old"], DELTA_FAILURES)]
    follower = rig.follower()
    for _ in range(DELTA_FAILURES):
        assert follower.step() > 0
    rig.settle(follower, 4)
    assert [e["have"] for e in rig.named("refit")] == [None]
    assert rig.named("refused")[-1]["full_next"]


def test_the_delays_between_failures_grow_and_are_bounded(rig):
    rig.put_at(3)
    rig.engine.faults = [Fault("prepare", "before", ERRORS["old"], 100)]
    follower = rig.follower()
    delays = [follower.step() for _ in range(len(BACKOFF) + 2)]
    assert delays == [*BACKOFF, BACKOFF[-1], BACKOFF[-1]]
    assert [e["retry_in"] for e in rig.named("refused")] == delays
    assert list(BACKOFF) == sorted(BACKOFF)


def test_a_failed_step_is_made_good_by_the_next_one(own_rig):
    """v2 changes one tensor and fails, v3 changes another: the engine ends with both."""
    weights = random_weights(1)
    own_rig.commit(weights)
    follower = own_rig.follower()
    own_rig.settle(follower, 1)
    weights = stepped(weights, 2, ("model.layers.0.bias",))
    own_rig.commit(weights)
    own_rig.engine.faults = [Fault("verify", "before", ERRORS["unknown"])]
    follower.step()
    assert own_rig.engine.version == 1
    assert bit_equal(own_rig.engine, own_rig.versions[1])
    own_rig.commit(stepped(weights, 3, ("model.embed_tokens.weight",)))
    own_rig.settle(follower, 3)


def test_an_engine_that_is_away_is_waited_for(rig):
    rig.engine.down = True
    follower = rig.follower()
    delays = [follower.step() for _ in range(4)]
    assert delays == [0.5, 1.0, 2.0, 2.0]
    assert [(e["event"], e["reason"], e["error"]["kind"]) for e in rig.events] == [
        ("waiting", "engine", "unavailable")
    ]
    rig.engine.down = False
    rig.settle(follower, 4)


def test_a_store_that_does_not_answer_is_waited_for_and_the_engine_goes_on(rig, monkeypatch):
    rig.put_at(3)

    def away(*args, **options):
        raise Unavailable("the server is away")

    follower = rig.follower()
    with monkeypatch.context() as patch:
        patch.setattr(rig.line, "versions", away)
        assert follower.step() > 0
    with monkeypatch.context() as patch:
        patch.setattr(rig.line, "manifest", away)
        assert follower.step() > 0
    assert {(e["event"], e["reason"]) for e in rig.events} == {("waiting", "store")}
    assert rig.engine.serving
    rig.settle(follower, 4)


def test_an_ack_that_could_not_be_sent_is_sent_later(own_rig, monkeypatch):
    own_rig.commit(random_weights(1))
    follower = own_rig.follower()

    def away(*args, **options):
        raise Unavailable("the server is away")

    with monkeypatch.context() as patch:
        patch.setattr(own_rig.line, "ack", away)
        follower.step()
        follower.step()
    assert own_rig.line.record(1).acks == ()
    assert not own_rig.named("refit")[0]["acked"]
    follower.step()
    (ack,) = own_rig.line.record(1).acks
    assert (ack.verified, ack.pause_ms) == ("live", own_rig.named("refit")[0]["pause_ms"])


def test_an_ack_that_a_dead_follower_owed_is_sent_by_the_next_one(own_rig):
    own_rig.commit(random_weights(1))
    own_rig.put_at(1)
    own_rig.follower().step()
    (ack,) = own_rig.line.record(1).acks
    assert (ack.verified, ack.detail) == ("none", "found serving it")


def test_a_second_follower_is_refused_clearly_and_does_no_damage(rig):
    rig.put_at(3)
    first = rig.follower("first")
    second = rig.follower("second")
    pause = first.port.pause

    def pause_while_the_second_tries(prepared):
        pause(prepared)
        second.step()

    first.port.pause = pause_while_the_second_tries
    first.step()
    (refused,) = rig.named("refused")
    assert refused["error"]["kind"] == "conflict"
    assert "first" in refused["error"]["message"]
    assert not refused["full_next"]
    rig.settle(second, 4)
    assert len(rig.named("refit")) == 1
    assert true_labels(rig.engine)


def test_a_pause_by_somebody_else_is_left_in_force_and_acknowledged_after_it(own_rig):
    weights = random_weights(1)
    own_rig.commit(weights)
    follower = own_rig.follower()
    own_rig.settle(follower, 1)
    own_rig.commit(stepped(weights, 2))
    own_rig.engine.paused = True
    follower.step()
    follower.step()
    assert own_rig.engine.paused
    assert (own_rig.engine.version, own_rig.engine.label) == (2, own_rig.line.record(2).label)
    assert own_rig.line.record(2).acks == ()
    own_rig.engine.paused = False
    follower.step()
    assert [a.verified for a in own_rig.line.record(2).acks] == ["live"]


def test_a_label_moves_with_an_empty_delta_once_the_engine_has_it(own_rig):
    weights = random_weights(1)
    own_rig.commit(weights)
    follower = own_rig.follower()
    own_rig.settle(follower, 1)
    own_rig.commit(weights)
    own_rig.settle(follower, 2)
    assert own_rig.named("refit")[-1]["elements"] == 0


def test_a_delta_that_names_only_the_embedding_moves_the_tied_head(own_rig):
    own_rig.engine.aliases = {"lm_head.weight": "model.embed_tokens.weight"}
    own_rig.engine.restart()
    weights = random_weights(1)
    own_rig.commit(weights)
    follower = own_rig.follower()
    own_rig.settle(follower, 1)
    after = stepped(weights, 2, ("model.embed_tokens.weight",))
    own_rig.commit(after)
    own_rig.settle(follower, 2)
    assert np.array_equal(
        codec.bits_of(own_rig.engine.weights["lm_head.weight"]),
        codec.bits_of(after["model.embed_tokens.weight"]),
    )


def test_a_version_whose_tied_names_differ_is_refused(own_rig):
    own_rig.engine.aliases = {"lm_head.weight": "model.embed_tokens.weight"}
    own_rig.engine.restart()
    weights = random_weights(1)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    own_rig.commit(weights)
    follower = own_rig.follower()
    own_rig.settle(follower, 1)
    own_rig.commit(stepped(weights, 2, ("lm_head.weight",)))
    follower.step()
    (refused,) = own_rig.named("refused")
    assert "lm_head.weight and model.embed_tokens.weight" in refused["error"]["message"]
    assert own_rig.engine.version == 1


def test_names_with_wrappers_reach_the_bare_tensors(own_rig):
    bare = random_weights(1)

    def wrapped(weights):
        return {"module._orig_mod." + name: array for name, array in weights.items()}

    own_rig.commit(wrapped(bare))
    follower = own_rig.follower()
    assert follower.step() == 0.0
    assert bit_equal(own_rig.engine, bare)
    after = stepped(bare, 2)
    own_rig.commit(wrapped(after))
    assert follower.step() == 0.0
    assert bit_equal(own_rig.engine, after)
    assert [e["have"] for e in own_rig.named("refit")] == [None, 1]
    assert check(own_rig.line, follower.port).ok


def test_names_without_a_home_are_all_listed_and_nothing_is_tried(own_rig):
    weights = random_weights(1)
    own_rig.commit({**weights, "extra.a": np.zeros(3, BF16), "extra.b": np.zeros(3, BF16)})
    calls = len(own_rig.engine.calls)
    follower = own_rig.follower()
    follower.step()
    (refused,) = own_rig.named("refused")
    assert "extra.a" in refused["error"]["message"]
    assert "extra.b" in refused["error"]["message"]
    assert set(own_rig.engine.calls[calls:]) == {"describe"}


def test_a_version_of_another_shape_is_refused(own_rig):
    weights = random_weights(1)
    own_rig.commit(weights)
    follower = own_rig.follower()
    own_rig.settle(follower, 1)
    own_rig.commit({**weights, "model.norm.weight": np.ones(41, BF16)}, anchor=True)
    follower.step()
    assert "shape [41]" in own_rig.named("refused")[-1]["error"]["message"]
    assert own_rig.engine.version == 1


def test_a_base_whose_deltas_are_gone_leads_to_the_full_version(rig, monkeypatch):
    rig.put_at(1)

    def gone(version, have=None):
        raise VersionGone(f"version {version}: retired")

    monkeypatch.setattr(rig.line, "fetch_delta", gone)
    rig.settle(rig.follower(), 4)
    assert [e["have"] for e in rig.named("refit")] == [None]
    assert rig.named("refused") == []


def test_an_interrupt_in_the_middle_rolls_back_resumes_and_then_goes_through(rig):
    rig.put_at(3)
    rig.engine.faults = []
    follower = rig.follower()
    apply = follower.port.apply

    def interrupted(prepared):
        apply(prepared)
        raise KeyboardInterrupt

    follower.port.apply = interrupted
    with pytest.raises(KeyboardInterrupt):
        follower.step()
    assert rig.engine.serving
    assert rig.engine.session is None
    assert rig.engine.version == 3
    assert bit_equal(rig.engine, rig.versions[3])


def test_run_follows_until_it_is_told_to_stop(own_rig):
    own_rig.commit(random_weights(1))
    stop = threading.Event()
    seen = []

    def on_event(event):
        seen.append(event["event"])
        if event["event"] == "ready":
            stop.set()

    follower = own_rig.follower(stop=stop)
    follower._on_event = on_event
    follower.run()
    assert seen == ["refit", "ready"]


def test_check_compares_tensor_by_tensor(rig):
    rig.put_at(2)
    port = Port(rig.engine)
    report = check(rig.line, port)
    assert report.ok
    assert (report.version, report.label_matches, report.mismatches) == (2, True, ())
    assert report.tensors == len(rig.versions[2])
    other = check(rig.line, port, 3)
    assert not other.ok
    assert not other.label_matches
    changed = {
        n
        for n in rig.versions[2]
        if codec.bits_of(rig.versions[2][n]).tobytes() != codec.bits_of(rig.versions[3][n]).tobytes()
    }
    assert set(other.mismatches) == changed
    rig.engine.weights["model.norm.weight"][0] = 2
    assert check(rig.line, port).mismatches == ("model.norm.weight",)


def test_check_of_an_engine_without_a_version_takes_the_newest(rig):
    report = check(rig.line, Port(rig.engine))
    assert (report.version, report.ok, report.label) == (4, False, "default")


def test_check_does_not_mix_two_versions(rig):
    rig.put_at(2)
    port = Port(rig.engine)
    digests = port.digests
    moves = iter([3, 4])

    def moving(names=None):
        answer = digests(names)
        version = next(moves, None)
        if version is not None:
            rig.put_at(version)
        return answer

    port.digests = moving
    report = check(rig.line, port)
    assert (report.version, report.ok) == (4, True)


def test_errors_of_the_port_are_what_the_events_carry(rig):
    rig.put_at(3)
    rig.engine.faults = [Fault("apply", "before", ConflictError("injected"), 1)]
    rig.follower().step()
    (refused,) = rig.named("refused")
    assert refused["error"]["kind"] == "refit"
    assert refused["error"]["engine_state"] == "old"
    assert "(at apply): injected" in refused["error"]["message"]
