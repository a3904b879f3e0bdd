"""Committed names against an engine's real names, before any byte moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightline.errors import RefitError
from weightline.rollout.engines.base import EngineDescription
from weightline.rollout.mapping import HOLDS, WRAPPERS, resolve, strip_wrappers, tied_apart, uncovered
from weightline.types import TensorSpec


def engine(names, *, aliases=None, dtype="BF16", shapes=None):
    tensors = tuple(TensorSpec(name, dtype, (shapes or {}).get(name, (2, 3))) for name in names)
    return EngineDescription(
        kind="double", label="default", version=None, run=None, instance="i", paused=False, quarantined=False,
        tensors=tensors, aliases=aliases or {},
    )  # fmt: skip


def specs(names, dtype="BF16", shapes=None):
    return [TensorSpec(name, dtype, (shapes or {}).get(name, (2, 3))) for name in names]


@pytest.mark.parametrize(
    ("wrapped", "bare"),
    [
        ("module._orig_mod.layers.0.w", "layers.0.w"),
        ("_orig_mod.module.layers.0.w", "layers.0.w"),
        ("layers._orig_mod.0.w", "layers.0.w"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.w", "layers.0.w"),
        ("model.layers.0._checkpoint_wrapped_module.mlp.w", "model.layers.0.mlp.w"),
        ("module.module.w", "w"),
        (
            "base_model.model._fsdp_wrapped_module.model.layers.0.self_attn.q_proj.base_layer.weight",
            "model.layers.0.self_attn.q_proj.weight",
        ),
        ("_orig_mod.base_model.model.model.norm.weight", "model.norm.weight"),
    ],
)
def test_wrappers_are_stripped_at_any_depth_and_in_any_order(wrapped, bare):
    assert strip_wrappers(wrapped) == bare
    assert resolve(specs([wrapped]), engine([bare])) == {wrapped: bare}
    assert resolve(specs([bare]), engine([wrapped])) == {bare: wrapped}


@pytest.mark.parametrize(
    "name",
    [
        "my_module.w",
        "module_list.0.w",
        "model.module_x.w",
        "base_model.encoder.w",
        "x.base_model.model.w",
        "w",
        "x.module",
    ],
)
def test_a_legitimate_name_is_never_cut(name):
    assert strip_wrappers(name) == name


segments = st.lists(st.text("abcdemodul_", min_size=1, max_size=6), min_size=1, max_size=5)


@given(segments, st.data())
def test_wrappers_put_in_anywhere_come_out_again(path, data):
    path = [segment for segment in path if segment not in WRAPPERS] or ["w"]
    wrapped = list(path)
    for _ in range(data.draw(st.integers(0, 4))):
        wrapped.insert(
            data.draw(st.integers(0, len(wrapped) - 1)), data.draw(st.sampled_from(sorted(WRAPPERS)))
        )
    assert strip_wrappers(".".join(wrapped)) == ".".join(path)
    assert strip_wrappers(strip_wrappers(".".join(wrapped))) == ".".join(path)


def test_a_name_that_fits_as_it_is_wins_over_a_stripped_one():
    assert resolve(specs(["module.w", "w"]), engine(["module.w", "w"])) == {"module.w": "module.w", "w": "w"}


def test_two_sources_for_one_tensor_are_an_error_that_names_all_three():
    with pytest.raises(
        RefitError, match=r"layers\.0\.w \(claimed by _orig_mod\.layers\.0\.w, module\.layers\.0\.w\)"
    ) as error:
        resolve(specs(["module.layers.0.w", "_orig_mod.layers.0.w"]), engine(["layers.0.w"]))
    assert error.value.engine_state == "old"


TEXT = ["model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight"]


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_a_text_model_goes_into_a_multimodal_engine_whose_other_tensors_stay_untouched(prefix):
    nested = [prefix + name.removeprefix("model.") for name in TEXT]
    live = engine([*nested, "visual.blocks.0.norm1.weight"])
    mapping = resolve(specs(TEXT), live)
    assert mapping == dict(zip(TEXT, nested, strict=True))
    assert uncovered(mapping, live) == ("visual.blocks.0.norm1.weight",)
    assert resolve(specs(nested), engine(TEXT)) == dict(zip(nested, TEXT, strict=True))


def test_a_rule_moves_a_prefix():
    assert resolve(specs(["actor.w"]), engine(["policy.w"]), rules={"actor.": "policy."}) == {
        "actor.w": "policy.w"
    }


def test_all_misses_are_listed():
    with pytest.raises(RefitError, match="2 committed tensors do not fit") as error:
        resolve(specs(["a.w", "b.w", "c.w"]), engine(["b.w"]))
    assert "a.w (the engine has no such tensor)" in error.value.message
    assert "c.w (the engine has no such tensor)" in error.value.message
    assert error.value.engine_state == "old"
    assert error.value.hint


def test_a_name_that_fits_two_tensors_is_an_error():
    with pytest.raises(
        RefitError, match=r"fits several of the engine's: a\.language_model\.w, language_model\.a\.w"
    ):
        resolve(specs(["a.w"]), engine(["language_model.a.w", "a.language_model.w"]))


def test_another_shape_is_an_error():
    with pytest.raises(RefitError, match=r"w \(shape \[2, 3\], in the engine \[3, 2\]\)"):
        resolve(specs(["w"]), engine(["w"], shapes={"w": (3, 2)}))


def test_a_dtype_that_the_engine_holds_exactly_is_fine_and_another_is_an_error():
    assert resolve(specs(["w"], "BF16"), engine(["w"], dtype="F32")) == {"w": "w"}
    with pytest.raises(RefitError, match=r"w \(stored as F32, the engine's BF16 cannot hold it exactly\)"):
        resolve(specs(["w"], "F32"), engine(["w"], dtype="BF16"))


def test_every_widening_in_the_table_is_exact():
    import ml_dtypes
    import numpy as np

    kinds = {
        "BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64,
        "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    }  # fmt: skip
    for live, stored in HOLDS.items():
        for name in stored:
            if np.dtype(kinds[name]).itemsize > 2:
                continue
            unsigned = np.uint8 if np.dtype(kinds[name]).itemsize == 1 else np.uint16
            every = (
                np.arange(2 ** (8 * np.dtype(unsigned).itemsize), dtype=np.uint32)
                .astype(unsigned)
                .view(kinds[name])
            )
            every = every[~np.isnan(every.astype(np.float32))]
            back = every.astype(kinds[live]).astype(kinds[name])
            assert (back.view(unsigned) == every.view(unsigned)).all(), (live, name)


def test_a_version_without_tensors_is_an_error():
    with pytest.raises(RefitError, match="names no tensor"):
        resolve([], engine(["w"]))


def test_a_tied_name_goes_to_the_alias_and_counts_once():
    live = engine(["embed.weight", "lm_head.weight"], aliases={"lm_head.weight": "embed.weight"})
    assert resolve(specs(["embed.weight"]), live) == {"embed.weight": "embed.weight"}
    assert uncovered({"embed.weight": "embed.weight"}, live) == ()
    both = resolve(specs(["embed.weight", "lm_head.weight"]), live)
    assert both == {"embed.weight": "embed.weight", "lm_head.weight": "lm_head.weight"}
    assert tied_apart(both, {"embed.weight": "00", "lm_head.weight": "00"}, live) == []
    assert tied_apart(both, {"embed.weight": "00", "lm_head.weight": "01"}, live) == [
        "embed.weight and lm_head.weight"
    ]
