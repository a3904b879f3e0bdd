"""Bad input: one line that names the culprit, a hint, an exit code of its own; nothing is changed."""

import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from weightline.errors import STATUS

OLD = {"a.weight": np.arange(600, dtype=np.float32).reshape(20, 30), "b.bias": np.ones(5, np.float16)}


@pytest.fixture
def store(run_weightline, save_weights):
    """A store "ckpt" with one version."""
    assert run_weightline("commit", "ckpt", save_weights("old.safetensors", OLD)).code == 0
    return "ckpt"


def refused(outcome, kind, *mentions):
    """The command failed as `kind`, in one line and a hint, naming each of `mentions`."""
    assert outcome.code == STATUS[kind].exit_code, (outcome.code, outcome.err)
    lines = outcome.err.strip().splitlines()
    assert lines[0].startswith("error: ")
    assert lines[-1].startswith("hint: ")
    assert len(lines) == 2, outcome.err
    for mention in mentions:
        assert str(mention) in outcome.err
    assert outcome.out == ""
    return True


def still_whole(run_weightline, versions=1):
    report = run_weightline("verify", "ckpt", "--deep", "--json")
    assert (report.code, report.json()["versions"]) == (0, versions), report.out
    return True


@pytest.mark.parametrize(
    ("change", "mention"),
    [
        pytest.param({"c.extra": np.zeros(3, np.float32)}, "c.extra", id="unknown tensor"),
        pytest.param({"b.bias": None}, "b.bias", id="missing tensor"),
        pytest.param({"a.weight": OLD["a.weight"].T.copy()}, "a.weight", id="changed shape"),
        pytest.param({"b.bias": OLD["b.bias"].astype(np.float32)}, "b.bias", id="changed dtype"),
    ],
)
def test_weights_that_do_not_fit_the_head_need_an_anchor(
    run_weightline, save_weights, store, change, mention
):
    weights = {name: array for name, array in {**OLD, **change}.items() if array is not None}
    path = save_weights("new.safetensors", weights)
    assert refused(run_weightline("commit", store, path), "invalid_input", mention, "anchor")
    assert still_whole(run_weightline)
    assert run_weightline("commit", store, path, "--anchor", "--json").json()["version"] == 2


def test_all_misfits_are_listed_at_once(run_weightline, save_weights, store):
    path = save_weights("new.safetensors", {"a.weight": np.zeros(3, np.float32), "x": np.zeros(1, np.int8)})
    assert refused(run_weightline("commit", store, path), "invalid_input", "a.weight", "b.bias", "x")


def test_a_non_finite_value_is_refused_when_asked(run_weightline, save_weights, store):
    weights = {**OLD, "b.bias": np.array([1, np.nan, 1, 1, 1], np.float16)}
    path = save_weights("nan.safetensors", weights)
    assert refused(run_weightline("commit", store, path, "--check-finite"), "invalid_input", "b.bias")
    assert run_weightline("commit", store, path).code == 0


def test_a_label_is_used_once(run_weightline, store):
    assert run_weightline("commit", store, "old.safetensors", "--label", "best").code == 0
    again = run_weightline("commit", store, "old.safetensors", "--label", "best")
    assert refused(again, "invalid_input", "best")
    assert still_whole(run_weightline, 2)


@pytest.mark.parametrize(
    "args",
    [
        ("log", "nowhere"),
        ("show", "nowhere", "1"),
        ("checkout", "nowhere", "1", "out"),
        ("verify", "nowhere"),
        ("check", "nowhere", "--engine", "embedded=http://127.0.0.1:9"),
        ("follow", "nowhere", "--engine", "embedded=http://127.0.0.1:9"),
    ],
    ids=lambda a: a[0],
)
def test_reading_commands_do_not_create_a_store(run_weightline, tmp_path, args):
    assert refused(run_weightline(*args), "store_not_found", "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_an_unknown_version_names_the_newest(run_weightline, store):
    assert refused(run_weightline("show", store, 7), "version_not_found", "7", "1")
    assert refused(run_weightline("checkout", store, 7, "out"), "version_not_found", "7")


def test_checkout_never_overwrites(run_weightline, store, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    assert refused(run_weightline("checkout", store, 1, "out"), "invalid_input", "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["precious"]


@pytest.mark.parametrize("keep", [0, 4, 60, -1], ids=["empty", "4 bytes", "half a header", "one byte short"])
def test_a_truncated_weights_file_is_named(run_weightline, store, tmp_path, keep):
    data = (tmp_path / "old.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(data[:keep])
    assert refused(run_weightline("commit", store, "cut.safetensors"), "format", "cut.safetensors")
    assert still_whole(run_weightline)


def test_a_truncated_blob_is_found_and_never_loaded(run_weightline, store, tmp_path):
    folder = run_weightline("show", store, 1, "--json").json()["record"]["folder"]
    blob = tmp_path / store / folder / "model.safetensors"
    blob.chmod(0o644)
    os.truncate(blob, 100)
    assert refused(run_weightline("checkout", store, 1, "out"), "integrity", "model.safetensors")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", ["missing", "no weights", "not safetensors"])
def test_weights_that_are_none_are_named(run_weightline, tmp_path, what):
    path = tmp_path / "model"
    if what == "no weights":
        path.mkdir()
        (path / "config.json").write_text("{}")
    elif what == "not safetensors":
        path.write_text("these are not weights, whatever the suffix says")
    outcome = run_weightline("commit", "ckpt", path)
    assert outcome.code in (STATUS["invalid_input"].exit_code, STATUS["format"].exit_code)
    assert "model" in outcome.err
    assert "hint: " in outcome.err
    assert "Traceback" not in outcome.err


def test_a_full_disk_publishes_nothing_and_the_same_commit_works_later(run_weightline, save_weights, store):
    path = save_weights("new.safetensors", {**OLD, "a.weight": OLD["a.weight"] + 1})

    def little_room():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))

    outcome = run_weightline("commit", store, path, preexec=little_room)
    assert refused(outcome, "storage_full")
    assert still_whole(run_weightline)
    assert run_weightline("commit", store, path, "--json").json()["version"] == 2
    assert still_whole(run_weightline, 2)


def test_a_second_server_is_refused_and_the_first_goes_on(run_weightline, store, tmp_path):
    first = subprocess.Popen(
        [sys.executable, "-m", "weightline", "serve", store, "--runtime-dir", "rt", "--json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert '"ready"' in first.stdout.readline()
        second = run_weightline("serve", store, "--runtime-dir", "rt2")
        assert refused(second, "already_serving", first.pid)
        assert run_weightline("log", f"unix://{tmp_path}/rt/wl.sock", "--json").json()["versions"]
    finally:
        first.send_signal(signal.SIGTERM)
        assert first.wait(30) == 0
        first.stdout.close()
    assert not (tmp_path / "rt" / "wl.sock").exists()


@pytest.mark.torch
def test_a_port_in_use_is_named(run_weightline, tmp_path):
    from weightline.demo.models import tiny_model

    tiny_model(tmp_path / "tiny")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert refused(run_weightline("engine", "tiny", "--port", port), "unavailable", port)


@pytest.mark.torch
@pytest.mark.parametrize("lacks", ["folder", "weights", "config"])
def test_a_model_folder_that_is_none_is_named(run_weightline, tmp_path, lacks):
    model = tmp_path / "model"
    if lacks != "folder":
        from weightline.demo.models import tiny_model

        tiny_model(model)
        Path(model, {"weights": "model.safetensors", "config": "config.json"}[lacks]).unlink()
    assert refused(run_weightline("engine", model, "--port", 1), "invalid_input", "model")
    assert refused(run_weightline("demo", "--model", model), "invalid_input", "model")


def test_an_engine_kind_that_is_not_known_lists_those_that_are(run_weightline, store):
    outcome = run_weightline("follow", store, "--engine", "tensorflow=http://127.0.0.1:1")
    assert refused(outcome, "invalid_input", "tensorflow", "embedded")
    assert refused(run_weightline("follow", store, "--engine", "embedded"), "invalid_input", "KIND=URL")
