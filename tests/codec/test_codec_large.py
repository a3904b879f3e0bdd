"""More elements than 31 bits count, and what a codec call may take of memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
from conftest_codec import array_of, changed, random_bits

from weightline import codec


def test_more_than_two_to_the_31_elements(tmp_path):
    count = (1 << 31) + 12_345
    arrays = []
    for name in ("old", "new"):
        with (tmp_path / name).open("wb") as handle:
            handle.truncate(count)
        arrays.append(np.memmap(tmp_path / name, np.uint8, "r+"))
    old, new = arrays
    edits = [0, 1 << 20, (1 << 31) - 1, 1 << 31, count - 1]
    new[edits] = 9
    known = "0" * 32
    zero_digest = codec.digest_of(codec.bits_of(old))
    delta = codec.diff({"w": old}, {"w": new}, old_digests={"w": zero_digest}, level="fast")
    assert zero_digest != known
    assert delta.change("w").index.tolist() == edits
    assert codec.write_delta(delta, tmp_path / "d", level="fast") < 3000
    assert codec.write_delta(delta, tmp_path / "a") < 3000
    for name in ("d", "a"):
        undo = codec.read_delta(tmp_path / name).apply_({"w": old}, digests={"w": zero_digest})
        assert old[edits].tolist() == [9] * 5
        undo.restore()
        assert not old[edits].any()


def test_an_unchanged_tensor_costs_at_most_sixteen_bytes_a_million_elements(tmp_path):
    frozen = {f"layer.{i}.weight": np.zeros(1_000_000, np.uint8) for i in range(30)}
    moved = frozen | {"layer.3.weight": frozen["layer.3.weight"].copy()}
    moved["layer.3.weight"][7] = 1
    for level in ("fast", "dense"):
        alone = {"layer.3.weight": frozen["layer.3.weight"]}, {"layer.3.weight": moved["layer.3.weight"]}
        one = codec.write_delta(codec.diff(*alone, level=level), tmp_path / "one", level=level)
        many = codec.write_delta(codec.diff(frozen, moved, level=level), tmp_path / "many", level=level)
        assert many - one <= 16 * 29


def test_a_diff_takes_memory_for_the_changes_and_a_batch_a_thread(tmp_path):
    bits = random_bits("BF16", 1 << 24, 1)
    old, new = array_of(bits, "BF16", (1 << 24,)), array_of(changed(bits, 0.001, 2, 1), "BF16", (1 << 24,))
    codec.set_threads(1)
    try:
        codec.diff({"w": old}, {"w": new}, level="fast")  # the scratch of this thread stays for the next call
        tracemalloc.start()
        delta = codec.diff({"w": old}, {"w": new}, old_digests={"w": "0" * 32}, level="fast")
        _, peak = tracemalloc.get_traced_memory()
        assert peak < 4 * (8 * delta.elements) + (1 << 20)
    finally:
        tracemalloc.stop()
        codec.set_threads(None)
