"""Modules that process their weights after loading: whole, through vLLM's own loaders, in this process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from real_weights import differing, nudged, read_folder, state
from vllm_driver import Driver
from vllm_models import Loaded, loaded

from weightline import codec
from weightline.errors import IntegrityError, RefitError

pytestmark = pytest.mark.vllm


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN packing as vLLM does it by itself: linears are emptied, a tied head keeps a stale copy."""
    import vllm._custom_ops as ops

    from weightline.plugins.vllm import register

    register()  # else the first engine of this process takes the trap out of the way again
    monkeypatch.setattr(ops, "_supports_onednn", True)


def answers(live: Loaded) -> dict[str, torch.Tensor]:
    """What every linear, head and embedding answers to one input: all that can be seen of a packed one."""
    found = {}
    with torch.no_grad():
        for path, module in live.model.named_modules():
            method = getattr(module, "quant_method", None)
            width = getattr(module, "input_size_per_partition", getattr(module, "embedding_dim", None))
            if not hasattr(method, "apply") or width is None:
                continue
            x = torch.linspace(-1, 1, width).to(live.model.lm_head.weight.dtype)[None]
            found[path] = method.apply(module, x, getattr(module, "bias", None)).clone()
            if hasattr(method, "embedding") and "embed" in path:
                found[path] = method.embedding(module, torch.tensor([1, 2, 3])).clone()
            for name in ("W_UK_T", "W_UV"):
                if hasattr(module, name):
                    found[f"{path}.{name}"] = getattr(module, name).clone()
        for path, module in live.model.named_modules():
            for name in ("W_UK_T", "W_UV"):
                if isinstance(getattr(module, name, None), torch.Tensor):
                    found[f"{path}.{name}"] = getattr(module, name).clone()
    return found


class Whole(Driver):
    """A driver that hands over what goes with whole modules as a replica would: one file a tensor."""

    def order(
        self,
        old: dict[str, torch.Tensor] | None,
        new: dict[str, torch.Tensor],
        *,
        leave_out: str = "",
    ) -> tuple[codec.Delta, list[dict[str, Any]]]:
        groups = self.ask("hello", tensors=True)["groups"]
        plain = {name: tensor for name, tensor in new.items() if name not in groups}
        delta = codec.full(plain) if old is None else codec.diff({n: old[n] for n in plain}, plain)
        entries = []
        for name in sorted(groups.keys() & new.keys() - {leave_out}):
            spec, bits = codec.spec_of(name, new[name]), codec.bits_of(new[name])
            entry = {"name": name, "dtype": spec.dtype, "shape": list(spec.shape), "old_path": None}
            entry |= {"digest": codec.digest_of(bits), "path": self._written(bits), "old_digest": None}
            if old is not None:
                before = codec.bits_of(old[name])
                entry |= {"old_path": self._written(before), "old_digest": codec.digest_of(before)}
            entries.append(entry)
        return delta, entries

    def _written(self, bits: Any) -> str:
        path = self.runtime / f"{codec.digest_of(bits)}.bits"
        path.write_bytes(bits.tobytes())
        return str(path)

    def move(self, old: dict[str, torch.Tensor] | None, new: dict[str, torch.Tensor], version: int) -> str:
        delta, entries = self.order(old, new)
        have = None if old is None else version - 1
        answer = self.prepare(delta, version, have, whole=entries)
        assert answer["verified"] == ("loader_input" if entries else "live")
        self.engine.start_weight_update()
        self.ask("apply", update=True, session=answer["session"])
        self.engine.finish_weight_update()
        return str(answer["session"])


def versions_of(folder: Path, count: int = 3) -> list[dict[str, torch.Tensor]]:
    versions = [read_folder(folder)]
    for seed in range(1, count + 1):
        versions.append(nudged(versions[-1], seed))
    return versions


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize(("arch", "tie"), [("qwen3", True), ("llama", False)])
def test_packed_linears_and_a_tied_head_take_three_versions_and_step_back(
    tiny: Callable[..., Path], runtime: Path, with_weights: Any, arch: str, tie: bool
) -> None:
    folder = tiny(arch, tie=tie)
    versions = versions_of(folder)
    with loaded(folder) as live:
        live.engine.front.weights.proved.wait()
        places = live.engine.front.weights.places
        assert {n: p.refusal for n, p in places.items() if p.refusal and p.group is None} == {}
        assert set(places) == set(versions[0])
        emptied = [
            p for p, m in live.model.named_modules() if getattr(m, "weight", torch.ones(1)).numel() == 0
        ]
        assert emptied
        driver, seen = Whole(live.engine, runtime), [answers(live)]
        for number in (1, 2, 3):
            old = None if number == 1 else versions[number - 1]
            session = driver.move(old, versions[number], number)
            seen.append(answers(live))
        driver.ask("rollback", session=session)
        assert differing(answers(live), seen[2]) == []
        driver.ask("close", session=session)
        if tie:  # as a trainer commits it that does not know of the tie: under both names
            versions = [{**v, "lm_head.weight": v["model.embed_tokens.weight"]} for v in versions]
        driver.move(versions[2], versions[3], 3)
        assert differing(answers(live), seen[3]) == []
        still = [p for p, m in live.model.named_modules() if getattr(m, "weight", torch.ones(1)).numel() == 0]
        assert still == emptied
    for number in (0, 1, 3):
        versions[number].pop("lm_head.weight" if tie else "", None)
        with loaded(with_weights(folder, versions[number])) as fresh:
            assert differing(answers(fresh), seen[number]) == []


def mla_folder(tiny: Callable[..., Path], folder: Path) -> Path:
    """A DeepSeek-style model: its attention computes with products of kv_b_proj made after loading."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=64,
        qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, moe_intermediate_size=64, first_k_dense_replace=2, max_position_embeddings=512,
        topk_method="greedy", n_group=1, topk_group=1,
    )  # fmt: skip
    torch.manual_seed(0)
    DeepseekV2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for path in tiny("qwen3").iterdir():
        if path.name.startswith(("tok", "chat")):
            shutil.copy(path, folder)
    return folder


def test_absorbed_mla_is_made_anew_from_whole_modules(
    tiny: Callable[..., Path], runtime: Path, with_weights: Any, tmp_path: Path
) -> None:
    folder = mla_folder(tiny, tmp_path / "mla")
    versions = versions_of(folder, 2)
    with loaded(folder, dtype="bfloat16") as live:
        live.engine.front.weights.proved.wait()
        places = live.engine.front.weights.places
        assert {n: p.refusal for n, p in places.items() if p.refusal and p.group is None} == {}
        whole = {name for name, place in places.items() if place.group is not None}
        assert {f"model.layers.{k}.self_attn.kv_b_proj.weight" for k in (0, 1)} <= whole < set(places)
        driver = Whole(live.engine, runtime)
        with pytest.raises(RefitError, match=r"kv_b_proj\.weight \(MLAAttention"):
            driver.prepare(codec.full(versions[1]), 1, None)
        first = answers(live)
        assert any(name.endswith("W_UK_T") for name in first)
        driver.move(None, versions[1], 1)
        driver.ask("close", session=driver.move(versions[1], versions[2], 2))
        seen, bits = answers(live), state(live.model)
    with loaded(with_weights(folder, versions[2]), dtype="bfloat16") as fresh:
        assert differing(answers(fresh), seen) == []
        assert differing(state(fresh.model), bits) == []


@pytest.mark.usefixtures("packing")
def test_half_a_fused_module_is_refused_by_the_name_that_is_missing(
    tiny: Callable[..., Path], runtime: Path
) -> None:
    folder = tiny("llama")
    versions = versions_of(folder, 1)
    with loaded(folder) as live:
        before, driver = answers(live), Whole(live.engine, runtime)
        live.engine.front.weights.proved.wait()
        missing = "model.layers.0.self_attn.k_proj.weight"
        delta, entries = driver.order(None, versions[1], leave_out=missing)
        with pytest.raises(RefitError, match=r"1 tensors cannot be loaded: .*k_proj.*missing: it goes with"):
            driver.prepare(delta, 1, None, whole=entries)
        with pytest.raises(RefitError, match="a full refit without"):
            driver.prepare(delta, 1, None)
        assert differing(before, answers(live)) == []


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("moment", ["before", "between two modules", "wrong answer"])
def test_a_load_that_fails_is_undone_from_the_version_before(
    tiny: Callable[..., Path], runtime: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny("qwen3", tie=True)
    versions = versions_of(folder, 2)
    with loaded(folder) as live:
        live.engine.front.weights.proved.wait()
        driver, refits = Whole(live.engine, runtime), live.engine.front.refits
        driver.ask("close", session=driver.move(None, versions[1], 1))
        before = answers(live)
        delta, entries = driver.order(versions[1], versions[2])
        session = driver.prepare(delta, 2, 1, whole=entries)["session"]
        _fail_once(live, refits, moment, monkeypatch)
        live.engine.start_weight_update()
        with pytest.raises(RefitError) as caught:
            driver.ask("apply", update=True, session=session)
        assert caught.value.engine_state == "old"
        live.engine.finish_weight_update()
        assert (refits.identity.version, refits.quarantined) == (1, "")
        assert differing(before, answers(live)) == []
        driver.ask("close", session=session)
        driver.move(versions[1], versions[2], 2)
        assert refits.identity.version == 2


def _fail_once(live: Loaded, refits: Any, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    failed: list[int] = []
    model = live.model

    def fault(where: str) -> None:
        if where == "apply:whole" and not failed:
            failed.append(1)
            raise OSError("injected")

    load = model.load_weights

    def broken(weights: Any) -> Any:
        if failed:
            return load(weights)
        failed.append(1)
        given = list(weights)
        load(given[: len(given) // 2])
        raise OSError("injected")

    process = UnquantizedLinearMethod.process_weights_after_loading

    def stale(self: Any, layer: Any) -> None:
        if not failed:
            failed.append(1)
            layer.weight.data.neg_()
        process(self, layer)

    if moment == "before":
        refits.fault = fault
    elif moment == "wrong answer":  # every loader is content, one module computes with something else
        monkeypatch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", stale)
    else:
        monkeypatch.setattr(model, "load_weights", broken)


@pytest.mark.usefixtures("packing")
def test_without_the_weights_of_before_a_failed_load_quarantines_and_a_full_one_heals(
    tiny: Callable[..., Path], runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny("llama")
    versions = versions_of(folder, 2)
    with loaded(folder) as live:
        live.engine.front.weights.proved.wait()
        driver, refits = Whole(live.engine, runtime), live.engine.front.refits
        driver.ask("close", session=driver.move(None, versions[1], 1))
        delta, entries = driver.order(None, versions[2])
        session = driver.prepare(delta, 2, None, whole=entries)["session"]
        _fail_once(live, refits, "between two modules", monkeypatch)
        live.engine.start_weight_update()
        with pytest.raises(RefitError) as caught:
            driver.ask("apply", update=True, session=session)
        assert caught.value.engine_state == "unknown"
        live.engine.finish_weight_update()
        assert refits.quarantined
        driver.ask("close", session=session)
        driver.move(None, versions[2], 2)
        assert (refits.identity.version, refits.quarantined) == (2, "")


@pytest.mark.usefixtures("packing")
def test_bytes_that_are_not_the_versions_never_reach_a_loader(
    tiny: Callable[..., Path], runtime: Path
) -> None:
    folder = tiny("llama")
    versions = versions_of(folder, 1)
    with loaded(folder) as live:
        before, driver = answers(live), Whole(live.engine, runtime)
        live.engine.front.weights.proved.wait()
        delta, entries = driver.order(None, versions[1])
        path = Path(entries[3]["path"])
        data = bytearray(path.read_bytes())
        data[5] ^= 1
        path.write_bytes(data)
        with pytest.raises(IntegrityError, match="its bytes are not those of the version"):
            driver.prepare(delta, 1, None, whole=entries)
        path.write_bytes(data[:-2])
        with pytest.raises(IntegrityError, match="bytes, not"):
            driver.prepare(delta, 1, None, whole=entries)
        assert live.engine.front.refits.session is None
        assert differing(before, answers(live)) == []
