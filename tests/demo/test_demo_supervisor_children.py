"""Child processes of the demo: events, exits, and that none outlives it, whatever ends it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from weightline.demo.children import Child, ChildEvent, ChildExit, Children, how_it_ended, tail

SAY_UP = 'import os, sys, time, signal; print(\'{"event": "up", "pid": %d}\' % os.getpid())'
SLEEP = f"{SAY_UP}; time.sleep(600)"
STUBBORN = f"{SAY_UP.replace('; print', '; signal.signal(15, signal.SIG_IGN); print')}; time.sleep(600)"


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    found = Children(tmp_path / "logs")
    yield found
    found.close()


def await_event(children: Children, name: str) -> ChildEvent | ChildExit:
    while True:
        item = children.inbox.get(timeout=30)
        if isinstance(item, ChildEvent | ChildExit) and item.child == name:
            return item


def start_up(children: Children, name: str, code: str) -> Child:
    child = children.start(name, ["-c", code])
    event = await_event(children, name)
    assert isinstance(event, ChildEvent), tail(child.log)
    assert event.fields == {"event": "up", "pid": child.process.pid}
    return child


def test_events_come_out_and_everything_is_in_the_log(children: Children) -> None:
    says = "print('words'); print('{\"event\": \"a\"}'); print('{\"no\": 1}'); print('oops', file=sys.stderr)"
    child = children.start("talker", ["-c", f"import sys; {says}"])
    assert await_event(children, "talker") == ChildEvent("talker", {"event": "a"})
    assert await_event(children, "talker") == ChildExit("talker", 0)
    assert sorted(tail(child.log)) == ["oops", "words", '{"event": "a"}', '{"no": 1}']


def test_a_crash_names_child_code_last_lines_and_log(children: Children) -> None:
    code = "import sys\nfor i in range(40): print('line', i, file=sys.stderr)\nsys.exit(3)"
    child = children.start("crasher", ["-c", code])
    gone = await_event(children, "crasher")
    assert isinstance(gone, ChildExit)
    error = children.failure(gone)
    assert error.message.startswith("crasher ended with exit code 3; its last lines:")
    assert "line 39" in error.message
    assert "line 5\n" not in error.message
    assert str(child.log) in error.hint
    assert error.status.exit_code != 0


def test_a_kill_names_the_signal(children: Children) -> None:
    child = start_up(children, "victim", SLEEP)
    child.process.send_signal(signal.SIGKILL)
    assert await_event(children, "victim") == ChildExit("victim", -9)
    assert how_it_ended(-9) == "was killed by SIGKILL (out of memory?)"
    assert how_it_ended(-11) == "was killed by SIGSEGV"


def test_stop_is_gentle_first_then_kills_and_says_so(children: Children) -> None:
    start_up(children, "kind", SLEEP)
    start_up(children, "stubborn", STUBBORN)
    notes = children.stop("kind", "stubborn", "never started", grace=0.5)
    assert notes == ["stubborn did not stop within 0.5 s and was killed"]
    assert children["kind"].process.returncode == -signal.SIGTERM
    assert children["stubborn"].process.returncode == -signal.SIGKILL


def test_close_leaves_nothing(tmp_path: Path) -> None:
    children = Children(tmp_path / "logs")
    pids = [start_up(children, f"c{i}", STUBBORN).process.pid for i in range(3)]
    children.close()
    children.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_child_gets_its_environment_and_a_session_of_its_own(children: Children) -> None:
    event = '{"event": "%s %d"}'
    code = f"import os; print('{event}' % (os.environ['OMP_NUM_THREADS'], os.getsid(0) == os.getpid()))"
    children.start("threads", ["-c", code], env={"OMP_NUM_THREADS": "1"})
    assert await_event(children, "threads") == ChildEvent("threads", {"event": "1 1"})


PARENT = """
import sys, os, json, time, signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a test run under nohup hands it down as ignored
from pathlib import Path
from weightline.demo.children import Children
children = Children(Path(sys.argv[1]) / "logs")
for folder in sys.argv[2:]:
    children.tell_janitor("remove", folder)
children.tell_janitor("keep", sys.argv[-1])
pids = [children.start(n, ["-c", sys.stdin.readline()]).process.pid for n in ("a", "b")]
for _ in pids:
    children.inbox.get(timeout=30)
print(json.dumps(pids + [children._janitor.pid]), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_death_of_the_demo_takes_children_and_folders_with_it(tmp_path: Path, number: int) -> None:
    """Even children that ignore SIGTERM, and even when the demo has no time to do anything."""
    removed, kept = tmp_path / "removed", tmp_path / "kept"
    for folder in (removed, kept):
        (folder / "deep").mkdir(parents=True)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), str(removed), str(kept)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    with parent.stdin, parent.stdout:
        parent.stdin.write(f"{SLEEP}\n{STUBBORN}\n".encode())
        parent.stdin.flush()
        pids = json.loads(parent.stdout.readline())
        handles = [os.pidfd_open(pid) for pid in pids]
        parent.send_signal(number)
        parent.wait(timeout=10)
        for handle in handles:  # readable when the process has ended
            assert select.select([handle], [], [], 20)[0]
            os.close(handle)
    assert not removed.exists()
    assert (kept / "deep").exists()


def test_a_child_started_by_a_parent_that_is_gone_does_not_run(tmp_path: Path) -> None:
    """The race that the kernel's parent-death signal leaves open: the parent dies before it is asked for."""
    launch = Path(sys.modules["weightline.demo.children"].__file__ or "").with_name("launch.py")
    marker = tmp_path / "ran"
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(launch), "1", sys.executable, "-c", f"open({str(marker)!r}, 'w')"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if os.getpid() == 1:  # we would be the right parent
        pytest.fail("run the tests below an init process")
    assert done.returncode != 0
    assert "the demo is gone" in done.stderr
    assert not marker.exists()


def test_the_janitor_can_die_without_harm(children: Children) -> None:
    start_up(children, "one", SLEEP)
    children._janitor.kill()
    children._janitor.wait()
    child = start_up(children, "two", SLEEP)
    assert child.running
    assert children.stop("one", "two") == []


def test_an_interrupt_of_the_terminal_reaches_no_child(children: Children) -> None:
    """Ctrl-C goes to the foreground process group; children are in none of it."""
    child = start_up(children, "one", SLEEP)
    assert os.getpgid(child.process.pid) != os.getpgid(0)
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(child.process.pid).terminal() is None
