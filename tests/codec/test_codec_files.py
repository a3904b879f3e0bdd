"""Patches of safetensors files and sharded folders: exact, complete or absent, in bounded memory."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy
from conftest_codec import array_of, changed, random_bits

from weightline import codec
from weightline.codec import coding, weightfiles
from weightline.codec.files import apply_files, diff_files
from weightline.errors import FormatError, IntegrityError, InvalidInput


def save(path, weights, metadata=None):
    """A safetensors file written by hand, so that bf16 and fp8 need no torch."""
    table, at, data = {"__metadata__": metadata or {"format": "pt"}}, 0, []
    for name, array in weights.items():
        raw = codec.bits_of(array).tobytes()
        spec = codec.spec_of(name, array)
        table[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, at + len(raw)]}
        data.append(raw)
        at += len(raw)
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))


def model(seed, density=0.0):
    weights = {}
    shapes = (
        ("a", "BF16", (90, 70)), ("b", "F32", (33,)), ("c", "F8_E5M2", (128, 9)),
        ("d", "BF16", (5,)), ("e", "I64", ()), ("z", "F16", (0, 3)),
    )  # fmt: skip
    for at, (name, dtype, shape) in enumerate(shapes):
        bits = random_bits(dtype, int(np.prod(shape, dtype=int)), seed + at)
        weights[name] = array_of(changed(bits, density, 77 + at, 2), dtype, shape)
    return weights


def save_folder(folder, weights, shards=3):
    folder.mkdir()
    names = list(weights)
    placed = {}
    for k in range(shards):
        part = {name: weights[name] for name in names[k::shards]}
        file = f"model-{k + 1:05}-of-{shards:05}.safetensors"
        save(folder / file, part, {"format": "pt", "shard": str(k)})
        placed |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.txt").write_text("a b c")


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("level", ["fast", "dense"])
def test_a_patch_of_a_file_makes_the_new_file_byte_for_byte(level, tmp_path, monkeypatch):
    monkeypatch.setitem(coding.CHUNK_LOG2, level, 10)
    save(tmp_path / "old", model(1))
    save(tmp_path / "new", model(1, 0.1))
    seen = []
    patch = diff_files(
        tmp_path / "old",
        tmp_path / "new",
        tmp_path / "patch",
        level=level,
        progress=lambda *p: seen.append(p),
    )
    assert patch.nbytes == (tmp_path / "patch").stat().st_size
    assert seen[-1][0] == seen[-1][1] == patch.raw_nbytes
    assert seen == sorted(seen)
    written = apply_files(tmp_path / "old", tmp_path / "patch", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "new").read_bytes()
    assert written == (tmp_path / "new").stat().st_size
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "old", "out", "patch"]


def test_a_patch_is_the_file_that_diff_writes(tmp_path):
    old, new = model(1), model(1, 0.1)
    save(tmp_path / "old", old)
    save(tmp_path / "new", new)
    for level in ("fast", "dense"):
        diff_files(tmp_path / "old", tmp_path / "new", tmp_path / "one", level=level)
        codec.write_delta(codec.diff(old, new, level=level), tmp_path / "other", level=level)
        assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_a_sharded_folder_keeps_shards_index_config_and_tokenizer(tmp_path):
    save_folder(tmp_path / "old", model(1))
    save_folder(tmp_path / "new", model(1, 0.2))
    diff_files(tmp_path / "old", tmp_path / "new", tmp_path / "patch")
    apply_files(tmp_path / "old", tmp_path / "patch", tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "new")
    assert safetensors.numpy.load_file(tmp_path / "out" / "model-00002-of-00003.safetensors")["b"].shape == (
        33,
    )


def test_folders_with_other_shards_and_files_compare_by_name(tmp_path):
    save_folder(tmp_path / "old", model(1), shards=2)
    save(tmp_path / "new", dict(reversed(model(1, 0.2).items())))
    diff_files(tmp_path / "old", tmp_path / "new", tmp_path / "patch", level="fast")
    apply_files(tmp_path / "old", tmp_path / "patch", tmp_path / "out")
    for name, array in model(1, 0.2).items():
        located = weightfiles.locate(tmp_path / "out")[name]
        with weightfiles.Reader({name: located}) as reader:
            assert np.array_equal(reader.read(name, 0, array.size), codec.bits_of(array))


@pytest.mark.parametrize("whole", [False, True])
def test_absolute_deltas_apply_to_files_too(whole, tmp_path):
    save(tmp_path / "old", model(1))
    save(tmp_path / "new", model(1, 0.2))
    delta = codec.full(model(1, 0.2)) if whole else codec.diff(model(1), model(1, 0.2))
    codec.write_delta(delta, tmp_path / "patch")
    apply_files(tmp_path / "old", tmp_path / "patch", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "new").read_bytes()


def test_a_wrong_base_is_refused_and_leaves_nothing(tmp_path):
    save(tmp_path / "old", model(1))
    save(tmp_path / "new", model(1, 0.2))
    save(tmp_path / "wrong", model(2))
    for level in ("fast", "dense", "absolute"):
        if level == "absolute":
            codec.write_delta(codec.diff(model(1), model(1, 0.2)), tmp_path / "patch")
        else:
            diff_files(tmp_path / "old", tmp_path / "new", tmp_path / "patch", level=level)
        with pytest.raises(IntegrityError):
            apply_files(tmp_path / "wrong", tmp_path / "patch", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        assert not [p for p in tmp_path.iterdir() if p.name.endswith(".tmp")]


def test_mismatches_are_all_listed(tmp_path):
    save(tmp_path / "old", model(1))
    other = model(1)
    del other["a"]
    save(tmp_path / "new", other | {"b": np.zeros(3, np.float32), "more": np.zeros(1)})
    with pytest.raises(InvalidInput, match=r"missing 'a'.*unknown 'more'.*'b' was F32\[33\], is F32\[3\]"):
        diff_files(tmp_path / "old", tmp_path / "new", tmp_path / "patch")
    assert not (tmp_path / "patch").exists()


def test_bad_places_are_refused(tmp_path):
    save(tmp_path / "old", model(1))
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("no safetensors at all, but long enough")
    (tmp_path / "short").write_bytes(b"abc")
    cut = (tmp_path / "old").read_bytes()
    (tmp_path / "cut").write_bytes(cut[:-1])
    formats = dict.fromkeys(("text", "short", "cut"), FormatError)
    for place, error in (formats | dict.fromkeys(("empty", "nowhere"), InvalidInput)).items():
        with pytest.raises(error, match=place):
            diff_files(tmp_path / "old", tmp_path / place, tmp_path / "patch")
    with pytest.raises(InvalidInput, match="level"):
        diff_files(tmp_path / "old", tmp_path / "old", tmp_path / "patch", level="best")
    with pytest.raises(InvalidInput, match="no folder"):
        diff_files(tmp_path / "old", tmp_path / "old", tmp_path / "x" / "patch")
    diff_files(tmp_path / "old", tmp_path / "old", tmp_path / "patch")
    with pytest.raises(InvalidInput, match="there already"):
        apply_files(tmp_path / "old", tmp_path / "patch", tmp_path / "old")


def test_a_dtype_that_the_codec_does_not_know_is_refused_by_the_tensors_name(tmp_path):
    header = json.dumps({"q": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "old").write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    with pytest.raises(InvalidInput, match="'q' has dtype F4"):
        diff_files(tmp_path / "old", tmp_path / "old", tmp_path / "patch")


LIMIT = 192 << 20
CHILD = """
import resource, sys
from weightline import codec
from weightline.codec.files import diff_files, apply_files
codec.warm()
resource.setrlimit(resource.RLIMIT_DATA, ({limit}, {limit}))
patch = diff_files("old", "new", "patch")
assert patch.changed == 3, patch
apply_files("old", "patch", "out")
"""


def sparse_folder(folder, edits):
    """Eight times LIMIT of zeros that take no disk, in four shards, but for single bytes."""
    folder.mkdir()
    count = 8 * LIMIT // 4 // 2
    header = json.dumps({"w": {"dtype": "BF16", "shape": [count], "data_offsets": [0, 2 * count]}})
    for k in range(4):
        text = header.replace('"w"', f'"w{k}"').encode()
        with (folder / f"model-{k}.safetensors").open("wb") as handle:
            handle.write(struct.pack("<Q", len(text)) + text)
            handle.truncate(8 + len(text) + 2 * count)
            for shard, at, value in edits:
                if shard == k:
                    handle.seek(8 + len(text) + 2 * at)
                    handle.write(struct.pack("<H", value))


def test_a_folder_eight_times_the_memory_limit_is_patched(tmp_path):
    edits = [(0, 5, 7), (2, 55_555_555, 1), (3, 0, 0x3F80)]
    sparse_folder(tmp_path / "old", [])
    sparse_folder(tmp_path / "new", edits)
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1", "WEIGHTLINE_CODEC_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, "-c", CHILD.format(limit=LIMIT)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    assert (tmp_path / "patch").stat().st_size < 2000
    with weightfiles.Reader(located := weightfiles.locate(tmp_path / "out")) as reader:
        for shard, at, value in edits:
            assert reader.read(f"w{shard}", at, 1)[0] == value
        assert sum(int(np.count_nonzero(reader.read(name, 0, 1 << 20))) for name in located) == 2
