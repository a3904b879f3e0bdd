"""diff, apply, undo and merge on weights in memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from conftest_codec import DTYPES, LAYOUTS, array_of, changed, laid_out, random_bits, same_bits, tensors
from hypothesis import given
from hypothesis import strategies as st

from weightline import codec
from weightline.codec import TensorChange
from weightline.errors import IntegrityError, InvalidInput


def copies(weights):
    return {name: array.copy() for name, array in weights.items()}


@given(
    tensors(),
    st.sampled_from(LAYOUTS),
    st.sampled_from(LAYOUTS),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.integers(0, 99),
)
def test_a_diff_applied_to_the_old_bits_gives_the_new_ones_and_undo_gives_them_back(
    case, one, other, density, seed
):
    dtype, shape, bits = case
    old = laid_out(array_of(bits, dtype, shape), one)
    before = codec.bits_of(old).copy()
    new = laid_out(array_of(changed(before, density, seed), dtype, shape), other)
    delta = codec.diff({"w": old}, {"w": new})
    target = {"w": laid_out(array_of(before.copy(), dtype, shape).copy(), one)}
    if dtype == "C64" and one == "big_endian" and target["w"].dtype.byteorder == ">":
        return
    if not np.array_equal(codec.bits_of(target["w"]), before):
        return  # the layout helper itself cast a signalling NaN
    undo = delta.apply_(target)
    assert same_bits(target["w"], new)
    assert delta.elements == int((codec.bits_of(new) != before).sum())
    undo.restore()
    assert np.array_equal(codec.bits_of(target["w"]), before)


def test_unchanged_tensors_are_not_in_the_delta(pair):
    old, new = pair
    delta = codec.diff(old, new)
    assert delta.changed == ("a.weight", "b.weight", "c")
    assert codec.diff(new, copies(new)).changed == ()


def test_digests_are_those_of_the_whole_tensors(pair):
    old, new = pair
    for change in codec.diff(old, new).changes():
        name = change.spec.name
        assert change.base_digest == codec.digest_of(codec.bits_of(old[name]))
        assert change.digest == codec.digest_of(codec.bits_of(new[name]))


def test_base_digests_that_are_given_are_not_recomputed(pair):
    old, new = pair
    given_digests = dict.fromkeys(old, "0" * 31 + "7")
    assert {c.base_digest for c in codec.diff(old, new, old_digests=given_digests).changes()} == {
        "0" * 31 + "7"
    }


def test_every_mismatch_of_the_weights_is_listed(pair):
    old, new = pair
    new = dict(new, extra=np.zeros(1, np.float32), c=np.zeros(3, np.float32))
    del new["frozen"]
    with pytest.raises(
        InvalidInput, match=r"missing 'frozen'.*unknown 'extra'.*'c' was F8_E4M3\[999\], is F32\[3\]"
    ):
        codec.diff(old, new)


def test_the_undo_carries_digests_and_an_inverse(pair):
    old, new = pair
    target = copies(old)
    undo = codec.diff(old, new).numbered(3, 4).apply_(target)
    assert undo.digests["c"] == codec.digest_of(codec.bits_of(new["c"]))
    inverse = undo.inverse
    assert (inverse.base, inverse.version) == (4, 3)
    inverse.apply_(target)
    assert all(same_bits(target[name], old[name]) for name in old)


def test_tied_weights_under_two_names_are_written_and_undone(pair):
    old, new = pair
    both = {"head": old["a.weight"], "embed": old["a.weight"]}
    delta = codec.diff(both, {"head": new["a.weight"], "embed": new["a.weight"]})
    shared = old["a.weight"].copy()
    undo = delta.apply_({"head": shared, "embed": shared})
    assert same_bits(shared, new["a.weight"])
    undo.restore()
    assert same_bits(shared, old["a.weight"])


def test_misfits_are_all_named_and_nothing_is_written(pair):
    old, new = pair
    target = copies(old)
    target["a.weight"] = target["a.weight"][:-1].copy()
    del target["c"]
    kept = copies(target)
    with pytest.raises(InvalidInput, match=r"'a\.weight' is BF16\[299, 70\].*missing 'c'"):
        codec.diff(old, new).apply_(target)
    assert all(same_bits(target[name], kept[name]) for name in target)


def test_a_wrong_base_is_refused_before_the_first_write(pair):
    old, new = pair
    target = copies(old)
    delta = codec.diff(old, new)
    at = delta.change("c").index[0]
    codec.bits_of(target["c"])[at] ^= 1
    kept = copies(target)
    with pytest.raises(IntegrityError, match="'c'"):
        delta.apply_(target)
    assert all(same_bits(target[name], kept[name]) for name in target)
    delta.apply_(target, check=False)
    assert all(same_bits(target[name], new[name]) for name in new)


@pytest.mark.parametrize("flat", [True, False])
def test_a_base_that_differs_only_where_nothing_changes_is_refused(flat):
    old = np.zeros((10, 10), np.float32)
    new = old.copy()
    new[0, 5] = 1
    delta = codec.diff({"w": old}, {"w": new})
    array = np.full((10, 10), 7, np.float32)
    array[0, 5] = 0
    target = array if flat else np.asfortranarray(array)
    kept = target.copy()
    with pytest.raises(IntegrityError, match="'w' has digest"):
        delta.apply_({"w": target})
    assert same_bits(target, kept)
    good = old.copy() if flat else np.asfortranarray(old)
    delta.apply_({"w": good})
    assert same_bits(good, new)


def test_with_carried_digests_no_tensor_is_read_in_full(pair, monkeypatch):
    old, new = pair
    digests = {name: codec.digest_of(codec.bits_of(array)) for name, array in old.items()}
    delta, target = codec.diff(old, new), copies(old)

    def forbidden(bits):
        raise AssertionError(f"{bits.size} elements were read")

    monkeypatch.setattr("weightline.codec.digest.digest_of", forbidden)
    delta.apply_(target, digests=digests)
    assert all(same_bits(target[name], new[name]) for name in new)


def test_a_tensor_that_is_given_in_full_needs_no_base(pair):
    old, new = pair
    target = {name: array.copy() for name, array in old.items()}
    codec.bits_of(target["c"])[0] ^= 1
    codec.full(new).apply_(target)
    assert all(same_bits(target[name], new[name]) for name in new)


def test_a_carried_digest_that_differs_is_refused(pair):
    old, new = pair
    digests = {name: codec.digest_of(codec.bits_of(array)) for name, array in old.items()}
    codec.diff(old, new).apply_(copies(old), digests=digests)
    with pytest.raises(IntegrityError, match=r"'b\.weight' has digest"):
        codec.diff(old, new).apply_(copies(old), digests=dict(digests, **{"b.weight": "0" * 32}))


@pytest.mark.parametrize("index", [[-1], [4], [1, 1], [2, 1]])
def test_indexes_that_would_write_out_of_bounds_are_refused(index):
    array = np.arange(4, dtype=np.float32)
    change = TensorChange(
        codec.spec_of("w", array), np.array(index), np.zeros(len(index), np.uint32), "0" * 32, "0" * 32
    )
    delta = codec.Delta(codec.delta.Held([change]))
    with pytest.raises(InvalidInput, match="ascending"):
        delta.apply_({"w": array})
    assert array.tolist() == [0, 1, 2, 3]


def test_read_only_and_broadcast_targets_are_refused(pair):
    old, new = pair
    delta = codec.diff(old, new)
    target = copies(old)
    target["c"].flags.writeable = False
    with pytest.raises(InvalidInput, match="'c' is read-only"):
        delta.apply_(target)


@pytest.mark.parametrize("dtype", DTYPES)
def test_full_replaces_everything_and_borrows_memory(dtype):
    bits = random_bits(dtype, 60, 3)
    weights = {"w": array_of(bits, dtype, (6, 10))}
    delta = codec.full(weights)
    assert np.shares_memory(delta.change("w").bits, weights["w"])
    assert delta.change("w").index is None
    target = {"w": np.zeros_like(weights["w"])}
    undo = delta.apply_(target)
    assert same_bits(target["w"], weights["w"])
    undo.restore()
    assert not codec.bits_of(target["w"]).any()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.integers(0, 1000), st.booleans())
def test_merged_deltas_equal_the_chain(densities, seed, start_full):
    versions = [{"w": array_of(random_bits("BF16", 200, seed), "BF16", (200,)), "v": np.zeros(3, np.int8)}]
    for step, density in enumerate(densities):
        versions.append(
            dict(
                versions[-1],
                w=array_of(
                    changed(codec.bits_of(versions[-1]["w"]), density, seed + step, 1), "BF16", (200,)
                ),
            )
        )
    pairs = list(itertools.pairwise(versions))
    chain = [codec.diff(a, b).numbered(i, i + 1) for i, (a, b) in enumerate(pairs)]
    if start_full:
        chain[0] = codec.full(versions[1]).numbered(0, 1)
    merged = codec.merge(chain)
    assert (merged.base, merged.version) == (0, len(densities))
    target = copies(versions[0])
    merged.apply_(target)
    assert all(same_bits(target[name], versions[-1][name]) for name in target)
    if not start_full:
        direct = codec.diff(versions[0], versions[-1])
        assert merged.changed == direct.changed
        for change in merged.changes():
            assert np.array_equal(change.index, direct.change("w").index)
            assert (change.digest, change.base_digest) == (
                direct.change("w").digest,
                direct.change("w").base_digest,
            )


def test_merging_refuses_gaps_and_nothing(pair):
    old, new = pair
    delta = codec.diff(old, new)
    with pytest.raises(InvalidInput):
        codec.merge([])
    with pytest.raises(InvalidInput, match="against version 5"):
        codec.merge([delta.numbered(1, 2), delta.numbered(5, 6)])
    with pytest.raises(IntegrityError, match="starts from digest"):
        codec.merge([delta, delta])


def test_the_threshold_leaves_out_small_changes_and_carries_them_forward():
    base = np.full(4, 1.0, np.float32)
    sent = base.copy()
    for step in range(1, 6):
        current = (base + np.float32(step * 2e-7)).astype(np.float32)
        codec.diff({"w": sent}, {"w": current}, threshold=5e-7).apply_({"w": sent})
        assert (np.abs(current - sent) <= 5e-7).all()
    assert (sent > base).all()


def test_the_threshold_always_sends_nan_and_infinity():
    old = np.array([1.0, np.nan, 1.0, 1.0, 0.0], np.float32)
    new = np.array([np.nan, 1.0, np.inf, 1.0000001, -0.0], np.float32)
    delta = codec.diff({"w": old}, {"w": new}, threshold=1e-6)
    assert delta.change("w").index.tolist() == [0, 1, 2]
    with pytest.raises(InvalidInput):
        codec.diff({"w": old}, {"w": new}, threshold=float("nan"))


def test_an_unknown_name_or_level_is_refused(pair):
    old, new = pair
    with pytest.raises(InvalidInput, match="'nope'"):
        codec.diff(old, new).change("nope")
    with pytest.raises(InvalidInput, match="level"):
        codec.diff(old, new, level="best")
