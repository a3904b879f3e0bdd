"""The whole demo as a user runs it, with real processes; and its end by Ctrl-C, by a crash and by SIGKILL.
Nothing stays behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]


class Run:
    """One `weightline demo` process with its temporary folder, and everything it could leave behind."""

    def __init__(self, tmp: Path, *arguments: str) -> None:
        self.tmp = tmp
        tmp.mkdir(exist_ok=True)
        self.shm = shared_memory()
        self.out, self.err = (tmp.parent / f"{tmp.name}.{kind}" for kind in ("out", "err"))
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "weightline", "demo", "--model", "tiny", *arguments],
                stdout=out,
                stderr=err,
                env={**os.environ, "TMPDIR": str(tmp)},
            )
        self.seen: set[psutil.Process] = set()

    def family(self) -> list[psutil.Process]:
        """Live descendants; each that was ever seen is remembered."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self.seen |= set(found)
        return found

    def find(self, *words: str) -> psutil.Process | None:
        """The descendant whose command line holds all `words`."""
        for process in self.family():
            try:
                line = process.cmdline()
            except psutil.NoSuchProcess:
                continue
            if all(word in line for word in words):
                return process
        return None

    def text(self) -> str:
        """All that it printed."""
        return self.out.read_text() + self.err.read_text()

    def wait(self, timeout: float) -> int:
        """Its exit code; remembers descendants meanwhile."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text()[-4000:]
            self.family()
            time.sleep(0.02)
        return self.process.wait()

    def assert_nothing_left(self, *kept: str) -> None:
        """No process, nothing in the temporary folder but `kept`, no shared memory."""
        gone, alive = psutil.wait_procs(list(self.seen), timeout=15)
        assert not alive, [p.cmdline() for p in alive]
        assert len(gone) >= 5, "the test saw too little to mean anything"
        deadline = time.monotonic() + 15  # the janitor may still be at it
        while len(list(self.tmp.iterdir())) > len(kept) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert sorted(p.name.rsplit("-", 1)[0] for p in self.tmp.iterdir()) == sorted(kept)
        assert not [p for p in self.tmp.rglob("*") if p.is_socket()]
        assert shared_memory() <= self.shm


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return (
        {p.name for p in folder.iterdir() if "weightline" in p.name or p.name.startswith("wl")}
        if folder.is_dir()
        else set()
    )


def await_(condition: Callable[[], bool], timeout: float, run: Run) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, run.text()[-4000:]
        assert run.process.poll() is None or condition(), f"it ended too early: {run.text()[-4000:]}"
        time.sleep(0.02)


@contextmanager
def running(*arguments: str) -> Iterator[Run]:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:  # short: it is $TMPDIR of the run
        run = Run(Path(folder) / "tmp", *arguments)
        try:
            yield run
        finally:
            run.process.kill()
            run.process.wait()


def test_tiny_demo_from_end_to_end(tmp_path: Path) -> None:
    with running("--json", "--dir", str(tmp_path / "run"), "--steps", "5") as run:
        assert run.wait(300) == 0, run.text()[-4000:]
        report = json.loads(run.out.read_text())
        assert report["versions"] == [1, 2, 3, 4, 5, 6]
        assert [e["id"] for e in report["engines"]] == ["engine-0", "engine-1"]
        for engine in report["engines"]:
            assert engine["version"] == 6
            assert engine["refits"] >= 2
            assert 0 < engine["max_pause_ms"] < 30_000
        assert report["rollouts"]["requests"] >= 5 * 4 * 4
        assert report["rollouts"]["tokens"] > report["rollouts"]["requests"]
        assert report["rollouts"]["dropped"] == 0
        assert report["rollouts"]["mixed"] > 0
        assert report["bytes"]["ratio"] >= 2
        assert report["audit"]["mismatches"] == 0
        assert report["audit"]["tokens_checked"] > 100
        assert report["audit"]["mixed_requests_checked"] >= 1
        assert len(report["reward"]) == 5
        assert report["steps_with_variance"] >= 3
        assert len(report["changed_fraction"]) == 5
        assert all(0 < c < 0.5 for c in report["changed_fraction"])
        lines = (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()
        assert len(lines) == report["rollouts"]["requests"] - report["rollouts"]["dropped"]
        assert "step 5: reward" in run.err.read_text()
        run.assert_nothing_left()
    _the_kept_run_is_whole(tmp_path / "run", report)


def _the_kept_run_is_whole(run: Path, report: dict[str, Any]) -> None:
    import weightline

    line = weightline.connect(f"file://{run / 'store'}")
    try:
        records = line.versions()
        assert [r.version for r in records] == report["versions"]
        assert sum(r.raw_nbytes for r in records) == report["bytes"]["full"]
        assert sum(r.nbytes for r in records[1:]) == report["bytes"]["delta_total"]
        assert {a.subscriber for a in records[-1].acks} == {"engine-0", "engine-1"}
        assert line.recover().version == report["versions"][-1]
    finally:
        line.close()


def test_ctrl_c_ends_everything_and_says_what_was_done() -> None:
    with running() as run:
        await_(lambda: "training" in run.text() and "refit 1" in run.text(), 200, run)
        run.family()
        began = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        assert run.wait(60) == 130
        assert time.monotonic() - began < 30
        assert "SIGINT: stopped server, engine-0, engine-1, trainer, follower-0, follower-1" in run.text()
        assert "versions committed" in run.text()
        run.assert_nothing_left()


def test_a_crash_of_an_engine_ends_everything_and_says_which_and_why() -> None:
    with running() as run:
        await_(lambda: "follower-1: starting" in run.text(), 200, run)
        engine = run.find("engine", "--port")
        assert engine is not None
        engine.send_signal(signal.SIGSEGV)
        assert run.wait(60) not in (0, 130)
        error = run.err.read_text()
        assert "error: engine-0 was killed by SIGSEGV" in error
        assert "ready" in error  # its last lines
        assert "engine-0.log" in error
        log = Path(error.split("the whole log is ")[1].split("\n")[0].strip())
        assert log.read_text()
        assert [p.name for p in log.parent.parent.iterdir()] == ["logs"]
        run.assert_nothing_left("weightline-demo")


def test_sigkill_of_the_demo_takes_everything_with_it() -> None:
    with running() as run:
        await_(lambda: "trainer: starting" in run.text() and len(run.family()) >= 5, 200, run)
        run.process.kill()
        run.process.wait()
        run.assert_nothing_left()


def test_ctrl_c_right_at_the_start() -> None:
    with running() as run:
        await_(lambda: "server: starting" in run.text() and len(run.family()) >= 4, 60, run)
        run.process.send_signal(signal.SIGINT)
        assert run.wait(60) == 130
        assert "0 versions committed" in run.text()
