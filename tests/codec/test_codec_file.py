"""The delta file: round trips, any reader opens it, and every kind of damage is refused."""

from __future__ import annotations

import struct

import msgspec
import numpy as np
import pytest
import safetensors.numpy
from conftest_codec import array_of, changed, random_bits, same_bits, tensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from weightline import codec
from weightline.codec import container, layout
from weightline.errors import FormatError, IntegrityError, InvalidInput


def copies(weights):
    return {name: array.copy() for name, array in weights.items()}


@given(tensors(), st.sampled_from([0.0, 0.05, 1.0]), st.booleans())
def test_a_delta_survives_the_file(tmp_path_factory, case, density, whole):
    dtype, shape, bits = case
    path = tmp_path_factory.mktemp("delta") / "d.safetensors"
    old, new = array_of(bits, dtype, shape), array_of(changed(bits, density, 1), dtype, shape)
    delta = codec.full({"w": new}) if whole else codec.diff({"w": old}, {"w": new})
    delta = delta.numbered(None if whole else 6, 7)
    assert codec.write_delta(delta, path) == path.stat().st_size == delta.nbytes
    read = codec.read_delta(path)
    assert (read.base, read.version, read.elements, read.changed) == (
        delta.base,
        7,
        delta.elements,
        delta.changed,
    )
    target = {"w": old.copy()}
    read.apply_(target)
    assert same_bits(target["w"], new)
    for change in read.changes():
        assert (change.digest, change.base_digest) == (
            delta.change("w").digest,
            delta.change("w").base_digest,
        )


def test_any_safetensors_reader_opens_it(pair, tmp_path):
    old, new = pair
    path = tmp_path / "d.safetensors"
    codec.write_delta(codec.diff(old, new), path)
    streams = safetensors.numpy.load_file(path)
    assert set(streams) == {"weightline.positions", "weightline.values", "weightline.index"}
    with safe_open(path, "numpy") as handle:
        assert handle.metadata()["format"] == "weightline.delta"
        assert handle.metadata()["format_version"] == "1"


def test_whole_tensors_are_views_of_the_mapping(pair, tmp_path):
    _, new = pair
    codec.write_delta(codec.full(new), tmp_path / "d")
    bits = codec.read_delta(tmp_path / "d").change("a.weight").bits
    assert not bits.flags.owndata
    assert not bits.flags.writeable
    assert same_bits(codec.from_bits(bits, codec.spec_of("x", new["a.weight"])), new["a.weight"])


def test_unchanged_tensors_take_no_bytes(tmp_path):
    frozen = {f"layer.{i}": np.zeros(1000, np.float32) for i in range(50)}
    delta = codec.diff(frozen, copies(frozen))
    assert codec.write_delta(delta, tmp_path / "d") < 600
    assert codec.read_delta(tmp_path / "d").changed == ()


@pytest.mark.parametrize("whole", [False, True])
def test_any_flipped_byte_is_refused(pair, tmp_path, whole):
    old, new = pair
    small = {"c": new["c"], "b.weight": new["b.weight"]}
    delta = codec.full(small) if whole else codec.diff({n: old[n] for n in small}, small)
    path = tmp_path / "d"
    codec.write_delta(delta, path)
    good = path.read_bytes()
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << (at % 8))]) + good[at + 1 :])
        with pytest.raises((FormatError, IntegrityError)):
            codec.read_delta(path)


def test_any_truncation_or_tail_is_refused(pair, tmp_path):
    old, new = pair
    path = tmp_path / "d"
    codec.write_delta(codec.diff(old, new), path)
    good = path.read_bytes()
    for length in [*range(0, len(good), 97), len(good) - 1]:
        path.write_bytes(good[:length])
        with pytest.raises(FormatError, match=str(path)):
            codec.read_delta(path)
    path.write_bytes(good + b"\0")
    with pytest.raises(FormatError):
        codec.read_delta(path)


def _write(path, index, streams):
    sizes = {name: len(data) for name, data in streams.items()} | {"index": 0}
    packed = container.pack_index(index)
    sizes["index"] = len(packed)
    container.write_streams(
        path, sizes, {name: [data] for name, data in streams.items()} | {"index": [packed]}, "absolute"
    )


def _record(**fields):
    record = {
        "name": "w",
        "dtype": "BF16",
        "shape": (8,),
        "layout": 0,
        "count": 2,
        "digest": b"d" * 16,
        "base_digest": b"b" * 16,
    }
    return layout.TensorRecord(**(record | fields))


GOOD = {"positions": struct.pack("<2I", 1, 5), "values": struct.pack("<2H4x", 7, 8)}


@pytest.mark.parametrize(
    ("fields", "streams"),
    [
        ({"count": 1 << 60, "shape": (1 << 61,)}, GOOD),
        ({"count": 9}, GOOD),
        ({"count": 1}, {"positions": b"1" * 8, "values": b"1" * 16}),
        ({"shape": (-1,)}, GOOD),
        ({"dtype": "F4"}, GOOD),
        ({"layout": 3}, GOOD),
        ({"layout": 1}, GOOD),
        ({"layout": 1, "count": 1 << 60, "shape": (1 << 60,), "base_digest": b""}, {"whole": b"1" * 16}),
        ({"digest": b"short"}, GOOD),
        ({"base_digest": b""}, GOOD),
    ],
)
def test_a_record_that_lies_is_refused_before_memory_is_taken(tmp_path, fields, streams):
    path = tmp_path / "d"
    index = layout.FileIndex(None, None, (_record(**fields),))
    _write(path, msgspec.msgpack.encode(index), streams)
    with pytest.raises(FormatError):
        codec.read_delta(path)


@pytest.mark.parametrize("positions", [(5, 1), (5, 5), (1, 8)])
def test_positions_out_of_order_or_range_are_refused(tmp_path, positions):
    index = layout.FileIndex(None, None, (_record(),))
    _write(
        tmp_path / "d", msgspec.msgpack.encode(index), GOOD | {"positions": struct.pack("<2I", *positions)}
    )
    with pytest.raises(FormatError, match="ascending"):
        codec.read_delta(tmp_path / "d").change("w")


@pytest.mark.parametrize(
    "index", [b"", b"\xc1", msgspec.msgpack.encode(["x"]), msgspec.msgpack.encode([1, 2, [], 0])]
)
def test_an_index_that_is_none_is_refused(tmp_path, index):
    _write(tmp_path / "d", index, {})
    with pytest.raises(FormatError):
        codec.read_delta(tmp_path / "d")


def test_an_index_that_inflates_without_end_is_refused(tmp_path):
    bomb = struct.pack("<I", 0xFFFFFFFF) + container.pack_index(b"\0" * 50_000_000)[4:]
    with pytest.raises(FormatError, match="declares"):
        container.unpack_index(bomb, "here")
    short = struct.pack("<I", 10) + container.pack_index(b"\0" * 50_000_000)[4:]
    with pytest.raises(FormatError, match="as long as"):
        container.unpack_index(short, "here")


def test_a_newer_format_is_refused_by_name(pair, tmp_path):
    old, new = pair
    path = tmp_path / "d"
    codec.write_delta(codec.diff(old, new), path)
    path.write_bytes(path.read_bytes().replace(b'"format_version":"1"', b'"format_version":"9"'))
    with pytest.raises(FormatError, match="format version 9"):
        codec.read_delta(path)


def test_other_files_are_no_deltas(tmp_path):
    safetensors.numpy.save_file({"w": np.zeros(3)}, tmp_path / "weights")
    with pytest.raises(FormatError, match="not that of a delta"):
        codec.read_delta(tmp_path / "weights")
    with pytest.raises(InvalidInput, match="no file"):
        codec.read_delta(tmp_path / "nothing")
    with pytest.raises(InvalidInput, match="folder"):
        codec.read_delta(tmp_path)


def test_a_failed_write_leaves_nothing_and_the_old_file(pair, tmp_path):
    old, new = pair
    path = tmp_path / "d"
    codec.write_delta(codec.diff(old, new), path)
    before = path.read_bytes()
    bad = codec.TensorChange(
        codec.spec_of("w", np.zeros(4, np.float32)), None, np.zeros(3, np.uint32), "0" * 32, None
    )
    with pytest.raises(InvalidInput):
        codec.write_delta(codec.Delta(codec.delta.Held([bad])), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["d"]
    with pytest.raises(InvalidInput, match="no folder"):
        codec.write_delta(codec.diff(old, new), tmp_path / "nowhere" / "d")


def test_a_merge_of_files_goes_through_a_file(tmp_path):
    versions = [{"w": array_of(random_bits("BF16", 500, 0), "BF16", (500,))}]
    for step in range(3):
        versions.append({"w": array_of(changed(codec.bits_of(versions[-1]["w"]), 0.1, step), "BF16", (500,))})
    for i in range(3):
        codec.write_delta(codec.diff(versions[i], versions[i + 1]).numbered(i, i + 1), tmp_path / str(i))
    codec.write_delta(codec.merge([codec.read_delta(tmp_path / str(i)) for i in range(3)]), tmp_path / "all")
    merged = codec.read_delta(tmp_path / "all")
    assert (merged.base, merged.version) == (0, 3)
    target = copies(versions[0])
    merged.apply_(target)
    assert same_bits(target["w"], versions[3]["w"])
