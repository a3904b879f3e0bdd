"""diff, apply and bench codec: a round trip on files and folders, and the JSON that scripts read."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file


@pytest.fixture
def two(tmp_path):
    """Files "old" and "new" that differ in 300 elements, by one unit in the last place."""
    rng = np.random.default_rng(0)
    old = {"a.weight": (rng.standard_normal((256, 300)) * 0.02).astype(ml_dtypes.bfloat16), "b": np.ones(5)}
    new = {name: array.copy() for name, array in old.items()}
    where = rng.choice(256 * 300, 300, replace=False)
    new["a.weight"].reshape(-1).view(np.uint16)[where] += 1
    save_file(old, tmp_path / "old")
    save_file(new, tmp_path / "new")


@pytest.mark.parametrize("level", ["fast", "dense"])
def test_a_patch_turns_old_into_new_byte_by_byte(two, run_weightline, tmp_path, level):
    made = run_weightline("diff", "old", "new", "-o", "patch", "--level", level, "--json")
    assert made.code == 0, made.err
    assert (made.json()["changed"], made.json()["level"]) == (300, level)
    assert made.json()["nbytes"] == (tmp_path / "patch").stat().st_size < 300 * 6
    assert run_weightline("apply", "old", "patch", "-o", "made", "--json").code == 0
    assert (tmp_path / "made").read_bytes() == (tmp_path / "new").read_bytes()


def test_a_patch_on_another_base_is_refused_and_writes_nothing(two, run_weightline, tmp_path):
    assert run_weightline("diff", "old", "new", "-o", "patch").code == 0
    outcome = run_weightline("apply", "new", "patch", "-o", "made")
    assert outcome.code != 0
    assert "a.weight" in outcome.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "old", "patch"]


def test_bench_codec_prints_every_figure_of_the_contract(two, run_weightline):
    figures = run_weightline("bench", "codec", "old", "new", "--json").json()
    assert figures["exact"] is True
    assert (figures["elements"], figures["changed"]) == (256 * 300 + 5, 300)
    assert {"raw_bytes", "order0_bound_bytes", "exponent_bound_bytes", "memcpy_GBps"} <= figures.keys()
    for level in ("fast", "dense"):
        wanted = {"bytes", "ratio", "encode_x_memcpy", "decode_x_memcpy", "encode_GBps", "decode_GBps"}
        assert wanted <= figures["levels"][level].keys()
    assert len(figures["baselines"]) == 3
    assert all({"bytes", "encode_x_memcpy"} <= row.keys() for row in figures["baselines"].values())
