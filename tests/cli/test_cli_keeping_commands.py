"""gc, pin, unpin, yank, recover, verify --repair: the main path of each, and the JSON that scripts read."""

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from s3_world import CONTAINER


def weights(version):
    values = np.arange(4096, dtype=np.float32).reshape(64, 64)
    values.reshape(-1)[: version * 3] += version
    return {"w": values}


@pytest.fixture
def commit(run_weightline, save_weights):
    """`commit(store, version, *options)`."""

    def run(store, version, *options):
        path = save_weights(f"v{version}.safetensors", weights(version))
        outcome = run_weightline("commit", store, path, "--step", 10 * version, "--json", *options)
        assert outcome.code == 0, outcome.err
        return outcome.json()["version"]

    return run


@pytest.fixture
def four_anchors(commit):
    """A store "ckpt" with four anchors."""
    for version in range(1, 5):
        assert commit("ckpt", version, "--anchor") == version


def left(run_weightline, store="ckpt"):
    return [
        v["version"] for v in run_weightline("log", store, "--json").json()["versions"] if not v["retired"]
    ]


def test_gc_explains_every_version_and_changes_nothing_when_dry(four_anchors, run_weightline):
    told = run_weightline("gc", "ckpt", "--disk-budget", 20_000, "--dry-run", "--json").json()
    assert [e["version"] for e in told["versions"]] == [1, 2, 3, 4]
    assert all(e["why"] for e in told["versions"])
    assert {e["action"] for e in told["versions"]} > {"keep"}
    assert (told["retired"], told["deleted"], told["swept"]) == ([], [], [])
    assert left(run_weightline) == [4, 3, 2, 1]
    assert "the newest" in run_weightline("gc", "ckpt", "--disk-budget", 20_000, "--dry-run").out


def test_gc_lets_go_of_what_a_pin_does_not_hold(four_anchors, run_weightline, tmp_path):
    folders = {v: run_weightline("show", "ckpt", v, "--json").json()["record"]["folder"] for v in range(1, 5)}
    assert run_weightline("pin", "ckpt", 1, "--json").json() == {"version": 1, "pinned": True}
    done = run_weightline("gc", "ckpt", "--disk-budget", 1, "--grace", 0, "--json").json()
    assert done["freed_nbytes"] > 0
    assert 1 not in done["retired"]
    assert {1, 4} <= set(left(run_weightline))
    gone = set(range(1, 5)) - set(left(run_weightline))
    assert gone
    assert not any((tmp_path / "ckpt" / folders[v]).exists() for v in gone)
    assert run_weightline("checkout", "ckpt", 1, "one").code == 0
    assert run_weightline("unpin", "ckpt", 1, "--json").json() == {"version": 1, "pinned": False}
    run_weightline("gc", "ckpt", "--disk-budget", 1, "--grace", 0)
    assert left(run_weightline) == [4]
    assert run_weightline("verify", "ckpt", "--deep").code == 0
    refused = run_weightline("pin", "ckpt", 1)
    assert refused.code == 8
    assert "version 1" in refused.err


@pytest.mark.parametrize("name", ["pin", "unpin", "yank"])
def test_a_version_that_never_was_is_not_found(four_anchors, run_weightline, name):
    outcome = run_weightline(name, "ckpt", 99)
    assert outcome.code == 7
    assert "99" in outcome.err


def test_yank_marks_a_version_for_everybody(four_anchors, run_weightline):
    assert run_weightline("yank", "ckpt", 3, "--reason", "reward hacking", "--json").json()["yanked"] is True
    assert run_weightline("show", "ckpt", 3, "--json").json()["record"]["yanked"] is True
    assert "yanked" in run_weightline("log", "ckpt").out


def test_recover_gives_weights_step_and_attachments_of_one_version(commit, run_weightline, tmp_path):
    (tmp_path / "opt.bin").write_bytes(b"adam at 20")
    commit("ckpt", 1)
    commit("ckpt", 2, "--attachment", "opt=opt.bin")
    commit("ckpt", 3)
    told = run_weightline("recover", "ckpt", "--out", "resume", "--json").json()
    assert (told["version"], told["step"], told["newest"]) == (2, 20, 3)
    assert (tmp_path / "resume" / "attachments" / "opt").read_bytes() == b"adam at 20"
    assert load_file(tmp_path / "resume" / "model.safetensors")["w"].tobytes() == weights(2)["w"].tobytes()
    assert "step 20" in run_weightline("recover", "ckpt").out
    assert run_weightline("recover", "ckpt", "--out", "resume").code == 2


def test_recover_without_attachments_says_what_to_do(four_anchors, run_weightline):
    outcome = run_weightline("recover", "ckpt")
    assert outcome.code == 7
    assert "attachments" in outcome.err


def test_verify_repair_heals_a_replaced_disk_of_a_mirror(commit, run_weightline, tmp_path):
    store = f"mirror:{tmp_path / 'a'},{tmp_path / 'b'}?cache={tmp_path / 'cache'}"
    for version in (1, 2):
        assert commit(store, version) == version
    shutil.rmtree(tmp_path / "a")
    assert [v["version"] for v in run_weightline("log", store, "--json").json()["versions"]] == [2, 1]
    assert run_weightline("verify", store).code == 9
    healed = run_weightline("verify", store, "--repair", "--deep", "--json")
    assert healed.code == 0, healed.out
    assert healed.json()["ok"] is True
    assert any("arbiter" in line for line in healed.json()["repaired"])
    assert commit(store, 3) == 3
    shutil.rmtree(tmp_path / "b")
    assert run_weightline("checkout", store, 3, "three").code == 0
    assert load_file(tmp_path / "three" / "model.safetensors")["w"].tobytes() == weights(3)["w"].tobytes()


def test_verify_repair_of_a_whole_store_does_nothing(four_anchors, run_weightline):
    outcome = run_weightline("verify", "ckpt", "--repair", "--json")
    assert (outcome.code, outcome.json()["ok"]) == (0, True)


def test_every_command_takes_an_s3_store(s3, commit, run_weightline, tmp_path):
    store = f"s3://{CONTAINER}/cli?endpoint={s3.endpoint}&cache={tmp_path / 'cache'}"
    (tmp_path / "opt.bin").write_bytes(b"adam")
    commit(store, 1)
    commit(store, 2, "--attachment", "opt=opt.bin")
    assert run_weightline("pin", store, 1).code == 0
    assert run_weightline("gc", store, "--json").json()["retired"] == []
    assert run_weightline("unpin", store, 1).code == 0
    assert run_weightline("yank", store, 1).code == 0
    assert run_weightline("recover", store, "--json").json()["version"] == 2
    assert run_weightline("verify", store, "--deep").code == 0
    assert run_weightline("checkout", store, 2, "two").code == 0


@pytest.mark.parametrize("name", ["gc", "pin", "unpin", "yank", "recover", "verify"])
def test_help_has_an_example(run_weightline, name):
    outcome = run_weightline(name, "--help")
    assert outcome.code == 0
    assert f"Example: weightline {name}" in " ".join(outcome.out.split())


def test_adopt_says_what_a_copied_store_is(commit, run_weightline, tmp_path):
    commit("ckpt", 1)
    run = run_weightline("log", "ckpt", "--json").json()["run"]
    for copy in ("moved", "forked"):
        shutil.copytree(tmp_path / "ckpt", tmp_path / copy)
    told = run_weightline("verify", "moved", "--json").json()
    assert (told["ok"], [note["kind"] for note in told["notes"]]) == (True, ["copy"])
    weights_file = tmp_path / "v1.safetensors"
    refused = run_weightline("commit", "moved", weights_file)
    assert refused.code == 4
    assert "weightline adopt" in refused.err
    done = run_weightline("adopt", "moved", "--json").json()
    assert done == {"run": run, "was_copy": True, "forked_from": None}
    assert commit("moved", 2) == 2
    forked = run_weightline("adopt", "forked", "--fork", "--json").json()
    assert forked["forked_from"] == run != forked["run"]
    assert commit("forked", 2) == 2
    assert run_weightline("log", "forked", "--json").json()["run"] == forked["run"]
    assert run_weightline("adopt", "moved", "--fork").code == 2
    assert "already" in run_weightline("adopt", "moved").out
    assert "weightline adopt ./ckpt-copy --fork" in run_weightline("adopt", "--help").out
