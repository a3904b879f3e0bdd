"""The C library: built once, by many at once, never required."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

CHILD = """
import sys, numpy as np
from weightline import codec
from weightline.codec import backend
name = backend.engine().__name__
old = np.arange(5000, dtype=np.float32)
new = old.copy(); new[7] += 1
assert codec.diff({"w": old}, {"w": new}).change("w").index.tolist() == [7]
print(name, codec.digest_of(codec.bits_of(new)))
"""


def run(env, count=1):
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD],
            env=os.environ | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    out = []
    for child in children:
        stdout, stderr = child.communicate(timeout=100)
        assert child.returncode == 0, stderr
        out.append(stdout.split())
    return out


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A cache that three processes filled at once, and what they said."""
    cache = tmp_path_factory.mktemp("native") / "cache"
    return cache, run({"WEIGHTLINE_CACHE": str(cache)}, 3)


def test_many_processes_build_it_at_once_and_one_file_is_left(built):
    cache, found = built
    assert {name for name, _ in found} == {"weightline.codec.native"}
    assert len({value for _, value in found}) == 1
    files = list(cache.iterdir())
    assert len(files) == 1
    assert files[0].suffix == ".so"


def test_numba_does_the_work_where_c_is_turned_off_or_cannot_be_built(tmp_path, built):
    blocked = tmp_path / "file"
    blocked.write_text("a file where the cache folder should be")
    turned_off = run({"WEIGHTLINE_NATIVE": "0"})[0]
    cannot = run({"WEIGHTLINE_CACHE": str(blocked)})[0]
    no_compiler = run({"WEIGHTLINE_CACHE": str(tmp_path / "empty"), "PATH": str(tmp_path), "CC": ""})[0]
    native = built[1][0]
    assert turned_off[0] == cannot[0] == no_compiler[0] == "weightline.codec.kernels"
    assert native[0] == "weightline.codec.native"
    assert turned_off[1] == cannot[1] == no_compiler[1] == native[1]


def test_a_damaged_library_in_the_cache_is_not_fatal(tmp_path, built):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / next(built[0].iterdir()).name).write_bytes(b"not a library")
    assert run({"WEIGHTLINE_CACHE": str(cache)})[0][0] == "weightline.codec.kernels"


@pytest.mark.parametrize("threads", ["1", "3"])
def test_threads_do_not_change_a_byte(threads, tmp_path, monkeypatch):
    from weightline import codec

    monkeypatch.setenv("WEIGHTLINE_CODEC_THREADS", threads)
    rng = np.random.default_rng(0)
    old = {f"t{i}": rng.normal(size=900_000).astype(np.float32) for i in range(12)}
    new = {name: array.copy() for name, array in old.items()}
    for array in new.values():
        array[rng.integers(0, array.size, 500)] *= np.float32(1.0001)
    codec.write_delta(codec.diff(old, new, level="dense"), tmp_path / "d", level="dense")
    monkeypatch.setenv("WEIGHTLINE_CODEC_THREADS", "2")
    codec.write_delta(codec.diff(old, new, level="dense"), tmp_path / "e", level="dense")
    assert (tmp_path / "d").read_bytes() == (tmp_path / "e").read_bytes()
