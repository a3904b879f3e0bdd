"""commit, log, show, checkout, verify: the main path of each, and the JSON that scripts read."""

import numpy as np
import pytest
from safetensors.numpy import load_file


@pytest.fixture
def two_versions(run_weightline, save_weights, tmp_path):
    """A store "ckpt" with versions 1 and 2, which differ in 3 elements."""
    old = {"a.weight": np.arange(2400, dtype=np.float16).reshape(40, 60), "b.bias": np.zeros(5, np.float32)}
    new = {name: array.copy() for name, array in old.items()}
    new["a.weight"][1, 2:4] += 1
    new["b.bias"][4] = -0.0
    first = run_weightline("commit", "ckpt", save_weights("old.safetensors", old), "--step", 10, "--json")
    second = run_weightline("commit", "ckpt", save_weights("new.safetensors", new), "--step", 11, "--json")
    assert (first.code, second.code) == (0, 0), first.err + second.err
    return old, new, first.json(), second.json()


def test_commit_counts_versions_from_one_and_tells_what_it_stored(two_versions):
    _, _, first, second = two_versions
    assert (first["version"], first["kind"], first["changed"], first["step"]) == (1, "anchor", 2405, 10)
    assert (second["version"], second["kind"], second["changed"], second["step"]) == (2, "delta", 3, 11)
    assert first["label"].startswith("1@")
    assert second["label"] == f"2@{second['digest'][:8]}"
    assert second["nbytes"] > 0


def test_log_prints_the_newest_first_and_honours_the_limit(two_versions, run_weightline):
    history = run_weightline("log", "ckpt", "--json").json()
    assert [v["version"] for v in history["versions"]] == [2, 1]
    assert [v["parent"] for v in history["versions"]] == [1, None]
    assert [v["version"] for v in run_weightline("log", "ckpt", "-n", 1, "--json").json()["versions"]] == [2]
    assert "2@" in run_weightline("log", "ckpt").out


def test_show_tells_record_and_every_tensor(two_versions, run_weightline):
    shown = run_weightline("show", "ckpt", 2, "--json").json()
    assert shown["record"]["base"] == 1
    assert [t["spec"]["name"] for t in shown["manifest"]["tensors"]] == ["a.weight", "b.bias"]
    assert "a.weight  F16 [40, 60]" in run_weightline("show", "ckpt", 2).out


def test_checkout_gives_back_the_exact_bits_of_each_version(two_versions, run_weightline, tmp_path):
    old, new, *_ = two_versions
    for version, expected in ((1, old), (2, new)):
        outcome = run_weightline("checkout", "ckpt", version, f"out-{version}", "--json")
        assert outcome.code == 0, outcome.err
        written = load_file(tmp_path / f"out-{version}" / "model.safetensors")
        assert {n: a.tobytes() for n, a in written.items()} == {n: a.tobytes() for n, a in expected.items()}


def test_verify_passes_on_a_whole_store_and_fails_on_a_flipped_byte(two_versions, run_weightline, tmp_path):
    whole = run_weightline("verify", "ckpt", "--deep", "--json")
    assert (whole.code, whole.json()["ok"], whole.json()["versions"]) == (0, True, 2)
    folder = run_weightline("show", "ckpt", 2, "--json").json()["record"]["folder"]
    blob = tmp_path / "ckpt" / folder / "delta.safetensors"
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(data)
    damaged = run_weightline("verify", "ckpt", "--json")
    assert damaged.code != 0
    assert [p["version"] for p in damaged.json()["problems"]] == [2]
    assert "delta.safetensors" in damaged.json()["problems"][0]["path"]


def test_the_store_may_come_from_the_environment(two_versions, run_weightline):
    env = {"WEIGHTLINE_STORE": "ckpt"}
    assert run_weightline("log", "--json", env=env).json()["versions"][0]["version"] == 2
    assert run_weightline("show", 1, "--json", env=env).json()["record"]["version"] == 1
    assert run_weightline("commit", "new.safetensors", "--step", 12, "--json", env=env).json()["version"] == 3
    # An argument on the command line goes before the variable.
    assert run_weightline("show", "ckpt", 1, "--json", env={"WEIGHTLINE_STORE": "elsewhere"}).code == 0


def test_the_same_commit_id_is_one_version(two_versions, run_weightline):
    args = ("commit", "ckpt", "old.safetensors", "--commit-id", "step-12", "--json")
    assert run_weightline(*args).json()["version"] == run_weightline(*args).json()["version"] == 3


def test_every_command_has_help_with_an_example(run_weightline):
    commands = [
        line.split()[1]
        for line in run_weightline("--help").out.splitlines()
        if line.startswith("│") and line[2:3].isalpha()
    ]
    assert len(commands) >= 11
    for command in commands:
        outcome = run_weightline(command, "--help")
        assert outcome.code == 0
        assert f"Example: weightline {command}" in outcome.out


def test_doctor_says_what_works_here(run_weightline):
    report = run_weightline("doctor", "--json")
    assert report.code == 0, report.out
    states = {f["name"]: f["state"] for f in report.json()["findings"]}
    assert states["store place"] in ("ok", "warn")
    assert states["numba"] == "ok"


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("missing", ()),
        ("weights", ("--label", "default")),
        ("weights", ("--attachment", "t=nowhere")),
        ("weights", ("--step", "-1")),
        ("nan", ("--check-finite",)),
    ],
)
def test_a_refused_commit_leaves_no_empty_store(run_weightline, save_weights, tmp_path, what, options):
    path = tmp_path / "missing"
    if what != "missing":
        value = np.nan if what == "nan" else 1.0
        path = save_weights("w.safetensors", {"w": np.full(4, value, np.float32)})
    refused = run_weightline("commit", "fresh", path, *options)
    assert refused.code == 2, refused.err
    assert not (tmp_path / "fresh").exists()
