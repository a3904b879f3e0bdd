"""The levels "fast" and "dense": lossless on anything, the same bits from both engines, no damage gets
through."""

from __future__ import annotations

import numpy as np
import pytest
from conftest_codec import DTYPES, array_of, changed, random_bits, same_bits, tensors
from hypothesis import given
from hypothesis import strategies as st

from weightline import codec
from weightline.codec import backend, coding, container, kernels, native, tables
from weightline.errors import FormatError, IntegrityError, InvalidInput

LEVELS = ("fast", "dense")


def copies(weights):
    return {name: array.copy() for name, array in weights.items()}


@pytest.fixture(params=["numba", "c"])
def engine(request, monkeypatch):
    """Each engine in turn; C is what this machine builds."""
    chosen = kernels
    if request.param == "c":
        assert native.library() is not None, "no C compiler: install one to run the tests"
        chosen = native
    monkeypatch.setattr(backend, "engine", lambda: chosen)
    return chosen


def weight_like(dtype, count, seed):
    """Values as weights have them, where the dtype has them: many exponents, small ones more often."""
    rng = np.random.default_rng(seed)
    if dtype in ("BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2"):
        return codec.bits_of((rng.normal(size=count) * 0.05).astype(codec.numpy_dtype(dtype))).copy()
    return random_bits(dtype, count, seed)


@pytest.mark.parametrize("level", LEVELS)
@given(
    tensors(), st.sampled_from([0.0, 0.02, 0.5, 1.0]), st.sampled_from([None, 1, 3, 1000]), st.integers(0, 99)
)
def test_anything_round_trips(tmp_path_factory, level, case, density, step, seed):
    dtype, shape, bits = case
    path = tmp_path_factory.mktemp("d") / "d"
    new_bits = changed(bits, density, seed, step)
    old, new = {"w": array_of(bits, dtype, shape)}, {"w": array_of(new_bits, dtype, shape)}
    delta = codec.diff(old, new, level=level).numbered(1, 2)
    assert codec.write_delta(delta, path, level=level) == path.stat().st_size == delta.nbytes
    read = codec.read_delta(path)
    assert (read.level, read.base, read.version, read.elements) == (level, 1, 2, delta.elements)
    target = copies(old)
    undo = read.apply_(target)
    assert same_bits(target["w"], new["w"])
    undo.restore()
    assert same_bits(target["w"], old["w"])
    for change in read.decoded(old).changes():
        direct = delta.change("w")
        assert np.array_equal(change.index, direct.index)
        assert np.array_equal(change.bits, direct.bits)
        assert (change.digest, change.base_digest) == (direct.digest, direct.base_digest)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("density", "step"), [(0.002, 2), (0.1, 40), (0.7, 3), (1.0, None)])
def test_both_engines_write_and_read_the_same_bits(level, dtype, density, step, monkeypatch, tmp_path):
    bits = weight_like(dtype, 9001, 3)
    old = {"w": array_of(bits, dtype, (9001,))}
    new = {"w": array_of(changed(bits, density, 5, step), dtype, (9001,))}
    files = []
    for engine in (kernels, native):
        monkeypatch.setattr(backend, "engine", lambda engine=engine: engine)
        codec.write_delta(codec.diff(old, new, level=level), tmp_path / "d", level=level)
        files.append((tmp_path / "d").read_bytes())
        target = copies(old)
        codec.read_delta(tmp_path / "d").apply_(target)
        assert same_bits(target["w"], new["w"])
    assert files[0] == files[1]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chunk_never_costs_more_than_raw_and_a_small_header(level, dtype, engine, tmp_path):
    bits = random_bits(dtype, 5000, 1)
    old, new = (
        {"w": array_of(bits, dtype, (5000,))},
        {"w": array_of(random_bits(dtype, 5000, 2), dtype, (5000,))},
    )
    size = codec.write_delta(codec.diff(old, new, level=level), tmp_path / "d", level=level)
    assert size <= bits.nbytes + 1000
    target = copies(old)
    codec.read_delta(tmp_path / "d").apply_(target)
    assert same_bits(target["w"], new["w"])


@pytest.mark.parametrize("level", LEVELS)
def test_many_chunks_and_many_tensors(level, engine, monkeypatch, tmp_path):
    monkeypatch.setattr(coding, "BATCH", 1 << 20)
    count = (1 << 22) + 12345
    bits = weight_like("BF16", count, 1)
    old = {f"small.{i}": np.full(i + 1, i, np.float32) for i in range(20)} | {
        "big": array_of(bits, "BF16", (count,))
    }
    new = copies(old) | {"big": array_of(changed(bits, 0.003, 2, 2), "BF16", (count,))}
    for i in range(0, 20, 3):
        new[f"small.{i}"][i // 2] += 1
    codec.write_delta(codec.diff(old, new, level=level), tmp_path / "d", level=level)
    read = codec.read_delta(tmp_path / "d")
    assert set(read.changed) == {"big", *(f"small.{i}" for i in range(0, 20, 3))}
    target = copies(old)
    read.apply_(target)
    assert all(same_bits(target[name], new[name]) for name in new)


@pytest.mark.parametrize("level", LEVELS)
def test_a_wrong_base_is_refused_and_nothing_is_written(level, pair, engine, tmp_path):
    old, new = pair
    codec.write_delta(codec.diff(old, new, level=level), tmp_path / "d", level=level)
    read = codec.read_delta(tmp_path / "d")
    wrong = copies(old)
    codec.bits_of(wrong["a.weight"])[7] ^= 1
    kept = copies(wrong)
    with pytest.raises(IntegrityError, match=r"'a\.weight'"):
        read.apply_(wrong)
    # Even when the carried digests claim the right base, the bits do not lead to the right result.
    at = int(read.decoded(old).change("a.weight").index[3])
    codec.bits_of(wrong["a.weight"])[at] ^= 1
    kept = copies(wrong)
    digests = {name: codec.digest_of(codec.bits_of(array)) for name, array in old.items()}
    with pytest.raises(IntegrityError):
        read.apply_(wrong, digests=digests)
    assert all(same_bits(wrong[name], kept[name]) for name in kept)
    with pytest.raises(IntegrityError, match="has digest"):
        read.apply_(copies(old), digests=digests | {"c": "1" * 32})
    with pytest.raises(InvalidInput, match=r"missing 'a\.weight'"):
        read.apply_({"c": old["c"].copy()})
    target = copies(old)
    assert read.apply_(target, digests=digests).digests["c"] == codec.digest_of(codec.bits_of(new["c"]))


@pytest.mark.parametrize("level", LEVELS)
def test_any_flipped_byte_is_refused(level, tmp_path):
    bits = weight_like("BF16", 700, 1)
    old, new = (
        {"w": array_of(bits, "BF16", (700,))},
        {"w": array_of(changed(bits, 0.1, 2, 9), "BF16", (700,))},
    )
    path = tmp_path / "d"
    codec.write_delta(codec.diff(old, new, level=level), path, level=level)
    good = path.read_bytes()
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << (at % 8))]) + good[at + 1 :])
        with pytest.raises((FormatError, IntegrityError)):
            codec.read_delta(path)


def _reseal(path, streams, level):
    """A file whose checks are right, whatever its streams say: what a damaged writer would leave."""
    sizes = {name: len(data) for name, data in streams.items()}
    container.write_streams(path, sizes, {name: [data] for name, data in streams.items()}, level)


@pytest.mark.parametrize("level", LEVELS)
def test_a_damaged_stream_with_right_checks_never_gets_through(level, engine, tmp_path):
    bits = weight_like("BF16", 9000, 1)
    old = {"w": array_of(bits, "BF16", (9000,)), "v": array_of(random_bits("F32", 300, 4), "F32", (300,))}
    new = {
        "w": array_of(changed(bits, 0.05, 2, 9), "BF16", (9000,)),
        "v": array_of(random_bits("F32", 300, 5), "F32", (300,)),
    }
    path = tmp_path / "d"
    codec.write_delta(codec.diff(old, new, level=level), path, level=level)
    mapped = container.Mapped(path, verify=True)
    streams = {name: mapped.stream(name).tobytes() for name in ("coded", "tables", "index")}
    rng = np.random.default_rng(0)
    refused = 0
    for round_ in range(250):
        name = ("coded", "tables", "index")[round_ % 3]
        data = bytearray(streams[name])
        for _ in range(int(rng.integers(1, 4))):
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
        if round_ % 7 == 0:
            del data[int(rng.integers(1, len(data))) :]
        _reseal(path, streams | {name: bytes(data)}, level)
        target = copies(old)
        try:
            codec.read_delta(path).apply_(target)
        except (FormatError, IntegrityError, InvalidInput):
            refused += 1
            assert all(same_bits(target[n], old[n]) for n in old)
        else:
            assert all(same_bits(target[n], new[n]) for n in new)
    assert refused > 200


@given(st.lists(st.integers(0, 2**50), max_size=40))
def test_varints_round_trip(values):
    data = tables.varints(np.array(values, np.int64))
    assert tables.unvarints(data, "here").tolist() == values


@pytest.mark.parametrize("data", [b"\x80", b"\xff" * 9 + b"\1", b"\1\x80"])
def test_broken_varints_are_refused(data):
    with pytest.raises(FormatError):
        tables.unvarints(data, "here")


def test_tables_that_declare_too_much_are_refused():
    with pytest.raises(FormatError, match="more than there is"):
        tables.bytes_to_columns(b"\4\0\0\0\xff\xff\xff\xff" + b"\0" * 4, 1, "here")
    with pytest.raises(FormatError, match="cut short"):
        tables.bytes_to_columns(b"\0", 1, "here")


def test_changes_of_a_coded_file_need_the_base(pair, tmp_path):
    old, new = pair
    codec.write_delta(codec.diff(old, new, level="dense"), tmp_path / "d", level="dense")
    read = codec.read_delta(tmp_path / "d")
    with pytest.raises(InvalidInput, match="relative to its base"):
        read.change("c")
    change = read.decoded(old).change("c")
    assert np.array_equal(change.bits, codec.bits_of(new["c"])[change.index])
    assert codec.diff(old, new).decoded({}) is not None


@pytest.mark.parametrize("level", LEVELS)
def test_an_absolute_delta_is_recoded_when_the_base_is_at_hand(level, pair, tmp_path):
    old, new = pair
    codec.write_delta(codec.diff(old, new).numbered(4, 5), tmp_path / "a")
    absolute = codec.read_delta(tmp_path / "a")
    with pytest.raises(InvalidInput, match=r"old bits|needs the weights"):
        codec.write_delta(absolute, tmp_path / "d", level=level)
    codec.write_delta(absolute, tmp_path / "d", level=level, base=old)
    codec.write_delta(codec.diff(old, new, level=level).numbered(4, 5), tmp_path / "e", level=level)
    one, other = codec.read_delta(tmp_path / "d"), codec.read_delta(tmp_path / "e")
    assert (one.base, one.version) == (4, 5)
    for name in one.changed:
        assert np.array_equal(one.decoded(old).change(name).bits, other.decoded(old).change(name).bits)
    whole = codec.full(new)
    codec.write_delta(whole, tmp_path / "f", level=level, base=old)
    target = copies(old)
    codec.read_delta(tmp_path / "f").apply_(target)
    assert all(same_bits(target[name], new[name]) for name in new)


@pytest.mark.parametrize("result", ["absolute", *LEVELS])
def test_a_chain_of_any_levels_is_squashed_with_the_base(result, tmp_path):
    bits = weight_like("BF16", 20_000, 0)
    versions = [
        {"w": array_of(bits, "BF16", (200, 100)), "v": np.arange(50, dtype=np.int32), "frozen": np.zeros(3)}
    ]
    for step in range(7):
        last = versions[-1]
        moved = array_of(changed(codec.bits_of(last["w"]), 0.01, step, 1), "BF16", (200, 100))
        versions.append(last | {"w": moved, "v": last["v"] + (1 if step % 2 else -1)})
    chain = []
    for i, level in enumerate(["fast", "dense", "absolute", "dense", "fast", "absolute", "fast"]):
        delta = codec.diff(versions[i], versions[i + 1], level=level).numbered(i + 3, i + 4)
        codec.write_delta(delta, tmp_path / str(i), level=level)
        chain.append(codec.read_delta(tmp_path / str(i)))
    squashed = codec.squash(versions[0], chain, level=result)
    assert (squashed.base, squashed.version) == (3, 10)
    codec.write_delta(squashed, tmp_path / "all", level=result)
    target = copies(versions[0])
    codec.read_delta(tmp_path / "all").apply_(target)
    assert all(same_bits(target[name], versions[-1][name]) for name in target)
    direct = codec.diff(versions[0], versions[-1])
    assert squashed.elements == direct.elements
    with pytest.raises(InvalidInput, match="no tensor"):
        codec.squash({}, chain)
    with pytest.raises(IntegrityError):
        codec.squash(versions[1], chain)


def test_strided_and_fortran_targets_take_a_coded_delta(pair, engine, tmp_path):
    old, new = pair
    codec.write_delta(codec.diff(old, new, level="fast"), tmp_path / "d", level="fast")
    target = copies(old) | {"a.weight": np.asfortranarray(old["a.weight"])}
    undo = codec.read_delta(tmp_path / "d").apply_(target)
    assert all(same_bits(target[name], new[name]) for name in new)
    inverse = undo.inverse
    undo.restore()
    assert all(same_bits(target[name], old[name]) for name in old)
    inverse.apply_(copies(new))


def test_the_threshold_works_at_every_level(tmp_path):
    old = {"w": np.linspace(-1, 1, 4000).astype(np.float32)}
    new = {"w": (old["w"] * np.where(np.arange(4000) % 3, 1 + 3e-7, 1.001)).astype(np.float32)}
    expected = codec.diff(old, new, threshold=1e-6)
    assert 1000 < expected.elements < 1400
    for level in LEVELS:
        delta = codec.diff(old, new, threshold=1e-6, level=level)
        codec.write_delta(delta, tmp_path / level, level=level)
        target = copies(old)
        codec.read_delta(tmp_path / level).apply_(target)
        wanted = copies(old)
        expected.apply_(wanted)
        assert same_bits(target["w"], wanted["w"])
