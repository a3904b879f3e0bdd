from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightline import codec
from weightline.errors import (
    ConflictError,
    FormatError,
    InvalidInput,
    StoreNotFound,
    VersionNotFound,
    WriterFenced,
)
from weightline.store import Store


def test_versions_count_from_one_over_restarts(store: Store, weights: Any, changed: Any, same: Any) -> None:
    assert store.latest() is None
    assert store.writer().commit(weights, step=1).version == 1
    again = Store.open(store.root)
    assert again.writer().commit(changed(weights), step=2).version == 2
    assert [r.version for r in store.versions()] == [1, 2]
    assert same(store.load(1), weights)
    assert same(again.load(2), changed(weights))


def test_a_delta_is_small_and_names_its_base(store: Store, weights: Any, changed: Any) -> None:
    writer = store.writer()
    weights["embed.weight"] = np.zeros((256, 64), ml_dtypes.bfloat16)
    first = writer.commit(weights)
    second = writer.commit(changed(weights, 3))
    assert (first.kind, first.base, first.label) == ("anchor", None, f"1@{first.digest[:8]}")
    assert (second.kind, second.base, second.parent, second.changed) == ("delta", 1, 1, 3)
    assert second.nbytes < first.nbytes / 20
    assert second.elements == sum(a.size for a in weights.values())


def test_identical_weights_are_a_version_with_an_empty_delta(store: Store, weights: Any, same: Any) -> None:
    writer = store.writer()
    writer.commit(weights)
    record = writer.commit(weights)
    assert (record.version, record.changed) == (2, 0)
    assert store.fetch_delta(2).changed == ()
    assert same(store.load(2), weights)


DTYPES = sorted(codec.SUPPORTED)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(store: Store, dtype: str, same: Any) -> None:
    rng = np.random.default_rng(1)
    width = codec.width_of(dtype)

    def make() -> Any:
        raw = rng.integers(0, 2 if dtype == "BOOL" else 256, 24 * width, dtype=np.uint8)
        return raw.view(codec.numpy_dtype(dtype)).reshape(2, 3, 4)

    first, second = (
        {"w": make(), "z": make()[0, 0, 0:1].reshape(())},
        {"w": make(), "z": make()[0, 0, 0:1].reshape(())},
    )
    writer = store.writer()
    writer.commit(first)
    writer.commit(second)
    reader = Store.open(store.root)
    assert same(reader.load(1), first)
    assert same(reader.load(2), second)
    reader.checkout(2, store.root.parent / "out")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 65535), min_size=6, max_size=6), min_size=1, max_size=6))
def test_any_history_reads_back(tmp_path_factory: Any, history: list[list[int]]) -> None:
    store = Store.open(tmp_path_factory.mktemp("history") / "s", create=True)
    writer = store.writer()
    states = [{"w": np.array(bits, np.uint16).view(ml_dtypes.bfloat16)} for bits in history]
    for state in states:
        writer.commit(state)
    for version, state in enumerate(states, 1):
        assert store.load(version)["w"].tobytes() == state["w"].tobytes()
        for have in range(1, len(states) + 1):
            held = {"w": states[have - 1]["w"].copy()}
            store.fetch_delta(version, have).apply_(held)
            assert held["w"].tobytes() == state["w"].tobytes()
    assert store.verify(deep=True).ok
    store.close()


def test_layouts_that_are_not_contiguous_are_stored_right(store: Store, same: Any) -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    odd = {
        "f": np.asfortranarray(base),
        "t": base.T,
        "s": base[:, ::2],
        "b": np.broadcast_to(base[0], (3, 6)),
    }
    store.writer().commit(odd)
    assert same(store.load(1), {name: np.ascontiguousarray(a) for name, a in odd.items()})


def test_names_that_share_storage_are_both_kept(store: Store, weights: Any) -> None:
    weights["lm_head.weight"] = weights["embed.weight"]
    writer = store.writer()
    writer.commit(weights)
    weights["embed.weight"][0, 0] = 7
    assert store.load(1)["lm_head.weight"][0, 0] != 7
    assert writer.commit(weights).changed == 2
    assert store.load(2)["lm_head.weight"][0, 0] == 7


def test_the_writer_does_not_alias_the_callers_memory(store: Store, weights: Any, same: Any) -> None:
    writer = store.writer()
    before = {name: array.copy() for name, array in weights.items()}
    writer.commit(weights)
    weights["embed.weight"][...] = 0
    writer.commit(weights)
    assert same(store.load(1), before)
    assert same(store.load(2), weights)


# What is offered --------------------------------------------------------------------------------------------


def test_all_misfits_are_listed_and_nothing_happens(store: Store, weights: Any) -> None:
    writer = store.writer()
    writer.commit(weights)
    wrong = {
        "embed.weight": weights["embed.weight"].astype(np.float32),
        "norm.weight": np.ones(9, np.float32),
        "extra": np.ones(1, np.float32),
    }
    with pytest.raises(InvalidInput) as caught:
        writer.commit(wrong)
    for name in ("embed.weight", "norm.weight", "extra", "scale"):
        assert name in caught.value.message
    assert "partial=True" in caught.value.hint
    assert "anchor=True" in caught.value.hint
    assert store.refresh() == 1
    assert len(list((store.root / "versions").iterdir())) == 1


def test_partial_leaves_the_rest_as_it_was(store: Store, weights: Any, same: Any) -> None:
    writer = store.writer()
    writer.commit(weights)
    record = writer.commit({"scale": np.array(2.0, np.float32)}, partial=True)
    assert record.changed == 1
    assert same(store.load(2), weights | {"scale": np.array(2.0, np.float32)})
    with pytest.raises(InvalidInput, match="unknown 'other'"):
        writer.commit({"other": np.ones(1, np.float32)}, partial=True)


def test_an_anchor_may_change_the_model(store: Store, weights: Any, same: Any) -> None:
    writer = store.writer()
    writer.commit(weights)
    grown = {"embed.weight": np.zeros((20, 8), np.float32), "new": np.ones(2, np.int8)}
    record = writer.commit(grown, anchor=True)
    assert (record.base, record.parent, record.kind) == (None, 1, "anchor")
    assert same(store.load(2), grown)
    assert writer.commit(grown).base == 2
    # Nothing leads over the change but the whole weights.
    assert store.fetch_delta(2, 1).base is None
    assert store.fetch_delta(1, 2).base is None


def test_an_anchor_with_a_base_carries_its_delta_too(store: Store, weights: Any, changed: Any) -> None:
    writer = store.writer()
    writer.commit(weights)
    record = writer.commit(changed(weights), anchor=True)
    assert (record.kind, record.base) == ("anchor", 1)
    folder = store.root / record.folder
    assert (folder / "delta.safetensors").exists()
    assert (folder / "model.safetensors").exists()
    assert store.fetch_delta(2, 1).elements == 1


def test_an_anchor_comes_by_itself_when_deltas_outweigh_one(store: Store) -> None:
    writer = store.writer()
    rng = np.random.default_rng(3)
    kinds = [writer.commit({"w": rng.integers(0, 256, 4096, dtype=np.uint8)}).kind for _ in range(6)]
    assert kinds[0] == "anchor"
    assert "anchor" in kinds[1:]


def test_deltas_are_taken_when_they_fit_the_newest(
    store: Store, weights: Any, changed: Any, same: Any
) -> None:
    writer = store.writer()
    writer.commit(codec.full(weights))
    second = changed(weights)
    writer.commit(codec.diff(weights, second))
    assert same(store.load(2), second)
    with pytest.raises(ConflictError, match="does not start from version 2"):
        writer.commit(codec.diff(weights, changed(weights, 2, seed=5)))
    with pytest.raises(ConflictError, match="against version 1, the newest is 2"):
        writer.commit(codec.diff(second, weights).numbered(1, None))
    assert store.refresh() == 2


def test_a_delta_for_an_empty_store_is_refused(store: Store, weights: Any, changed: Any) -> None:
    with pytest.raises(ConflictError, match="empty"):
        store.writer().commit(codec.diff(weights, changed(weights)))


def test_files_and_folders_are_taken(
    store: Store, weights: Any, changed: Any, same: Any, tmp_path: Path
) -> None:
    source = Store.open(tmp_path / "source", create=True, shard_nbytes=200)
    source.writer().commit(weights)
    source.checkout(1, tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    (tmp_path / "hf" / "config.json").write_text("{}")
    writer = store.writer()
    writer.commit(tmp_path / "hf")
    assert same(store.load(1), weights)
    assert [p.name for p in store.model_files(1)] == ["config.json"]
    codec.write_delta(codec.diff(weights, changed(weights)), tmp_path / "d.safetensors")
    writer.commit(str(tmp_path / "d.safetensors"))
    assert same(store.load(2), changed(weights))
    source.close()


@pytest.mark.parametrize(
    ("make", "error", "fault"),
    [
        (lambda p: None, InvalidInput, "no file or folder"),
        (lambda p: p.mkdir(), InvalidInput, "holds no weights"),
        (lambda p: p.write_bytes(b"123"), FormatError, "no safetensors file"),
        (lambda p: p.write_bytes(b"\xff" * 64), FormatError, "header declares"),
    ],
    ids=["absent", "no_weights", "cut_short", "noise"],
)
def test_paths_without_weights_are_refused_by_name(
    store: Store, tmp_path: Path, make: Any, error: Any, fault: str
) -> None:
    make(tmp_path / "given")
    with pytest.raises(error, match=fault) as caught:
        store.writer().commit(tmp_path / "given")
    assert "given" in caught.value.message
    assert caught.value.hint
    assert store.refresh() is None


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"label": "3@01234567"}, "reserved form"),
        ({"step": "one"}, "step is a str"),
        ({"colour": 1}, "unknown option 'colour'"),
        ({"metadata": {"x": object()}}, "metadata cannot be stored"),
        ({"attachments": {"../x": b""}}, "not a plain file name"),
        ({"attachments": {"x": "/nowhere/at/all"}}, "is not a file"),
        ({"model_files": "/nowhere/at/all"}, "not a folder"),
    ],
)
def test_options_that_cannot_be_are_refused(store: Store, weights: Any, options: Any, fault: str) -> None:
    with pytest.raises(InvalidInput, match=fault):
        store.writer().commit(weights, **options)
    assert store.refresh() is None


@pytest.mark.parametrize(
    "given", [5, [1], {"": np.ones(1)}, {1: np.ones(1)}, {}, {"w": [1.0]}, {"w": np.array(["a"])}]
)
def test_what_are_no_weights_is_refused(store: Store, given: Any) -> None:
    with pytest.raises(InvalidInput):
        store.writer().commit(given)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2", "C64"])
def test_values_that_are_not_finite_are_refused_when_asked(store: Store, dtype: str) -> None:
    array = np.zeros(8, codec.numpy_dtype(dtype))
    writer = store.writer()
    writer.commit({"w": array, "i": np.full(3, 255, np.uint8)}, check_finite=True)
    array[5] = np.nan
    with pytest.raises(InvalidInput, match="'w' at element 5"):
        writer.commit({"w": array, "i": np.zeros(3, np.uint8)}, check_finite=True)
    assert store.refresh() == 1
    assert writer.commit({"w": array, "i": np.zeros(3, np.uint8)}).version == 2


# Identity ---------------------------------------------------------------------------------------------------


def test_a_repeated_commit_id_is_the_same_version(store: Store, weights: Any, changed: Any) -> None:
    writer = store.writer()
    first = writer.commit(weights, commit_id="step-1")
    writer.commit(changed(weights))
    assert writer.commit(weights, commit_id="step-1").version == first.version
    fresh = Store.open(store.root).writer()
    assert fresh.commit(weights, commit_id="step-1").version == 1
    assert fresh.epoch is None
    assert store.refresh() == 2
    with pytest.raises(ConflictError, match="commit_id 'step-1' names another commit already: version 1"):
        writer.commit(changed(weights), commit_id="step-1")


def test_a_label_is_used_once(store: Store, weights: Any) -> None:
    writer = store.writer()
    assert writer.commit(weights, label="best").label == "best"
    with pytest.raises(InvalidInput, match="label 'best' is already that of version 1"):
        writer.commit(weights, label="best")
    assert store.state.by_label("best") is not None
    assert len(list((store.root / "versions").iterdir())) == 1


def test_opening_fences_nobody_and_the_first_commit_does(store: Store, weights: Any, changed: Any) -> None:
    old = store.writer()
    old.commit(weights)
    other = Store.open(store.root)
    new = other.writer()
    old.commit(changed(weights))
    assert new.commit(changed(weights, 2)).epoch == 2
    with pytest.raises(WriterFenced):
        old.commit(weights)
    assert store.refresh() == 3
    assert new.commit(weights).version == 4
    assert len(list((store.root / "versions").iterdir())) == 4


def test_a_staging_whose_base_was_overtaken_is_refused(store: Store, weights: Any, changed: Any) -> None:
    writer = store.writer()
    writer.commit(weights)
    early, late = writer.stage(changed(weights)), writer.stage(changed(weights, 2))
    assert writer.publish(late).version == 2
    with pytest.raises(ConflictError, match="against version 1"):
        writer.publish(early)
    assert early.folder is not None
    assert not early.folder.exists()


def test_staging_is_invisible_and_can_be_dropped(store: Store, weights: Any) -> None:
    writer = store.writer()
    staged = writer.stage(weights)
    assert Store.open(store.root).latest() is None
    writer.abort(staged)
    assert list((store.root / "versions").iterdir()) == []
    assert writer.commit(weights).version == 1


def test_a_published_version_survives_a_late_abort(store: Store, weights: Any, same: Any) -> None:
    writer = store.writer()
    staged = writer.stage(weights)
    writer.publish(staged)
    writer.abort(staged)
    assert same(store.load(1), weights)


# Recovery ---------------------------------------------------------------------------------------------------


def test_recovery_goes_back_and_the_lineage_says_so(
    store: Store, weights: Any, changed: Any, same: Any
) -> None:
    writer = store.writer()
    states = [changed(weights, k, seed=k) for k in range(1, 5)]
    for step, state in enumerate(states, 1):
        writer.commit(state, step=step, attachments={"opt": f"state {step}".encode()} if step == 2 else {})
    restarted = Store.open(store.root)
    found = restarted.recover()
    assert (found.version, found.step, found.attachments["opt"].read_bytes()) == (2, 2, b"state 2")
    assert same(found.weights(), states[1])
    record = restarted.writer().commit(changed(states[1], 1, seed=9), step=3)
    assert (record.version, record.parent, record.base) == (5, 2, 4)
    assert [r.version for r in restarted.versions() if r.abandoned] == [3, 4]
    assert same(store.load(5), changed(states[1], 1, seed=9))
    assert restarted.recover().version == 2


def test_recovery_needs_attachments(store: Store, weights: Any) -> None:
    store.writer().commit(weights)
    with pytest.raises(VersionNotFound, match="attachments"):
        store.recover()


def test_attachments_may_be_files(store: Store, weights: Any, tmp_path: Path) -> None:
    (tmp_path / "o.pt").write_bytes(b"x" * 10_000)
    record = store.writer().commit(weights, attachments={"trainer": tmp_path / "o.pt", "rng": b"1"})
    assert record.attachments == ("rng", "trainer")
    assert store.attachments(1)["trainer"].read_bytes() == b"x" * 10_000


# The place --------------------------------------------------------------------------------------------------


def test_a_store_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound, match="nowhere"):
        Store.open(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_a_file_is_no_place_for_a_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidInput, match="not a folder"):
        Store.open(tmp_path / "file", create=True)


def test_other_formats_are_refused_by_name(store: Store) -> None:
    run = json.loads((store.root / "run.json").read_text())
    (store.root / "run.json").write_text(json.dumps(run | {"format": 7}))
    with pytest.raises(FormatError, match="format 7"):
        Store.open(store.root)
    (store.root / "run.json").write_text("{")
    with pytest.raises(FormatError, match=r"run\.json"):
        Store.open(store.root)


def test_two_who_create_one_store_get_the_same_run(tmp_path: Path) -> None:
    assert Store.open(tmp_path / "s", create=True).run == Store.open(tmp_path / "s", create=True).run


def test_a_place_without_hard_links_is_refused(
    store: Store, weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(InvalidInput, match="hard links"):
        store.writer()


def test_fsyncs_of_a_commit_are_those_that_the_docs_state(
    store: Store, weights: Any, changed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/format.md states them: each is one wait for the disk on the way of a commit."""
    writer = store.writer()
    writer.commit(weights)
    calls = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(fd), real(fd)))
    weights = {**weights, "big": np.zeros(4096, np.float32)}
    writer.commit(weights, anchor=True)
    counted = {"whole": len(calls)}
    for name, options in (
        ("delta", {}),
        ("both", {"anchor": True}),
        ("attachment", {"attachments": {"t": b"1"}}),
    ):
        calls.clear()
        weights = changed(weights, 1, seed=len(name))
        writer.commit(weights, **options)
        counted[name] = len(calls)
    assert counted == {"whole": 10, "delta": 11, "both": 12, "attachment": 13}
