"""The bench on a real RL step: the bounds are met, and its JSON has the keys that checks read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest_codec import array_of
from test_codec_files import save

from weightline import codec
from weightline.codec import bench, entropy

FIXTURE = Path(__file__).parent / "golden" / "rl-step.npz"


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """One optimizer step (AdamW, 1e-6) of three tensors of SmolLM2-135M in bf16: before and after, as
    files."""
    folder = tmp_path_factory.mktemp("step")
    arrays = np.load(FIXTURE)
    old, new = {}, {}
    for name in {key.rsplit(":", 1)[0] for key in arrays.files}:
        bits = arrays[f"{name}:old"]
        after = bits.copy()
        after[arrays[f"{name}:index"]] = arrays[f"{name}:new"]
        shape = tuple(arrays[f"{name}:shape"])
        old[name], new[name] = array_of(bits, "BF16", shape), array_of(after, "BF16", shape)
    save(folder / "old", old)
    save(folder / "new", new)
    return folder, old, new


def test_a_real_step_is_coded_at_the_bounds(step, tmp_path):
    _, old, new = step
    meter = entropy.Meter()
    for name in old:
        meter.add("BF16", codec.bits_of(old[name]), codec.bits_of(new[name]))
    bounds = meter.bounds()
    fast = codec.write_delta(codec.diff(old, new, level="fast"), tmp_path / "f", level="fast")
    dense = codec.write_delta(codec.diff(old, new, level="dense"), tmp_path / "d", level="dense")
    # A kilobyte for header, index and tables: on a whole model that is nothing, on three tensors it is all.
    assert fast <= 1.03 * bounds.order0_bytes + 1024
    assert dense <= 1.06 * bounds.exponent_bytes + 1024
    assert dense < fast < bounds.raw_bytes / 300


def test_the_bounds_of_a_message_that_can_be_counted_by_hand():
    old = np.zeros(1024, np.uint8)
    new = old.copy()
    new[:512] = 1
    meter = entropy.Meter()
    meter.add("U8", old, new)
    bounds = meter.bounds()
    assert (bounds.elements, bounds.changed, bounds.raw_bytes) == (1024, 512, 1024)
    assert bounds.order0_bytes == pytest.approx(128)
    assert bounds.exponent_bytes == pytest.approx(130)


def test_the_bench_reports_what_checks_read(step, monkeypatch):
    folder, *_ = step
    monkeypatch.setattr(bench, "TILED_BYTES", 1 << 22)
    monkeypatch.setattr(bench, "_ROUNDS", 1)
    report = json.loads(json.dumps(bench.bench_codec(folder / "old", folder / "new")))
    assert report["exact"] is True
    assert report["changed"] > 0
    assert {"elements", "raw_bytes", "order0_bound_bytes", "exponent_bound_bytes", "memcpy_GBps"} <= set(
        report
    )
    for level in ("fast", "dense"):
        keys = {"bytes", "ratio", "encode_x_memcpy", "decode_x_memcpy", "encode_GBps", "decode_GBps"}
        assert keys <= set(report["levels"][level])
        assert report["levels"][level]["bytes"] < report["baselines"]["index+value"]["bytes"]
    assert set(report["baselines"]) == {"index+value", "index+value+zstd", "XOR+zstd-1"}
