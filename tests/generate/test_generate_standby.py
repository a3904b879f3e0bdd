"""The two ways of a refit, in place and standby: the same bits, the same way back, no more than one step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generate_world import (
    EMBED,
    HEAD,
    Collector,
    Versions,
    Weights,
    digests_of,
    load_weights,
    marker_weights,
    open_engine,
    reference_model,
    reference_tokens,
    run,
    save_weights,
    spans,
    start,
)

from weightline import codec
from weightline.errors import RefitError

pytestmark = pytest.mark.torch

PROMPT = [5, 9, 2, 44, 61]
ALWAYS, NEVER = 0, 10**12
WAYS = {"in_place": NEVER, "standby": ALWAYS}


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def world(models: Any, engines: Any, tmp_path: Path) -> tuple[Any, Versions]:
    folder = models("qwen3", marker=True)
    return engines(folder), Versions(folder, tmp_path)


def verb(engine: Any, name: str, session: str, **arguments: Any) -> Any:
    return engine.call(lambda: getattr(engine.refits, name)(session, **arguments))


def live_bits(engine: Any) -> dict[str, bytes]:
    return {name: window.bits.tobytes() for name, window in engine.weights.windows.items()}


def scattered(weights: Weights, seed: int, *, share: float = 0.05) -> Weights:
    """Some low bits of every tensor flipped."""
    rng = np.random.default_rng(seed)
    new = {}
    for name, array in weights.items():
        bits = codec.bits_of(array).copy()
        bits[rng.choice(bits.size, max(1, int(bits.size * share)), replace=False)] ^= 1
        new[name] = codec.from_bits(bits, codec.spec_of(name, array))
    return new


def switched(engine: Any, versions: Versions, new: Weights, version: int, **changes: Any) -> Any:
    """One refit by `switch`, labelled `v<version>`; the facts of its session."""
    live = engine.identity
    base = None if live.version is None else (live.version, live.label)
    session, _ = engine.prepare(
        versions.order(new, label=f"v{version}", version=version, base=base, **changes)
    )
    verb(engine, "switch", session)
    facts = verb(engine, "facts", session)
    verb(engine, "close", session)
    return facts


# The same bits.


@pytest.mark.parametrize(
    ("arch", "tie"),
    [("llama", True), ("qwen2", True), ("qwen3", False), ("qwen3_moe", False)],
)
def test_the_kth_refit_equals_a_fresh_load_whichever_way_it_went(
    arch: str, tie: bool, models: Any, engines: Any, tmp_path: Path
) -> None:
    folder = models(arch, tie=tie)
    engine, versions = engines(folder), Versions(folder, tmp_path)
    objects = {n: id(p) for n, p in engine.model.module.named_parameters(remove_duplicate=False)}
    weights = versions.weights["default"]
    for k, way in enumerate(("standby", "in_place", "standby", "standby"), 1):
        engine.refits.standby_from = WAYS[way]
        # 1: full; 2 and 3: sparse; 4: whole again, so that a storage is built without copying the old one.
        weights = scattered(weights, k, share=1.0 if k == 4 else 0.05)
        facts = switched(engine, versions, weights, k)
        assert facts["path"] == way
        assert (facts["standby_bytes"] > 0) == (way == "standby")
        fresh = save_weights(folder, weights, tmp_path / f"fresh{k}")
        assert live_bits(engine) == live_bits(open_engine(fresh))
        model = reference_model(fresh)
        assert list(run(engine, PROMPT, max_tokens=12).token_ids) == reference_tokens(model, PROMPT, 12)
        for name, buffer in model.named_buffers():  # rope tables and the like are derived, not weights
            assert engine.model.module.get_buffer(name).equal(buffer), name
        assert engine.digests()[0].items() >= digests_of(weights).items()
    assert objects == {n: id(p) for n, p in engine.model.module.named_parameters(remove_duplicate=False)}


def test_a_standby_delta_that_names_only_the_embedding_moves_the_tied_head(
    models: Any, engines: Any, tmp_path: Path
) -> None:
    folder = models("llama", tie=True, marker=True)
    engine, versions = engines(folder), Versions(folder, tmp_path)
    engine.refits.standby_from = ALWAYS
    switched(engine, versions, versions.weights["default"], 1)
    facts = switched(engine, versions, marker_weights(versions.weights["default"], 5), 5)
    assert facts["standby_bytes"] == versions.weights["default"][EMBED].size * 4, (
        "the tied storage, once, fp32"
    )
    assert run(engine, PROMPT).token_ids == (5,) * 8
    module = engine.model.module
    assert module.lm_head.weight.data_ptr() == module.model.embed_tokens.weight.data_ptr()


def test_one_expert_of_a_fused_tensor_may_go_by_standby(models: Any, engines: Any, tmp_path: Path) -> None:
    folder = models("qwen3_moe")
    engine, versions = engines(folder), Versions(folder, tmp_path)
    engine.refits.standby_from = ALWAYS
    weights = versions.weights["default"]
    switched(engine, versions, weights, 1)
    name = next(n for n in sorted(weights) if "experts" in n)
    window = engine.weights.windows[name]
    assert window.size < window.storage.memory.bits.size, "a part of a fused tensor"
    new = {**weights, name: scattered({name: weights[name]}, 2)[name]}
    assert switched(engine, versions, new, 2)["standby_bytes"] == window.storage.nbytes
    assert live_bits(engine) == live_bits(open_engine(save_weights(folder, new, tmp_path / "fresh")))


# No pause beyond one step.


def test_a_switch_comes_between_two_steps_of_running_requests(world: Any, way: str) -> None:
    engine, versions = world
    engine.refits.standby_from = WAYS[way]
    switched(engine, versions, versions.weights["default"], 1)
    order = versions.order(marker_weights(versions.weights["v1"], 7), label="v7", version=7, base=(1, "v1"))
    session, _ = engine.prepare(order)
    collectors = [Collector() for _ in range(3)]
    seen: list[tuple[str, int]] = []

    def switch() -> None:  # on the engine thread, within a step: it is carried out right after this step
        engine.post(lambda: engine.refits.switch(session)).add_done_callback(
            lambda f: seen.append((f.result().label, engine.stepper.steps))
        )
        seen.append(("asked", engine.stepper.steps))

    collectors[0].on_tokens[10] = switch
    for collector in collectors:
        start(engine, PROMPT, collector, max_tokens=30)
    for collector in collectors:
        final = collector.wait()
        at = final.weight_versions[0].end
        assert final.weight_versions == spans(("v1", 0, at), ("v7", at, 30))
        assert final.token_ids == (0,) * at + (7,) * (30 - at)
        assert final.kv_recomputed_at == ()
    assert seen == [("asked", seen[0][1]), ("v7", seen[0][1])], "no step between, and none skipped"
    assert collectors[0].finals[0].weight_versions[0].end == 10
    assert not engine.paused


def test_a_switch_that_clears_the_cache_has_running_requests_recompute(world: Any, way: str) -> None:
    engine, versions = world
    engine.refits.standby_from = WAYS[way]
    switched(engine, versions, versions.weights["default"], 1)
    order = versions.order(marker_weights(versions.weights["v1"], 7), label="v7", version=7, base=(1, "v1"))
    session, _ = engine.prepare(order)
    collector = Collector()
    collector.on_tokens[4] = lambda: engine.post(lambda: engine.refits.switch(session, clear_cache=True))
    final = start(engine, PROMPT, collector, max_tokens=9).wait()
    assert final.weight_versions == spans(("v1", 0, 4), ("v7", 4, 9))
    assert final.kv_recomputed_at == (4,)
    assert final.kv_weight_versions == spans(("v7", 0, len(PROMPT) + 8))


def test_no_prefix_of_the_old_weights_is_found_after_a_switch(
    models: Any, engines: Any, tmp_path: Path, way: str
) -> None:
    folder = models("qwen3", marker=True)
    engine, versions = engines(folder), Versions(folder, tmp_path)
    engine.refits.standby_from = WAYS[way]
    switched(engine, versions, versions.weights["default"], 1)
    prompt = [(7 * i) % 90 for i in range(40)]
    assert [run(engine, prompt).cached_tokens for _ in range(2)] == [0, 32]
    switched(engine, versions, marker_weights(versions.weights["v1"], 7), 2)
    after = run(engine, prompt)
    assert (after.cached_tokens, after.token_ids) == (0, (7,) * 8)
    assert after.kv_weight_versions == spans(("v2", 0, len(prompt) + 7))


def test_a_switch_of_a_paused_engine_leaves_it_paused_and_may_be_asked_twice(world: Any, way: str) -> None:
    engine, versions = world
    engine.refits.standby_from = WAYS[way]
    session, _ = engine.prepare(versions.order(versions.weights["default"], label="v1", version=1))
    engine.pause("keep").result(60)
    assert verb(engine, "switch", session) == verb(engine, "switch", session)
    assert engine.paused
    engine.resume()
    assert run(engine, PROMPT).weight_versions == spans(("v1", 0, 8))


# Memory.


def test_the_old_set_is_held_until_the_session_closes_and_no_longer(world: Any) -> None:
    engine, versions = world
    engine.refits.standby_from = ALWAYS
    storage = engine.weights.windows[HEAD].storage
    old = weakref.ref(storage.memory.values.untyped_storage())
    memories = weakref.ref(storage.memory.values)
    session, _ = engine.prepare(versions.order(versions.weights["default"], label="v1", version=1))
    verb(engine, "switch", session)
    gc.collect()
    assert memories() is not None
    total = sum({w.owner: w.storage.nbytes for w in engine.weights.windows.values()}.values())
    assert verb(engine, "facts", session)["standby_bytes"] == total
    verb(engine, "close", session)
    gc.collect()
    assert memories() is None
    assert old() is None


@pytest.mark.parametrize("what", ["full", "fails", "shared"])
def test_without_room_for_a_second_set_the_refit_goes_in_place_and_says_why(
    what: str, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, versions = world
    engine.refits.standby_from = ALWAYS
    from weightline.generate import change
    from weightline.generate.weights import Storage

    if what == "full":
        monkeypatch.setattr(change, "free_memory", lambda: 1000)
    elif what == "fails":
        monkeypatch.setattr(Storage, "fresh", raising(MemoryError("refused"), nth=3, around=Storage.fresh))
    else:
        monkeypatch.setattr(Storage, "alone", False)
    new = marker_weights(versions.weights["default"], 3)
    facts = switched(engine, versions, new, 1)
    assert (facts["path"], facts["standby_bytes"]) == ("in_place", 0)
    assert {"full": "does not fit", "fails": "refused", "shared": "one allocation"}[what] in facts["why"]
    assert run(engine, PROMPT).token_ids == (3,) * 8


# The way back.


def raising(error: Exception, *, nth: int, around: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """`around` (a method), which raises at its `nth` call."""
    calls = []

    def act(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == nth:
            raise error
        return around(*args, **kwargs) if around else None

    return act


def spoil(engine: Any, versions: Versions, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Have one step of the next refit fail."""
    from weightline.generate import change, refit

    weights = engine.weights
    if step.startswith("write"):
        monkeypatch.setattr(weights, "write", raising(OSError(step), nth=int(step[5:]), around=weights.write))
    elif step.startswith("put"):
        monkeypatch.setattr(change, "put", raising(OSError(step), nth=int(step[3:]), around=change.put))
    elif step.startswith("exchange"):
        exchange = raising(OSError(step), nth=int(step[8:]), around=weights.exchange)
        monkeypatch.setattr(weights, "exchange", exchange)
    elif step == "half a storage":
        use, met = change.Storage.use, []

        def half(storage: Any, memory: Any) -> None:
            if not met:
                met.append(storage)
                storage.tensors[0].data = memory.values
                raise OSError(step)
            use(storage, memory)

        monkeypatch.setattr(change.Storage, "use", half)
    elif step == "read back":
        monkeypatch.setattr(change, "proved", lambda *_: None)
    elif step == "not used":
        monkeypatch.setattr(change.Standby, "verify", lambda _: ["it is not used"])
    elif step == "decode":
        monkeypatch.setattr(refit, "make_plan", raising(RefitError("decode", engine_state="old"), nth=1))
    else:
        assert step == "label"
        monkeypatch.setattr(engine, "weights_changed", raising(RefitError(step, engine_state="old"), nth=1))


STEPS = {
    "in_place": ["decode", "write1", "write7", "write20", "read back", "digest"],
    "standby": ["decode", "put1", "put20", "exchange1", "exchange7", "half a storage", "not used",
                "read back", "digest"],
}  # fmt: skip


def at_once(engine: Any, prompts: list[list[int]]) -> list[Collector]:
    """Sampled requests that share every step, so that two runs of them are equal to the last bit."""
    engine.pause("keep", clear_cache=False).result(60)
    found = [
        start(engine, p, max_tokens=60, logprobs=0, seed=3, temperature=1.0, request_id=str(i))
        for i, p in enumerate(prompts)
    ]
    engine.resume()
    return found


@pytest.mark.parametrize(("way", "step"), [(w, s) for w, steps in STEPS.items() for s in steps])
def test_a_failed_refit_leaves_weights_label_requests_and_their_tokens_as_before(
    way: str, step: str, models: Any, engines: Any, tmp_path: Path
) -> None:
    folder = models("qwen3", tie=True)
    engine, versions = engines(folder), Versions(folder, tmp_path)
    switched(engine, versions, versions.weights["default"], 1)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
    undisturbed = [collector.wait() for collector in at_once(engine, prompts)]
    before, carried = live_bits(engine), dict(engine.weights.carried)
    engine.refits.standby_from = WAYS[way]
    new = scattered(versions.weights["v1"], 9)
    wrong = {n: d for n, d in digests_of(new).items() if n != EMBED} | {EMBED: "0" * 32}
    order = versions.order(
        new, label="v2", version=2, base=(1, "v1"), **({"digests": wrong} if step == "digest" else {})
    )
    collectors = at_once(engine, prompts)
    with pytest.MonkeyPatch.context() as broken, pytest.raises(RefitError) as caught:  # noqa: PT012
        if step != "digest":
            spoil(engine, versions, broken, step)
        session, _ = engine.prepare(order)
        verb(engine, "switch", session)
    assert caught.value.engine_state == "old"
    assert live_bits(engine) == before
    assert engine.weights.carried == carried
    assert engine.identity.label == "v1"
    assert not engine.paused
    assert not engine.quarantined
    for collector, wanted in zip(collectors, undisturbed, strict=True):
        final = collector.wait()
        assert final.token_ids == wanted.token_ids
        assert final.logprobs == wanted.logprobs
        assert final.weight_versions == wanted.weight_versions
        assert final.kv_weight_versions == wanted.kv_weight_versions
    if engine.refits.session is not None:
        verb(engine, "close", engine.refits.session.id)
    engine.refits.standby_from = WAYS[way]
    switched(engine, versions, new, 2)  # and the engine takes the version when nothing fails
    fresh = save_weights(folder, new, tmp_path / "fresh")
    assert live_bits(engine) == live_bits(open_engine(fresh))


@pytest.mark.parametrize("after", ["prepare", "apply", "verify", "label"])
def test_rollback_of_a_standby_set_brings_back_the_very_tensors(after: str, world: Any) -> None:
    engine, versions = world
    engine.refits.standby_from = ALWAYS
    switched(engine, versions, versions.weights["default"], 1)
    before = {n: w.bits.ctypes.data for n, w in engine.weights.windows.items()}
    new = scattered(versions.weights["v1"], 4)
    session, _ = engine.prepare(versions.order(new, label="v2", version=2, base=(1, "v1")))
    engine.pause("keep").result(60)
    for name in ("apply", "verify", "label")[: ("prepare", "apply", "verify", "label").index(after)]:
        verb(engine, name, session)
    verb(engine, "rollback", session)
    verb(engine, "rollback", session)
    verb(engine, "close", session)
    engine.resume()
    assert {n: w.bits.ctypes.data for n, w in engine.weights.windows.items()} == before
    assert run(engine, PROMPT).token_ids == (0,) * 8
    assert engine.identity.label == "v1"


def test_a_standby_set_that_cannot_be_taken_back_quarantines(world: Any) -> None:
    engine, versions = world
    engine.refits.standby_from = ALWAYS
    switched(engine, versions, versions.weights["default"], 1)
    new = scattered(versions.weights["v1"], 4)
    session, _ = engine.prepare(versions.order(new, label="v2", version=2, base=(1, "v1")))
    engine.pause("keep").result(60)
    verb(engine, "apply", session)
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(engine.weights, "exchange", raising(OSError("bus error"), nth=1))
        with pytest.raises(RefitError, match="bus error") as caught:
            verb(engine, "rollback", session)
    assert caught.value.engine_state == "unknown"
    verb(engine, "close", session)
    assert engine.describe().quarantined
    full = versions.order(marker_weights(versions.weights["v1"], 6), label="v6", version=6)
    session, _ = engine.prepare(full)
    verb(engine, "switch", session)
    engine.resume()
    assert run(engine, PROMPT).token_ids == (6,) * 8


def test_a_standby_set_of_weights_that_moved_is_refused(world: Any) -> None:
    engine, versions = world
    engine.refits.standby_from = ALWAYS
    session, _ = engine.prepare(versions.order(versions.weights["default"], label="v1", version=1))
    window = engine.weights.windows[HEAD]
    engine.call(lambda: engine.weights.write(window, None, window.bits.copy(), window.dtype))
    with pytest.raises(RefitError, match="changed while the standby set was built") as caught:
        verb(engine, "switch", session)
    assert caught.value.engine_state == "old"
    assert run(engine, PROMPT).weight_versions == spans(("default", 0, 8))


def test_the_size_of_a_refit_chooses_the_way(world: Any) -> None:
    engine, versions = world
    elements = sum(a.size for a in load_weights(engine.model.folder).values())
    engine.refits.standby_from = elements
    assert switched(engine, versions, versions.weights["default"], 1)["path"] == "standby"
    assert switched(engine, versions, marker_weights(versions.weights["v1"], 2), 2)["path"] == "in_place"
