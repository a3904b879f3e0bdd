from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightline.errors import FormatError, InvalidInput
from weightline.store import checkpoint
from weightline.store import safetensors_file as files
from weightline.store.disk import Disk
from weightline.types import TensorSpec


def _file(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def _tensor(
    dtype: str = "U8", shape: list[int] | None = None, offsets: tuple[int, int] = (0, 4)
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [4] if shape is None else shape, "data_offsets": list(offsets)}


HOSTILE = {
    "empty": ({}, b"x", None, "grown"),
    "no_json": (b"not json", b"", None, "header cannot be read"),
    "not_utf8": (b'{"\xff\xfe": {}}', b"", None, "header cannot be read"),
    "a_list": ([1], b"", None, "header cannot be read"),
    "header_longer_than_the_file": ({}, b"", 10**6, "header declares"),
    "header_huge": ({}, b"", 2**63, "header declares"),
    "unknown_dtype": ({"a": _tensor("F4")}, b"1234", None, "dtype 'F4'"),
    "negative_side": ({"a": _tensor(shape=[-4])}, b"1234", None, "shape"),
    "negative_offset": ({"a": _tensor(offsets=(-4, 0))}, b"1234", None, "does not fit"),
    "too_short_for_its_shape": ({"a": _tensor(offsets=(0, 3))}, b"123", None, "does not fit"),
    "beyond_the_end": ({"a": _tensor(shape=[8], offsets=(0, 8))}, b"1234", None, "cut short"),
    "a_hole": ({"a": _tensor(), "b": _tensor(offsets=(5, 9))}, b"123456789", None, "does not fit"),
    "an_overlap": ({"a": _tensor(), "b": _tensor(offsets=(2, 6))}, b"123456", None, "does not fit"),
    "bytes_left_over": ({"a": _tensor()}, b"12345", None, "grown"),
    "metadata_not_strings": ({"__metadata__": {"a": 1}}, b"", None, "header cannot be read"),
    "missing_field": ({"a": {"dtype": "U8", "shape": [4]}}, b"1234", None, "header cannot be read"),
    "overflow": ({"a": _tensor("U8", [2**62, 2**62, 4])}, b"1234", None, "does not fit"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    header, data, length, fault = HOSTILE[name]
    path = _file(tmp_path / "hostile.safetensors", header, data, length=length)
    with pytest.raises(FormatError, match=fault) as caught:
        files.map_file(path)
    assert "hostile.safetensors" in caught.value.message


@pytest.mark.parametrize("length", [0, 1, 7])
def test_stubs_are_refused(tmp_path: Path, length: int) -> None:
    (tmp_path / "f").write_bytes(b"\0" * length)
    with pytest.raises(FormatError, match="no safetensors file"):
        files.map_file(tmp_path / "f")


def test_any_cut_is_noticed(tmp_path: Path) -> None:
    whole = _file(tmp_path / "w", {"a": _tensor()}, b"1234").read_bytes()
    assert files.map_file(tmp_path / "w")["a"].tobytes() == b"1234"
    for length in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(FormatError):
            files.map_file(tmp_path / "cut")


def test_the_reference_reader_opens_what_is_written(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    arrays = {
        "b": np.arange(6, dtype=np.float64).reshape(2, 3),
        "a": np.array(3, np.int8),
        "e": np.empty((0, 4), "f4"),
    }
    specs = [TensorSpec("b", "F64", (2, 3)), TensorSpec("a", "I8", ()), TensorSpec("e", "F32", (0, 4))]

    def bits(name: str) -> Any:
        flat = arrays[name].reshape(-1)
        return flat.view(f"u{flat.dtype.itemsize}")

    (blob,) = checkpoint.write_anchor(Disk(), tmp_path, specs, bits)
    assert blob.nbytes == (tmp_path / "model.safetensors").stat().st_size
    loaded = load_file(tmp_path / "model.safetensors")
    assert {n: (a.dtype, a.shape, a.tobytes()) for n, a in loaded.items()} == {
        n: (a.dtype, a.shape, a.tobytes()) for n, a in arrays.items()
    }


def test_the_bytes_of_an_anchor_stay_as_they_are(tmp_path: Path) -> None:
    specs = [TensorSpec("w", "U16", (2,)), TensorSpec("v", "U8", (1,))]
    bits = {"w": np.array([1, 2], np.uint16), "v": np.array([3], np.uint8)}
    checkpoint.write_anchor(Disk(), tmp_path, specs, bits.__getitem__)
    header = (
        b'{"__metadata__":{"format":"pt"},"w":{"dtype":"U16","shape":[2],"data_offsets":[0,4]},'
        b'"v":{"dtype":"U8","shape":[1],"data_offsets":[4,5]}}'
    )
    header += b" " * (-len(header) % 8)
    assert (tmp_path / "model.safetensors").read_bytes() == struct.pack(
        "<Q", len(header)
    ) + header + b"\1\0\2\0\3"


def test_shards_hold_every_tensor_once_and_no_more_than_their_size(tmp_path: Path) -> None:
    specs = [TensorSpec(f"t{i}", "U8", (10 * i,)) for i in range(8)]
    parts = checkpoint.shards(specs, 64)
    assert sorted(s.name for part in parts for s in part) == sorted(s.name for s in specs)
    assert all(len(part) == 1 or sum(s.shape[0] for s in part) <= 64 for part in parts)
    assert len(parts) > 1
    bits = {s.name: np.full(s.shape[0], 7, np.uint8) for s in specs}
    checkpoint.write_anchor(Disk(), tmp_path, specs, bits.__getitem__, shard_nbytes=64)
    assert {n: a.tobytes() for n, a in checkpoint.load_path(tmp_path).items()} == {
        n: a.tobytes() for n, a in bits.items()
    }


def test_a_header_that_readers_refuse_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_HEADER", 4096)
    specs = [TensorSpec(f"layer.{i}.weight", "U8", (1,)) for i in range(200)]
    parts = checkpoint.shards(specs, 1 << 30)
    assert len(parts) > 1
    assert all(len(files.header_bytes(part, {})) <= 4096 for part in parts)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidInput, match="model-00001-of-00002"):
        checkpoint.load_path(tmp_path)
    index["weight_map"] = {"a": "../outside.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidInput, match="outside"):
        checkpoint.load_path(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    for name in ("x.safetensors", "y.safetensors"):
        _file(tmp_path / name, {"a": _tensor()}, b"1234")
    index = {"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidInput, match="'a' is in two files"):
        checkpoint.load_path(tmp_path)
