"""The command line on s3:// and mirror URLs, and what it says when S3 does not let it in."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from s3_world import CONTAINER, FaultProxy
from weightline.store import Store
from weightline.store.object_cache import BlobCache

Run = Callable[..., Any]


def weights(version: int) -> dict[str, Any]:
    embed = np.arange(64, dtype=np.float32).astype(ml_dtypes.bfloat16)
    embed.view(np.uint16)[version] ^= version
    return {"embed.weight": embed.reshape(8, 8), "steps": np.array([version])}


@pytest.fixture(params=["s3", "mirror"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a place in which no store is yet."""
    if request.param == "mirror":
        return f"mirror:{tmp_path / 'a'},{tmp_path / 'b'}?cache={tmp_path / 'host'}"
    s3 = request.getfixturevalue("s3")
    return f"s3://{CONTAINER}/{uuid.uuid4().hex}?endpoint={s3.endpoint}&cache={tmp_path / 'host'}"


def test_every_command_of_a_store_works_on_its_url(store: str, run_weightline: Run, tmp_path: Path) -> None:
    def ok(*args: object) -> Any:
        done = run_weightline(*args, "--json")
        assert done.code == 0, (args, done.err)
        return done.json()

    (tmp_path / "opt").write_bytes(b"adam")
    for version in range(1, 5):
        save_file(weights(version), tmp_path / f"{version}.safetensors")
        options = ("--attachment", f"opt={tmp_path / 'opt'}") if version == 2 else ()
        anchor = ("--anchor",) if version in (1, 3) else ()
        done = ok("commit", store, tmp_path / f"{version}.safetensors", "--step", version, *options, *anchor)
        assert done["version"] == version
    assert [v["step"] for v in ok("log", store)["versions"]] == [4, 3, 2, 1]
    assert ok("show", store, 3)["record"]["kind"] == "anchor"
    assert ok("pin", store, 1)["pinned"]
    assert ok("verify", store, "--deep")["ok"]
    assert ok("checkout", store, 4, tmp_path / "out")["version"] == 4
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {n: a.tobytes() for n, a in found.items()} == {n: a.tobytes() for n, a in weights(4).items()}
    recovered = ok("recover", store, "--out", tmp_path / "resume")
    assert (recovered["version"], recovered["step"], recovered["newest"]) == (2, 2, 4)
    assert (tmp_path / "resume" / "attachments" / "opt").read_bytes() == b"adam"
    assert ok("yank", store, 4, "--reason", "test")["yanked"]
    kept = {v["version"]: v["why"] for v in ok("gc", store, "--max-versions", 1, "--dry-run")["versions"]}
    assert (kept[1], kept[4]) == ("pinned", "the newest")
    assert ok("gc", store, "--max-versions", 1, "--grace", 0)["retired"] == [3]
    assert ok("verify", store, "--deep")["ok"]
    assert not ok("unpin", store, 1)["pinned"]
    place = ok("doctor", store)["findings"]
    assert [f["state"] for f in place if f["name"] == "store place"] == ["ok"]
    gone = run_weightline("show", store, 9)
    assert (gone.code, "hint" in gone.err) == (
        run_weightline("checkout", store, 9, tmp_path / "x").code,
        True,
    )


def test_no_store_and_no_container_are_told_apart(
    s3: FaultProxy, run_weightline: Run, tmp_path: Path
) -> None:
    at = f"?endpoint={s3.endpoint}&cache={tmp_path / 'host'}"
    for command in (("log",), ("verify",), ("gc",), ("pin", "1")):
        name, *rest = command
        assert "there is no store" in run_weightline(name, f"s3://{CONTAINER}/empty{at}", *rest).err
        assert "there is no 'no-such'" in run_weightline(name, f"s3://no-such/x{at}", *rest).err


@pytest.mark.parametrize(
    ("refusal", "said", "hint"),
    [
        (
            (403, "InvalidAccessKeyId", ""),
            r"refuses these credentials \(InvalidAccessKeyId\)",
            "ACCESS_KEY_ID",
        ),
        ((403, "SignatureDoesNotMatch", ""), "refuses these credentials", "AWS_SECRET_ACCESS_KEY"),
        ((403, "AccessDenied", ""), "refuses these credentials", "ListBucket"),
        ((400, "ExpiredToken", ""), "refuses these credentials", "AWS_SESSION_TOKEN"),
        ((403, "RequestTimeTooSkewed", ""), "refuses these credentials", "clock"),
        (
            (400, "AuthorizationHeaderMalformed", "<Region>eu-west-1</Region>"),
            "region us-east-1",
            "eu-west-1",
        ),
        ((301, "PermanentRedirect", ""), "region us-east-1", "region="),
        ((404, "NoSuchBucket", ""), "there is no 'wl-test'", "create it first"),
        ((400, "Odd", ""), "Odd: No.", "endpoint"),
    ],
)
def test_a_store_that_does_not_let_us_in_says_why_in_one_line(
    s3: FaultProxy,
    run_weightline: Run,
    tmp_path: Path,
    refusal: tuple[int, str, str],
    said: str,
    hint: str,
) -> None:
    s3.refusal = refusal
    store = f"s3://{CONTAINER}/x?endpoint={s3.endpoint}&cache={tmp_path / 'host'}"
    save_file(weights(1), tmp_path / "w.safetensors")
    for command in (("log", store), ("commit", store, tmp_path / "w.safetensors"), ("serve", store)):
        s3.inject("refuse", times=99)
        done = run_weightline(*command)
        s3.calm()
        assert done.code != 0
        error, *rest = done.err.strip().splitlines()
        assert re.search(said, error), done.err
        assert len(error) < 400
        assert [line for line in rest if hint in line], done.err
        assert "Traceback" not in done.err


def test_https_to_a_server_of_http_and_no_credentials_are_told(
    s3: FaultProxy, run_weightline: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = f"&cache={tmp_path / 'host'}"
    https = run_weightline("log", f"s3://{CONTAINER}/x?endpoint={s3.endpoint.replace('http', 'https')}{at}")
    assert "speaks http, not https" in https.err
    # Where an instance would ask for its role: nobody is there.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9/169.254.169.254")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    nobody = run_weightline("log", f"s3://{CONTAINER}/x?endpoint={s3.endpoint}{at}")
    assert "there are no credentials" in nobody.err
    assert "AWS_ACCESS_KEY_ID" in nobody.err


def test_the_endpoint_may_come_from_the_environment(
    s3: FaultProxy, run_weightline: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("WEIGHTLINE_CACHE", str(tmp_path / "cache"))
    store = f"s3://{CONTAINER}/{uuid.uuid4().hex}"
    save_file(weights(1), tmp_path / "w.safetensors")
    assert run_weightline("commit", store, tmp_path / "w.safetensors").code == 0
    assert run_weightline("log", store, "--json").json()["versions"][0]["version"] == 1
    said = {f["name"]: f for f in run_weightline("doctor", store, "--json").json()["findings"]}
    assert s3.endpoint in said["S3: endpoint"]["detail"]
    assert said["S3: credentials"]["state"] == "ok"
    assert "test" not in said["S3: credentials"]["detail"]
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    half = {f["name"]: f for f in run_weightline("doctor", "--json").json()["findings"]}
    assert half["S3: credentials"]["state"] == "warn"


@pytest.mark.parametrize("command", ["serve", "commit", "doctor"])
def test_a_store_without_conditional_put_is_refused_by_name(
    s3: FaultProxy, rclone: str, run_weightline: Run, tmp_path: Path, command: str
) -> None:
    store = f"s3://{CONTAINER}/{command}?endpoint={rclone}&cache={tmp_path / 'host'}"
    save_file(weights(1), tmp_path / "w.safetensors")
    done = run_weightline(command, store, *([tmp_path / "w.safetensors"] if command == "commit" else []))
    assert done.code != 0
    said = done.err + done.out
    assert f"s3://{CONTAINER}/{command}?endpoint={rclone} does not refuse to create" in said
    assert "If-None-Match" in said


def test_without_obstore_it_is_said_what_to_install(
    s3: FaultProxy, run_weightline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore.store", None)
    done = run_weightline("log", f"s3://{CONTAINER}/x?endpoint={s3.endpoint}")
    assert done.code != 0
    assert "pip install 'weightline[s3]'" in done.err


def test_the_default_budget_of_a_store_without_a_disk_is_no_bound(
    s3: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1000, 999, 1))
    url = f"s3://{CONTAINER}/{uuid.uuid4().hex}?endpoint={s3.endpoint}&cache={tmp_path / 'host'}"
    store = Store.open(url, create=True)
    writer = store.writer()
    for version in (1, 2, 3):
        writer.commit(weights(version), anchor=True)
    assert store.default_disk_budget() is None
    assert store.collect().retired == ()
    assert not any(record.retired for record in store.versions())
    assert isinstance(store.place._cache, BlobCache)  # type: ignore[attr-defined]
    plain = Store.open(tmp_path / "plain", create=True)
    assert plain.default_disk_budget() == 1
