"""Refits: what is refused and why, what is written and how it is proved, the way back from every point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from generate_world import (
    EMBED,
    HEAD,
    Collector,
    Versions,
    digests_of,
    load_weights,
    marker_weights,
    paused_at,
    reference_tokens,
    run,
    save_weights,
    spans,
    start,
)

from weightline import codec
from weightline.errors import ConflictError, RefitError, Unavailable

pytestmark = pytest.mark.torch

PROMPT = [5, 9, 2, 44, 61]
BODY = "model.layers.0.mlp.up_proj.weight"


class Clock:
    """Time that stands still until it is told to move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def world(models: Any, engines: Any, tmp_path: Path, clock: Clock) -> tuple[Any, Versions]:
    folder = models("qwen3", marker=True)
    return engines(folder, clock=clock, session_timeout=30.0), Versions(folder, tmp_path)


def verb(engine: Any, name: str, session: str) -> Any:
    return engine.call(lambda: getattr(engine.refits, name)(session))


def bits_of_everything(engine: Any) -> dict[str, bytes]:
    return {name: window.bits.tobytes() for name, window in engine.weights.windows.items()}


def full_to_1(engine: Any, versions: Versions) -> None:
    """A first, full refit: the engine's own weights as version 1, labelled v1."""
    engine.pause("keep").result(60)
    versions.refit(engine, versions.weights["default"], label="v1", version=1)
    engine.resume()


def delta_to(versions: Versions, k: int, **changes: Any) -> Any:
    new = marker_weights(versions.weights["v1"], k)
    return versions.order(new, label=f"v{k}", version=k, base=(1, "v1"), **changes)


# What is written.


@pytest.mark.parametrize(
    ("arch", "tie"), [("qwen3", False), ("qwen3", True), ("llama", True), ("qwen3_moe", False)]
)
def test_a_refitted_engine_equals_a_fresh_load(
    arch: str, tie: bool, models: Any, engines: Any, tmp_path: Path
) -> None:
    folder = models(arch, tie=tie)
    engine, versions = engines(folder), Versions(folder, tmp_path)
    pointers = {n: w.bits.ctypes.data for n, w in engine.weights.windows.items()}
    full_to_1(engine, versions)
    rng = np.random.default_rng(3)
    changed = dict(versions.weights["v1"])
    for name in (
        EMBED,
        "model.norm.weight",
        *(n for n in changed if n.endswith(("up_proj.weight", "k_proj.weight"))),
    ):
        bits = codec.bits_of(changed[name]).copy()
        places = rng.choice(bits.size, size=max(1, bits.size // 50), replace=False)
        bits[places] ^= 1
        changed[name] = codec.from_bits(bits, codec.spec_of(name, changed[name]))
    engine.pause("keep").result(60)
    versions.refit(engine, changed, label="v2", version=2)
    engine.resume()

    fresh = save_weights(folder, changed, tmp_path / "fresh")
    from generate_world import open_engine, reference_model

    other = open_engine(fresh)
    assert bits_of_everything(engine) == bits_of_everything(other)
    assert {n: w.bits.ctypes.data for n, w in engine.weights.windows.items()} == pointers
    assert list(run(engine, PROMPT, max_tokens=20).token_ids) == reference_tokens(
        reference_model(fresh), PROMPT, 20
    )
    digests, identity = engine.digests()
    assert {n: digests[n] for n in changed} == digests_of(changed)
    assert (identity.label, identity.version, identity.run) == ("v2", 2, "run-1")


def test_a_delta_that_names_only_the_embedding_moves_the_tied_head(
    models: Any, engines: Any, tmp_path: Path
) -> None:
    folder = models("llama", marker=True, tie=True)
    engine, versions = engines(folder), Versions(folder, tmp_path)
    state = engine.describe()
    assert state.aliases == {HEAD: EMBED}
    assert HEAD in {t.name for t in state.tensors}
    full_to_1(engine, versions)
    engine.pause("keep").result(60)
    versions.refit(engine, marker_weights(versions.weights["v1"], 9), label="v9", version=9)
    engine.resume()
    assert run(engine, PROMPT).token_ids == (9,) * 8
    digests, _ = engine.digests([HEAD, EMBED])
    assert digests[HEAD] == digests[EMBED]


def test_both_tied_names_may_come_if_they_agree(models: Any, engines: Any, tmp_path: Path) -> None:
    folder = models("llama", marker=True, tie=True)
    engine, versions = engines(folder), Versions(folder, tmp_path)
    base = versions.weights["default"]
    agree = {**base, HEAD: base[EMBED].copy()}
    session, _ = engine.prepare(versions.order(agree, label="v1", version=1))
    verb(engine, "close", session)
    differ = {**base, HEAD: marker_weights(base, 3)[EMBED]}
    with pytest.raises(RefitError, match="share storage and are given different values") as caught:
        engine.prepare(versions.order(differ, label="v1", version=1))
    assert caught.value.engine_state == "old"


def test_every_stored_bit_pattern_arrives(models: Any, engines: Any, tmp_path: Path) -> None:
    """NaN payloads, infinities, signed zeros and subnormals of bf16, in the fp32 live tensor and back."""
    folder = models("qwen3")
    engine, versions = engines(folder), Versions(folder, tmp_path)
    full_to_1(engine, versions)
    new = dict(versions.weights["v1"])
    bits = codec.bits_of(new[BODY]).copy()
    odd = np.array([0x7FC1, 0xFFFF, 0x7F81, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0001, 0x8001], np.uint16)
    bits[: odd.size] = odd
    new[BODY] = codec.from_bits(bits, codec.spec_of(BODY, new[BODY]))
    engine.pause("keep").result(60)
    versions.refit(engine, new, label="v2", version=2)
    live = engine.weights.windows[BODY].bits[: odd.size]
    assert np.array_equal(live, odd.astype(np.uint32) << 16)
    assert engine.digests([BODY])[0] == digests_of({BODY: new[BODY]})


def test_generation_goes_on_while_a_refit_is_prepared(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, versions = world
    full_to_1(engine, versions)
    decode = engine.refits.decode
    order = delta_to(versions, 4)
    served: list[Any] = []

    def while_serving(session: Any) -> Any:
        served.append(run(engine, PROMPT))
        return decode(session)

    monkeypatch.setattr(engine.refits, "decode", while_serving)
    session, elements = engine.prepare(order)
    assert elements == 2
    assert served[0].weight_versions == spans(("v1", 0, 8))
    verb(engine, "close", session)


def test_a_version_that_changes_nothing_is_taken(world: Any) -> None:
    engine, versions = world
    full_to_1(engine, versions)
    before = bits_of_everything(engine)
    engine.pause("keep").result(60)
    versions.refit(engine, versions.weights["v1"], label="v2", version=2)
    engine.resume()
    assert bits_of_everything(engine) == before
    assert run(engine, PROMPT).weight_versions == spans(("v2", 0, 8))


def test_persistent_buffers_are_weights_and_rope_tables_are_not(models: Any) -> None:
    import torch

    from weightline.generate import load_model
    from weightline.generate.weights import LiveWeights

    loaded = load_model(models("qwen3"), max_model_len=96)
    loaded.module.model.register_buffer("scale", torch.ones(3))
    weights = LiveWeights(loaded)
    assert weights.windows["model.scale"].shape == (3,)
    assert not any("inv_freq" in name for name in weights.windows)
    covered = [w for name, w in weights.windows.items() if name != "model.scale"]
    assert weights.uncovered(covered) == ["model.scale"]
    assert weights.uncovered(weights.windows.values()) == []


def test_experts_may_come_fused_or_one_by_one(models: Any, engines: Any, tmp_path: Path) -> None:
    folder = models("qwen3_moe")
    engine = engines(folder)
    stem = "model.layers.1.mlp.experts"
    assert {f"{stem}.gate_up_proj", f"{stem}.3.up_proj.weight"} <= set(engine.weights.windows)
    windows = engine.weights.windows
    parts = [w for name, w in windows.items() if name.startswith(stem + ".") and name.endswith(".weight")]
    rest = [w for w in windows.values() if not w.owner.startswith(stem)]
    assert engine.weights.uncovered([*rest, *parts]) == []
    missing = engine.weights.uncovered([*rest, *parts[1:]])
    assert missing == [parts[0].owner]
    fused = engine.digests([f"{stem}.gate_up_proj"])[0]
    assert fused[f"{stem}.gate_up_proj"] != engine.digests([f"{stem}.3.up_proj.weight"])[0]
    versions = Versions(folder, tmp_path)
    both = {**versions.weights["default"], f"{stem}.down_proj": _fused(versions.weights["default"], stem)}
    with pytest.raises(RefitError, match=r"overlaps"):
        engine.prepare(versions.order(both, label="v1", version=1))


def _fused(weights: dict[str, Any], stem: str) -> Any:
    return np.stack([weights[f"{stem}.{i}.down_proj.weight"] for i in range(4)])


# What is refused.


def test_a_delta_on_another_base_is_never_applied(world: Any) -> None:
    engine, versions = world
    order = versions.order(
        marker_weights(versions.weights["default"], 2), label="v2", version=2, base=(1, "default")
    )
    with pytest.raises(RefitError, match=r"version 1 \(live: None\)") as caught:
        engine.prepare(order)
    assert caught.value.engine_state == "old"
    full_to_1(engine, versions)
    for changes, words in (
        ({"have": 3}, r"version 3 \(live: 1\)"),
        ({"run": "other"}, r"run 'other' \(live: 'run-1'\)"),
        ({"have_label": "v7"}, r"label 'v7' \(live: 'v1'\)"),
    ):
        with pytest.raises(RefitError, match=words):
            engine.prepare(delta_to(versions, 2, **changes))
    assert engine.describe().session is None


def test_a_base_that_moves_after_prepare_is_noticed_at_apply(world: Any) -> None:
    engine, versions = world
    full_to_1(engine, versions)
    session, _ = engine.prepare(delta_to(versions, 2))
    engine.set_label("somebody-elses")
    engine.pause("keep").result(60)
    before = bits_of_everything(engine)
    with pytest.raises(RefitError, match="somebody-elses"):
        verb(engine, "apply", session)
    assert bits_of_everything(engine) == before


@pytest.mark.parametrize("have", [None, (1, "v1")])
def test_names_shapes_and_dtypes_are_checked_and_all_misses_listed(world: Any, have: Any) -> None:
    engine, versions = world
    full_to_1(engine, versions)
    new = dict(versions.weights["v1"])
    new["model.layers.9.ghost.weight"] = new[BODY]
    new[BODY] = new[BODY][:-1]
    new[HEAD] = new[HEAD].astype(np.float64)
    delta = codec.full({n: new[n] for n in (BODY, HEAD, "model.layers.9.ghost.weight")})
    path = versions.files / "bad.safetensors"
    codec.write_delta(delta, path)
    order = versions.order(versions.weights["v1"], label="v2", version=2, base=have)
    promised = {name: digest for name, digest in digests_of(new).items() if name in delta.changed}
    order = msgspec.structs.replace(order, file=str(path), digests=promised)
    before = bits_of_everything(engine)
    with pytest.raises(RefitError) as caught:
        engine.prepare(order)
    text = caught.value.message
    assert "model.layers.9.ghost.weight: no such tensor" in text
    assert f"{BODY}: shape [63, 32], the engine has [64, 32]" in text
    assert f"{HEAD}: F64 does not widen exactly to the engine's F32" in text
    assert (have is None) == ("model.norm.weight: not in a full refit" in text)
    assert caught.value.engine_state == "old"
    assert bits_of_everything(engine) == before


def test_a_full_refit_names_what_it_lacks(world: Any) -> None:
    engine, versions = world
    part = {n: a for n, a in versions.weights["default"].items() if n != BODY}
    with pytest.raises(RefitError, match=f"{BODY}: not in a full refit"):
        engine.prepare(versions.order(part, label="v1", version=1))


def test_a_sparse_change_in_another_dtype_than_the_stored_one_is_refused(world: Any) -> None:
    engine, versions = world
    full_to_1(engine, versions)
    wide = {n: a.astype(np.float32) for n, a in versions.weights["v1"].items()}
    other = {**wide, BODY: wide[BODY].copy()}
    other[BODY][0, 0] += 1
    order = delta_to(versions, 2)
    codec.write_delta(codec.diff(wide, other), Path(order.file))
    import msgspec

    with pytest.raises(RefitError, match=f"{BODY}: F32, the engine was last given BF16"):
        engine.prepare(msgspec.structs.replace(order, digests=digests_of(other)))


def test_a_full_refit_may_change_the_stored_dtype(world: Any) -> None:
    engine, versions = world
    wide = {n: a.astype(np.float32) for n, a in versions.weights["default"].items()}
    wide[BODY][0, 0] += 1e-6
    engine.pause("keep").result(60)
    versions.refit(engine, wide, label="wide", version=1)
    assert engine.digests([BODY])[0] == digests_of({BODY: wide[BODY]})
    versions.refit(engine, {**wide, BODY: wide[BODY] * 2}, label="wider", version=2)
    assert engine.weights.stored[BODY] == "F32"


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_a_damaged_delta_file_is_refused_before_anything_is_paused(world: Any, damage: str) -> None:
    engine, versions = world
    full_to_1(engine, versions)
    order = delta_to(versions, 2)
    path = Path(order.file)
    raw = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    else:
        raw[-1] ^= 1
        path.write_bytes(raw[:-1] if damage == "cut" else raw)
    with pytest.raises(RefitError, match=str(path)) as caught:
        engine.prepare(order)
    assert caught.value.engine_state == "old"
    assert engine.describe().session is None
    assert run(engine, PROMPT).weight_versions == spans(("v1", 0, 8))


def test_verbs_out_of_order_are_conflicts(world: Any) -> None:
    engine, versions = world
    full_to_1(engine, versions)
    session, _ = engine.prepare(delta_to(versions, 2))
    with pytest.raises(ConflictError, match="not paused"):
        verb(engine, "apply", session)
    engine.pause("keep").result(60)
    for name in ("verify", "label"):
        with pytest.raises(ConflictError, match="the refit is prepared"):
            verb(engine, name, session)
    verb(engine, "apply", session)
    with pytest.raises(ConflictError, match="the refit is applied"):
        verb(engine, "label", session)
    with pytest.raises(ConflictError, match="old label"):
        engine.resume()
    verb(engine, "verify", session)
    with pytest.raises(ConflictError, match="old label"):
        engine.resume()
    verb(engine, "label", session)
    engine.resume()
    with pytest.raises(ConflictError, match="no refit session"):
        verb(engine, "apply", "another")
    for name in ("apply", "verify", "label"):  # a lost answer: asked again, done once
        verb(engine, name, session)
    verb(engine, "close", session)
    verb(engine, "close", session)
    assert run(engine, PROMPT).token_ids == (2,) * 8


def test_one_session_at_a_time_and_its_holder_may_start_over(world: Any) -> None:
    engine, versions = world
    full_to_1(engine, versions)
    order = delta_to(versions, 2)
    session, _ = engine.prepare(order)
    assert engine.prepare(order)[0] == session, "the same order again: a lost answer"
    with pytest.raises(ConflictError, match="held by tests"):
        engine.prepare(delta_to(versions, 3, holder="another"))
    engine.pause("keep").result(60)
    verb(engine, "apply", session)
    before = engine.identity
    again, _ = engine.prepare(delta_to(versions, 3))
    assert again != session
    assert engine.identity == before
    verb(engine, "apply", again)
    verb(engine, "verify", again)
    verb(engine, "label", again)
    engine.resume()
    assert run(engine, PROMPT).token_ids == (3,) * 8


# The way back.


@pytest.mark.parametrize("after", ["prepare", "apply", "verify", "label"])
def test_rollback_brings_back_every_bit_and_the_label(world: Any, after: str) -> None:
    engine, versions = world
    full_to_1(engine, versions)
    before, carried = bits_of_everything(engine), dict(engine.weights.carried)
    collector = Collector()
    with paused_at(collector, 3, engine):
        start(engine, PROMPT, collector, max_tokens=6)
    session, _ = engine.prepare(delta_to(versions, 2))
    for name in ("apply", "verify", "label"):
        if after == "prepare":
            break
        verb(engine, name, session)
        if name == after:
            break
    verb(engine, "rollback", session)
    verb(engine, "rollback", session)
    verb(engine, "close", session)
    engine.resume()
    assert bits_of_everything(engine) == before
    assert engine.weights.carried == carried
    final = collector.wait()
    assert final.token_ids == (0,) * 6
    assert final.weight_versions == spans(("v1", 0, 6))
    engine.pause("keep").result(60)
    versions.refit(engine, marker_weights(versions.weights["v1"], 4), label="v4", version=4)
    engine.resume()
    assert run(engine, PROMPT).token_ids == (4,) * 8


def test_closing_an_unlabelled_session_takes_its_weights_back(world: Any) -> None:
    engine, versions = world
    full_to_1(engine, versions)
    before = bits_of_everything(engine)
    session, _ = engine.prepare(delta_to(versions, 2))
    engine.pause("keep").result(60)
    verb(engine, "apply", session)
    verb(engine, "close", session)
    engine.resume()
    assert bits_of_everything(engine) == before


@pytest.mark.parametrize("nth", [1, 7, 20])
def test_a_write_that_fails_leaves_the_old_version(
    world: Any, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, versions = world
    full_to_1(engine, versions)
    before = bits_of_everything(engine)
    rng = np.random.default_rng(1)
    new = {}
    for name, array in versions.weights["v1"].items():
        bits = codec.bits_of(array).copy()
        bits[rng.integers(bits.size)] ^= 3
        new[name] = codec.from_bits(bits, codec.spec_of(name, array))
    session, _ = engine.prepare(versions.order(new, label="v2", version=2, base=(1, "v1")))
    collector = Collector()
    with paused_at(collector, 2, engine):
        start(engine, PROMPT, collector, max_tokens=6)
    write, calls = engine.weights.write, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == nth:
            raise MemoryError("no room")
        return write(*args)

    monkeypatch.setattr(engine.weights, "write", failing)
    with pytest.raises(RefitError, match="no room") as caught:
        verb(engine, "apply", session)
    assert caught.value.engine_state == "old"
    assert bits_of_everything(engine) == before
    verb(engine, "close", session)
    engine.resume()
    assert collector.wait().weight_versions == spans(("v1", 0, 6))


def test_a_write_that_is_lost_or_wrong_is_found_by_verify(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, versions = world
    full_to_1(engine, versions)
    before = bits_of_everything(engine)
    engine.pause("keep").result(60)
    session, _ = engine.prepare(delta_to(versions, 2))
    verb(engine, "apply", session)
    engine.weights.windows[HEAD].bits[2 * 32] ^= 1 << 20
    with pytest.raises(RefitError, match=f"{HEAD} does not hold what was written") as caught:
        verb(engine, "verify", session)
    assert caught.value.engine_state == "unknown"
    verb(engine, "rollback", session)
    assert bits_of_everything(engine) == before


def test_a_digest_that_is_not_the_versions_is_found_by_verify(world: Any) -> None:
    engine, versions = world
    full_to_1(engine, versions)
    engine.pause("keep").result(60)
    session, _ = engine.prepare(delta_to(versions, 2, digests={HEAD: "0" * 32}))
    verb(engine, "apply", session)
    with pytest.raises(RefitError, match=f"{HEAD} has digest"):
        verb(engine, "verify", session)
    verb(engine, "close", session)
    assert engine.identity.label == "v1"


def test_a_full_refit_is_verified_over_the_whole_tensor(world: Any) -> None:
    engine, versions = world
    engine.pause("keep").result(60)
    session, _ = engine.prepare(versions.order(versions.weights["default"], label="v1", version=1))
    verb(engine, "apply", session)
    engine.weights.windows[BODY].bits[5] ^= 1
    with pytest.raises(RefitError, match=f"{BODY} does not hold"):
        verb(engine, "verify", session)
    verb(engine, "rollback", session)


def test_a_rollback_that_fails_quarantines_until_a_full_refit(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, versions = world
    full_to_1(engine, versions)
    collector = Collector()
    with paused_at(collector, 2, engine):
        start(engine, PROMPT, collector, max_tokens=60)
    session, _ = engine.prepare(delta_to(versions, 2))
    verb(engine, "apply", session)
    with monkeypatch.context() as broken:
        broken.setattr(engine.weights, "restore", lambda _undo: (_ for _ in ()).throw(OSError("bus error")))
        with pytest.raises(RefitError, match="bus error") as caught:
            verb(engine, "rollback", session)
    assert caught.value.engine_state == "unknown"
    verb(engine, "close", session)
    assert engine.describe().quarantined
    assert collector.wait().finish_reason == "abort"
    engine.resume()
    with pytest.raises(Unavailable, match="quarantined"):
        start(engine, PROMPT)
    with pytest.raises(RefitError, match="quarantined") as caught:
        engine.prepare(delta_to(versions, 3))
    assert caught.value.engine_state == "unknown"
    engine.pause("keep").result(60)
    new = marker_weights(versions.weights["v1"], 6)
    session, _ = engine.prepare(versions.order(new, label="v6", version=6))
    for name in ("apply", "verify", "label", "close"):
        verb(engine, name, session)
    engine.resume()
    assert not engine.describe().quarantined
    assert run(engine, PROMPT).token_ids == (6,) * 8


def lean_order(versions: Versions, new: Any, names: tuple[str, ...], **changes: Any) -> Any:
    """A full refit whose file holds `names` only, with the digests of all tensors."""
    order = versions.order({name: new[name] for name in names}, label="v1", version=1)
    digests = {**digests_of(new), **changes}
    return msgspec.structs.replace(order, digests=digests)


def test_a_full_refit_may_leave_out_what_is_live_already(world: Any) -> None:
    engine, versions = world
    new = marker_weights(versions.weights["default"], 6)
    touched = tuple(n for n, a in new.items() if not np.array_equal(a, versions.weights["default"][n]))
    assert 0 < len(touched) < len(new)
    session, _ = engine.prepare(lean_order(versions, new, touched))
    engine.pause("keep").result(60)
    for name in ("apply", "verify", "label", "close"):
        verb(engine, name, session)
    engine.resume()
    assert engine.describe().version == 1
    live = engine.digests(None)[0]
    assert {name: live[name] for name in new} == digests_of(new)
    assert run(engine, PROMPT).token_ids == (6,) * 8


def test_a_full_refit_may_not_leave_out_what_is_not_live(world: Any) -> None:
    engine, versions = world
    old = versions.weights["default"]
    missing = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(RefitError, match=rf"{missing}: not in a full refit") as caught:
        engine.prepare(lean_order(versions, old, (), **{missing: "0" * 32}))
    assert caught.value.engine_state == "old"


def test_a_quarantined_engine_believes_no_digest(world: Any) -> None:
    engine, versions = world
    engine.call(lambda: engine.quarantine("for this test"))
    with pytest.raises(RefitError, match="not in a full refit"):
        engine.prepare(lean_order(versions, versions.weights["default"], ()))


# Silence.


@pytest.mark.parametrize("after", ["pause", "apply", "verify", "label"])
def test_a_holder_that_falls_silent_loses_the_session_and_the_engine_goes_on(
    world: Any, clock: Clock, after: str
) -> None:
    engine, versions = world
    full_to_1(engine, versions)
    collector = Collector()
    session, _ = engine.prepare(delta_to(versions, 2))
    with paused_at(collector, 3, engine):
        start(engine, PROMPT, collector, max_tokens=6)
    for name in ("apply", "verify", "label"):
        if after == "pause":
            break
        verb(engine, name, session)
        if name == after:
            break
    clock.now = 29.9
    assert engine.describe().session == session
    clock.now = 30.1
    assert engine.describe().session is None
    final = collector.wait()
    assert not engine.paused
    assert final.weight_versions == (
        spans(("v1", 0, 3), ("v2", 3, 6)) if after == "label" else spans(("v1", 0, 6))
    )
    with pytest.raises(ConflictError, match="no refit session"):
        verb(engine, "apply", session)


def test_a_pause_that_was_there_before_the_session_outlives_it(world: Any, clock: Clock) -> None:
    engine, versions = world
    full_to_1(engine, versions)
    engine.pause("keep").result(60)
    engine.prepare(delta_to(versions, 2))
    engine.pause("keep").result(60)
    clock.now = 31.0
    assert engine.describe().session is None
    assert engine.paused


def test_every_word_of_the_holder_counts(world: Any, clock: Clock) -> None:
    engine, versions = world
    full_to_1(engine, versions)
    session, _ = engine.prepare(delta_to(versions, 2))
    engine.pause("keep").result(60)
    for name in ("apply", "verify", "invalidate", "label"):
        clock.now += 29.0
        verb(engine, name, session)
    assert engine.describe().session == session


def test_the_engine_knows_the_folders_it_cannot_refit(models: Any, engines: Any, tmp_path: Path) -> None:
    """A tensor in the folder that the model does not have is no target, and a refit that names it says so."""
    folder = models("qwen3")
    extra = {
        **load_weights(folder),
        "model.layers.0.self_attn.rotary_emb.inv_freq": load_weights(folder)["model.norm.weight"],
    }
    copy = save_weights(folder, extra, tmp_path / "extra")
    engine = engines(copy)
    assert engine.weights.unproved == {"model.layers.0.self_attn.rotary_emb.inv_freq"}
    versions = Versions(copy, tmp_path)
    with pytest.raises(RefitError, match="inv_freq: is held in another form"):
        engine.prepare(versions.order(extra, label="v1", version=1))
