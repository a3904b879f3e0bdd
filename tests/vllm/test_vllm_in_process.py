"""The plugin on real vLLM models of several architectures, in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_weights import differing, nudged, read_folder, state
from vllm_driver import Driver
from vllm_models import loaded

from weightline import codec
from weightline.errors import ConflictError, IntegrityError, InvalidInput, RefitError
from weightline.plugins import sums

pytestmark = pytest.mark.vllm

ARCHITECTURES = [("qwen3", False), ("qwen3", True), ("llama", False), ("qwen3_moe", False)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("arch", "tie"), ARCHITECTURES)
def test_three_refits_equal_a_fresh_load_and_step_back(
    tiny: Callable[..., Path], runtime: Path, with_weights: Any, arch: str, tie: bool, dtype: str
) -> None:
    folder = tiny(arch, tie=tie)
    versions = [read_folder(folder)]
    for seed in (1, 2, 3):
        versions.append(nudged(versions[-1], seed))
    with loaded(folder, dtype=dtype) as live:
        refused = {p.name: p.refusal for p in live.engine.front.weights.places.values() if p.refusal}
        assert refused == {}
        pointers = {name: p.data_ptr() for name, p in live.model.named_parameters()}
        driver = Driver(live.engine, runtime)
        seen = [state(live.model)]
        driver.refit(codec.full(versions[1]), 1, None)
        seen.append(state(live.model))
        for number in (2, 3):
            driver.refit(codec.diff(versions[number - 1], versions[number]), number, number - 1)
            seen.append(state(live.model))
        assert {name: p.data_ptr() for name, p in live.model.named_parameters()} == pointers
        names = sorted(versions[3])
        found = driver.ask("digests", names=names)["digests"]
        assert found == {name: codec.digest_of(codec.bits_of(versions[3][name])) for name in names}
        session = driver.engine.front.refits.session.id
        assert driver.engine.front.refits.identity.version == 3
        driver.ask("rollback", session=session)
        assert differing(state(live.model), seen[2]) == []
        assert driver.engine.front.refits.identity.version == 2
        driver.ask("close", session=session)
        driver.refit(codec.diff(versions[2], versions[3]), 3, 2)
        assert differing(state(live.model), seen[3]) == []
    for number in (1, 3):
        with loaded(with_weights(folder, versions[number]), dtype=dtype) as fresh:
            assert differing(state(fresh.model), seen[number]) == []


@pytest.mark.soak
def test_smollm2_takes_three_refits(runtime: Path, with_weights: Any) -> None:
    """A real model; its folder is named by WEIGHTLINE_SMOLLM2."""
    folder = Path(os.environ["WEIGHTLINE_SMOLLM2"])
    versions = [read_folder(folder)]
    for seed in (1, 2, 3):
        versions.append(nudged(versions[-1], seed, 0.002))
    with loaded(folder) as live:
        driver = Driver(live.engine, runtime)
        driver.refit(codec.full(versions[1]), 1, None)
        for number in (2, 3):
            driver.refit(codec.diff(versions[number - 1], versions[number]), number, number - 1)
        seen = state(live.model)
    with loaded(with_weights(folder, versions[3])) as fresh:
        assert differing(state(fresh.model), seen) == []


def test_a_vocabulary_that_is_padded_keeps_its_padding(
    tiny: Callable[..., Path], runtime: Path, with_weights: Any
) -> None:
    folder = tiny("llama", vocab=500)
    new = nudged(read_folder(folder), 5)
    with loaded(folder) as live:
        before = live.model.lm_head.weight.detach().clone()
        assert before.shape[0] == 512
        Driver(live.engine, runtime).refit(codec.full(new), 1, None)
        assert torch.equal(live.model.lm_head.weight[500:], before[500:])
        assert torch.equal(live.model.lm_head.weight[:500], new["lm_head.weight"].float())


def test_every_misfit_is_listed_and_nothing_is_touched(tiny: Callable[..., Path], runtime: Path) -> None:
    folder = tiny("qwen3")
    weights = read_folder(folder)
    wrong = {
        "model.norm.weight": weights["model.norm.weight"][:-1],
        "model.layers.0.mlp.up_proj.weight": weights["model.layers.0.mlp.up_proj.weight"].double(),
        "model.layers.9.mlp.up_proj.weight": weights["model.layers.0.mlp.up_proj.weight"],
    }
    with loaded(folder) as live:
        before = state(live.model)
        driver = Driver(live.engine, runtime)
        with pytest.raises(RefitError) as caught:
            driver.prepare(codec.full({**weights, **wrong}), 1, None)
        assert caught.value.engine_state == "old"
        assert caught.value.message.startswith("3 tensors cannot be written")
        assert all(name in caught.value.message for name in wrong)
        assert "cannot hold it exactly" in caught.value.message
        assert differing(before, state(live.model)) == []
        assert live.engine.front.refits.session is None


def test_a_failure_between_two_writes_puts_the_old_bits_back(
    tiny: Callable[..., Path], runtime: Path
) -> None:
    folder = tiny("qwen3", tie=True)
    new = nudged(read_folder(folder), 1)
    with loaded(folder) as live:
        before = state(live.model)
        driver = Driver(live.engine, runtime)
        refits = live.engine.front.refits

        def fault(where: str) -> None:
            if where == "apply:7":
                raise OSError("injected")

        refits.fault = fault
        session = driver.prepare(codec.full(new), 1, None)["session"]
        live.engine.start_weight_update()
        with pytest.raises(RefitError, match="injected") as caught:
            driver.ask("apply", update=True, session=session)
        assert caught.value.engine_state == "old"
        live.engine.finish_weight_update()
        assert differing(before, state(live.model)) == []
        assert (refits.identity.version, refits.quarantined) == (None, "")
        driver.ask("close", session=session)
        refits.fault = lambda _where: None
        driver.refit(codec.full(new), 1, None)
        assert refits.identity.version == 1


def test_ending_vllms_session_without_apply_commits_nothing(tiny: Callable[..., Path], runtime: Path) -> None:
    folder = tiny("qwen3")
    with loaded(folder) as live:
        driver = Driver(live.engine, runtime)
        driver.prepare(codec.full(nudged(read_folder(folder), 1)), 1, None)
        live.engine.start_weight_update()
        live.engine.finish_weight_update()
        assert live.engine.front.refits.identity.version is None


def test_closing_an_applied_session_takes_it_back(tiny: Callable[..., Path], runtime: Path) -> None:
    folder = tiny("qwen3")
    with loaded(folder) as live:
        before = state(live.model)
        driver = Driver(live.engine, runtime)
        session = driver.prepare(codec.full(nudged(read_folder(folder), 1)), 1, None)["session"]
        live.engine.start_weight_update()
        driver.ask("apply", update=True, session=session)
        assert differing(before, state(live.model)) != []
        driver.ask("close", session=session)
        live.engine.finish_weight_update()
        assert differing(before, state(live.model)) == []
        assert live.engine.front.refits.identity.version is None


def test_a_second_follower_waits_and_a_wrong_base_is_refused(
    tiny: Callable[..., Path], runtime: Path
) -> None:
    folder = tiny("qwen3")
    weights = read_folder(folder)
    new = nudged(weights, 1)
    with loaded(folder) as live:
        first, second = Driver(live.engine, runtime), Driver(live.engine, runtime, "follower-2")
        first.prepare(codec.full(new), 1, None)
        with pytest.raises(ConflictError, match="held by follower-1"):
            second.prepare(codec.full(new), 1, None)
        now = live.engine.front.refits.clock()
        live.engine.front.refits.clock = lambda: now + 31.0
        second.refit(codec.full(new), 1, None)
        with pytest.raises(RefitError, match="the delta is against version 7"):
            second.prepare(codec.diff(weights, new), 8, 7)


def test_bytes_that_changed_behind_every_refit_are_noticed(tiny: Callable[..., Path], runtime: Path) -> None:
    folder = tiny("llama")
    versions = [read_folder(folder)]
    versions += [nudged(versions[0], 1)]
    versions += [nudged(versions[1], 2)]
    with loaded(folder) as live:
        driver = Driver(live.engine, runtime)
        driver.refit(codec.full(versions[1]), 1, None)
        with torch.no_grad():
            live.model.model.norm.weight.add_(1.0)
        with pytest.raises(RefitError, match=r"model\.norm\.weight: after this refit its digest would be"):
            driver.prepare(codec.diff(versions[1], versions[2]), 2, 1)
        driver.refit(codec.full(versions[2]), 2, None)
        name = "model.norm.weight"
        digest = codec.digest_of(codec.bits_of(versions[2][name]))
        assert driver.ask("digests", names=[name])["digests"] == {name: digest}


def test_the_rotating_check_quarantines_an_engine_whose_bytes_rot(
    tiny: Callable[..., Path], runtime: Path
) -> None:
    folder = tiny("llama")
    new = nudged(read_folder(folder), 1)
    with loaded(folder) as live:
        driver = Driver(live.engine, runtime)
        driver.ask("close", session=driver.refit(codec.full(new), 1, None))
        with torch.no_grad():
            live.model.model.norm.weight.add_(1.0)
        for _ in range(len(new)):
            live.engine.front.rotate()
        assert "model.norm.weight" in live.engine.front.refits.quarantined
        driver.ask("close", session=driver.refit(codec.full(new), 1, None))
        assert live.engine.front.refits.quarantined == ""


def test_a_damaged_refit_file_is_refused(tiny: Callable[..., Path], runtime: Path) -> None:
    folder = tiny("qwen3")
    with loaded(folder) as live:
        driver = Driver(live.engine, runtime)
        path, sha256 = driver.file(codec.full(read_folder(folder)))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(IntegrityError, match="not those that the follower wrote"):
            driver.ask(
                "prepare",
                file=str(path),
                sha256=sha256,
                run="r",
                version=1,
                label="1@x",
                have=None,
                holder="f",
            )
        assert live.engine.front.refits.session is None


def test_without_the_trap_packed_modules_are_found_and_refused(
    tiny: Callable[..., Path], runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own behaviour, oneDNN packing on: linears are emptied, and the tied head is stale in silence."""
    import vllm._custom_ops as ops

    monkeypatch.setattr(ops, "_supports_onednn", True)
    folder = tiny("qwen3", tie=True)
    with loaded(folder) as live:
        places = live.engine.front.weights.places
        reason = places["model.embed_tokens.weight"].refusal
        assert "ParallelLMHead does not compute with its live weight" in reason
        linears = [n for n in places if ".mlp." in n or n.endswith(("q_proj.weight", "o_proj.weight"))]
        packed = read_folder(folder).keys() - places.keys()
        assert all(name in packed or places[name].refusal for name in read_folder(folder) if "proj" in name)
        assert linears or packed
        with pytest.raises(RefitError, match="cannot be written"):
            Driver(live.engine, runtime).prepare(codec.full(nudged(read_folder(folder), 1)), 1, None)


def test_other_backends_see_the_packing_they_saw_before(tiny: Callable[..., Path]) -> None:
    with loaded(tiny("qwen3"), backend=None) as live:
        emptied = [
            m for m in live.model.modules() if getattr(getattr(m, "weight", None), "shape", None) == (0,)
        ]
        assert emptied


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_the_digest_is_the_codecs(width: int) -> None:
    rng = np.random.default_rng(width)
    bits = rng.integers(0, 1 << (8 * width - 1), 100_003, dtype=f"u{width}")
    assert sums.render(sums.of_range(bits, 0)) == codec.digest_of(bits)
    assert sums.render(sums.of_range(bits, 12345)) == codec.digest_of(bits, start=12345)
    index = np.sort(rng.choice(1 << 40, 5000, replace=False).astype(np.int64))
    assert sums.render(sums.of_elements(index, bits[:5000])) == codec.digest_at(index, bits[:5000])
    assert sums.parse(codec.digest_of(bits)) == sums.of_range(bits, 0)
    halves = sums.add(sums.of_range(bits[:777], 0), sums.of_range(bits[777:], 777))
    assert sums.render(halves) == codec.digest_of(bits)


def test_several_engines_behind_one_url_are_told_apart_and_refused(tiny: Callable[..., Path]) -> None:
    """A load balancer in front of two engines: some calls would reach one and some the other."""
    import httpx

    from weightline.rollout.engines.vllm import VllmEngine

    with loaded(tiny("qwen3")) as first, loaded(tiny("llama")) as second:
        engines, turn = [first.engine, second.engine], [0]

        def balance(request: httpx.Request) -> httpx.Response:
            if request.url.path == "/weight_info":
                return httpx.Response(200, json={"weight_version": "default"})
            if request.url.path == "/is_paused":
                return httpx.Response(200, json={"is_paused": False})
            engine, body = engines[turn[0] % 2], json.loads(request.content)
            engine.front.weights.proved.wait()
            engine.init_transfer_engine(engine.parse_init_info(body["init_info"]))
            return httpx.Response(200, json={})

        port = VllmEngine("http://balanced", holder="f", transport=httpx.MockTransport(balance))
        try:
            seen = port.describe().instance
            turn[0] = 1
            assert port.describe().instance != seen
            turn[0] = 2
            with pytest.raises(InvalidInput, match="several engines answer there in turn"):
                port.describe()
        finally:
            port.close()
