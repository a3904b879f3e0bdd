"""The resident server as a real process: killed, doubled, fed garbage, without torch, restarted."""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from service_world import ServerProcess, bits, model, moved, until

import weightline as wl
from weightline.errors import FormatError, IntegrityError, InvalidInput, Unavailable, WriterFenced
from weightline.service import feed, serving
from weightline.service.address import parse
from weightline.service.rpc import Rpc
from weightline.service.wire import Hello, Welcome


def test_it_creates_the_store_says_where_it_listens_and_cleans_up_on_sigterm(root, runtime_dir):
    for number in (signal.SIGTERM, signal.SIGINT):
        with ServerProcess(root, runtime_dir) as server:
            server.start()
            assert server.facts["listen"] == f"unix://{runtime_dir}/wl.sock"
            assert server.facts["run"] == json.loads((root / "run.json").read_bytes())["run"]
            assert server.socket.stat().st_mode & 0o777 == 0o600
            assert serving(root).pid == server.facts["pid"]
            with wl.connect(server.url) as line:
                line.wait_for_update(timeout=0)
                code, err = server.stop(number)
            assert (code, err) == (0, "")
            assert not server_socket_left(runtime_dir)
            assert serving(root) is None


def test_the_default_runtime_dir_is_made_for_this_user_alone_and_goes_with_the_server(
    root, runtime_dir, monkeypatch
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir))
    with ServerProcess(root, runtime_dir) as server:
        del server.options["runtime_dir"]
        server.start()
        assert server.socket.parent.parent == runtime_dir / "weightline"
        assert server.socket.parent.stat().st_mode & 0o777 == 0o700
        with wl.connect(server.url) as line:
            assert line.latest() is None
        assert server.stop() == (0, "")
    assert not list((runtime_dir / "weightline").iterdir())


def server_socket_left(runtime_dir):
    return list(runtime_dir.iterdir())


def test_a_second_server_on_one_store_is_refused_and_names_the_first(server, root, tmp_path):
    other = ServerProcess(root, tmp_path / "other", listen=f"unix:{tmp_path}/o.sock")
    with other:
        said = other.first_line()["error"]
    assert said["kind"] == "already_serving"
    assert str(server.facts["pid"]) in said["message"]
    assert server.facts["listen"] in said["message"]
    with wl.connect(server.url) as line:
        assert line.commit(model()) == 1


def test_a_socket_that_another_stores_server_answers_is_not_taken_over(server, tmp_path):
    with ServerProcess(tmp_path / "elsewhere", server.runtime_dir) as other:
        assert other.first_line()["error"]["kind"] == "already_serving"
    with wl.connect(server.url) as line:
        assert line.root == server.root


def test_a_killed_server_leaves_nothing_in_the_way_and_loses_nothing(server, root):
    weights = model()
    with wl.connect(server.url) as line:
        line.commit(weights)
        line.ack(1, "engine-0", verified="live")
        server.kill()
        assert server.socket.exists()
        for path in root.glob("catalog*"):
            path.unlink() if path.is_file() else shutil.rmtree(path)
        server.start()
        weights = moved(weights)
        assert line.commit(weights) == 2
    with wl.connect(server.url) as line:
        assert bits(line.load(1)) == bits(model())
        assert bits(line.load(2)) == bits(weights)
        assert line.commit(moved(weights)) == 3


def test_acks_survive_a_killed_server(server):
    with wl.connect(server.url) as line:
        line.commit(model())
        line.ack(1, "engine-0", verified="live")
        server.kill()
        server.start()
        assert [(s.name, s.version, s.state) for s in line.subscribers()] == [("engine-0", 1, "current")]
        assert line.record(1).acks[0].verified == "live"


@pytest.mark.faults
def test_servers_killed_in_the_middle_of_commits_lose_no_answer_and_reuse_no_number(server, root):
    """The trainer never learns that its server died five times."""
    weights = model()
    committed = {}
    over = threading.Event()

    def train():
        nonlocal weights
        with wl.connect(server.url) as line:
            while not over.is_set():
                weights = moved(weights, "steps")
                committed[line.commit(weights, commit_id=f"step-{len(committed) + 1}")] = bits(weights)

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        for _ in range(5):
            so_far = len(committed)
            until(lambda so_far=so_far: len(committed) >= so_far + 2 or training.done(), "two more commits")
            server.kill()
            server.start()
        over.set()
        training.result(60)
    with wl.connect(str(root)) as line:
        records = line.versions()
        assert [record.version for record in records] == list(range(1, len(records) + 1)) == sorted(committed)
        assert [record.commit_id for record in records] == [f"step-{n}" for n in committed]
        assert len({record.epoch for record in records}) == 1
        for version, expected in committed.items():
            assert bits(line.load(version)) == expected


def test_a_commit_waits_for_a_server_that_is_away(server, monkeypatch):
    attempts = []
    plain = Rpc.call

    def counted(rpc, method, *args, **options):
        attempts.append(method)
        return plain(rpc, method, *args, **options)

    with wl.connect(server.url) as line, ThreadPoolExecutor(1) as pool:
        line.commit(model())
        server.kill()
        monkeypatch.setattr(Rpc, "call", counted)
        waiting = pool.submit(line.commit, moved(model()))
        until(lambda: attempts.count("Publish") >= 3 or waiting.done(), "the commit to be tried again")
        assert not waiting.done()
        server.start()
        assert waiting.result(30) == 2


def test_a_commit_gives_up_after_its_time_and_can_be_repeated(server):
    with wl.connect(server.url, commit_timeout=1.5) as line:
        line.commit(model())
        server.kill()
        second = moved(model())
        with pytest.raises(Unavailable, match="no server answers") as caught:
            line.commit(second, commit_id="second")
        assert "weightline serve" in caught.value.hint
        assert line.latest() == 1
        server.start()
        assert line.commit(second, commit_id="second") == 2


def test_a_commit_repeated_straight_to_the_store_is_not_published_twice(server, root):
    with wl.connect(server.url) as line:
        assert line.commit(model(), commit_id="step-1") == 1
    server.kill()
    with wl.connect(str(root)) as line:
        assert line.commit(model(), commit_id="step-1") == 1
        assert line.commit(moved(model()), commit_id="step-2") == 2
    server.start()
    with wl.connect(server.url) as line:
        assert line.commit(moved(model()), commit_id="step-2") == 2
        assert line.latest() == 2


def test_reading_and_waiting_go_on_while_the_server_is_away_and_return_to_it(server, root):
    with wl.connect(server.url) as line, wl.connect(str(root)) as trainer:
        trainer.commit(model())
        assert line.wait_for_update(timeout=30) == 1
        until(lambda: line.connected, "the watch stream")
        server.kill()
        until(lambda: not line.connected, "the loss of the server to be noticed")
        second = moved(model())
        trainer.commit(second)
        assert line.wait_for_update(timeout=30) == 2
        assert bits(line.load(2)) == bits(second)
        assert line.fetch_delta(2).changed == ("embed.weight",)
        assert [record.version for record in line.versions()] == [1, 2]
        line.ack(2, "engine-0", verified="live")
        server.start()
        until(lambda: line.connected, "the return to the server")
        assert [(s.name, s.version) for s in line.subscribers()] == [("engine-0", 2)]


def test_a_version_that_another_process_commits_wakes_those_who_watch(server, root, tmp_path):
    code = (
        "import sys, numpy as np, weightline as wl\n"
        "line = wl.connect(sys.argv[1])\n"
        "print('up', flush=True); sys.stdin.readline()\n"
        "print(line.commit({'w': np.ones(3, np.float32)}), flush=True)\n"
        "line.close()\n"
    )
    for url, expected in ((server.url, 1), (str(root), 2)):
        with wl.connect(server.url) as line, ThreadPoolExecutor(1) as pool:
            process = subprocess.Popen(
                [sys.executable, "-c", code, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert process.stdout.readline() == "up\n"
            waiting = pool.submit(line.wait_for_update, 30, expected - 1)
            until(lambda line=line: line.connected, "the watch stream")
            out, _ = process.communicate("go\n", timeout=30)
            assert int(out) == expected
            assert waiting.result(30) == expected


@pytest.mark.parametrize("through", ["server", "folder"])
def test_the_server_rings_so_that_nobody_has_to_poll(root, runtime_dir, monkeypatch, through):
    monkeypatch.setattr(feed, "SLOW_POLL_SECONDS", 3600.0)
    with ServerProcess(root, runtime_dir, heartbeat=3600.0) as server, ThreadPoolExecutor(1) as pool:
        server.start()
        url = server.url if through == "server" else str(root)
        with wl.connect(server.url) as line, wl.connect(url) as trainer:
            line.wait_for_update(timeout=0)
            until(lambda: line.connected, "the watch stream")
            # Its last look at the log is an hour away: only a ring ends this wait.
            waiting = pool.submit(line.wait_for_update, 3600)
            trainer.commit(model())
            assert waiting.result(20) == 1


def test_a_subscriber_that_lags_behind_is_named(root, runtime_dir):
    with ServerProcess(root, runtime_dir, sync_timeout=0.2) as server:
        server.start()
        with wl.connect(server.url, name="engine-0") as slow, wl.connect(server.url) as line:
            slow.wait_for_update(timeout=0)
            line.commit(model())
            slow.ack(1, "engine-0")
            assert state_of(line, "engine-0") == ("current", 0)
            line.commit(moved(model()))
            until(lambda: state_of(line, "engine-0") == ("lagging", 1), "the lag to be told")
            slow.ack(2, "engine-0")
            assert state_of(line, "engine-0") == ("current", 0)
            until(lambda: line.subscribers()[0].connected, "the watch stream")
        with wl.connect(server.url) as line:
            until(lambda: not line.subscribers()[0].connected, "the end of the watch stream")


def state_of(line, name):
    return next((s.state, s.lag) for s in line.subscribers() if s.name == name)


def test_a_zombie_trainer_is_fenced_through_the_server_by_one_that_used_the_folder(server, root):
    with wl.connect(server.url) as zombie, wl.connect(str(root)) as heir:
        zombie.commit(model())
        heir.commit(moved(model()))
        with pytest.raises(WriterFenced, match="epoch 1"):
            zombie.commit(moved(model(), "steps"))
        assert heir.latest() == 2


def test_it_works_where_torch_cannot_be_imported(root, runtime_dir):
    with ServerProcess(root, runtime_dir, no_torch=True) as server:
        assert server.start().facts["torch"] is False
        with wl.connect(server.url) as line:
            line.commit(model())
            line.commit(moved(model()))
            assert bits(line.load(2)) == bits(moved(model()))
            assert line.wait_for_update(timeout=30) == 2


def test_grpc_on_loopback_serves_the_same_line(root, runtime_dir):
    with ServerProcess(root, runtime_dir, grpc="127.0.0.1:0") as server:
        url = server.start().facts["grpc"]
        with wl.connect(url) as line:
            assert line.commit(model()) == 1
            assert line.wait_for_update(timeout=30) == 1
        taken = url.removeprefix("grpc://")
        with ServerProcess(root.with_name("other"), runtime_dir / "other", grpc=taken) as other:
            said = other.first_line()["error"]
        assert said["kind"] == "invalid_input"
        assert taken in said["message"]


@pytest.mark.parametrize("option", ["grpc", "http"])
def test_other_addresses_than_loopback_are_refused(root, runtime_dir, option):
    with ServerProcess(root, runtime_dir, **{option: "0.0.0.0:7070"}) as server:
        said = server.first_line()["error"]
    assert said["kind"] == "invalid_input"
    assert f"--{option} 0.0.0.0:7070" in said["message"]
    assert not root.exists()


def test_the_status_page_tells_versions_and_lags(root, runtime_dir):
    with ServerProcess(root, runtime_dir, http="127.0.0.1:0") as server:
        base = server.start().facts["http"]
        assert httpx.get(f"{base}/health").json()["ok"] is True
        with wl.connect(server.url) as line:
            line.commit(model(), step=5)
            line.commit(moved(model()), step=6)
            line.ack(1, "engine-0")
        status = httpx.get(f"{base}/status").json()
        assert (status["newest"], status["versions_total"]) == (2, 2)
        assert [record["step"] for record in status["versions"]] == [5, 6]
        assert [(s["name"], s["version"], s["lag"]) for s in status["subscribers"]] == [("engine-0", 1, 1)]
        assert [r["version"] for r in httpx.get(f"{base}/status?versions=1").json()["versions"]] == [2]
        assert httpx.get(f"{base}/status?versions=x").status_code == 400
        assert httpx.get(f"{base}/nothing").status_code == 404
        taken = base.removeprefix("http://")
        with ServerProcess(root.with_name("other"), runtime_dir / "other", http=taken) as other:
            assert taken in other.first_line()["error"]["message"]
        assert server.stop() == (0, "")


def test_a_socket_path_that_is_too_long_is_refused_before_anything_is_made(root, runtime_dir):
    deep = runtime_dir / ("d" * 60) / ("e" * 60)
    with ServerProcess(root, deep) as server:
        said = server.first_line()["error"]
    assert said["kind"] == "invalid_input"
    assert "the limit is 107" in said["message"]
    assert "--runtime-dir" in said["hint"]
    assert not root.exists()
    assert not deep.exists()


def test_a_socket_path_with_odd_characters_works(root, runtime_dir):
    with ServerProcess(root, runtime_dir, listen=f"unix:{runtime_dir}/a b%2520é.sock") as server:
        server.start()
        assert server.socket == runtime_dir / "a b%20é.sock"
        with wl.connect("unix:" + str(server.socket).replace("%", "%25")) as line:
            assert line.latest() is None


def test_garbage_on_the_socket_harms_nobody(server):
    for garbage in (
        b"\x00" * 4096,
        os.urandom(4096),
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 999,
    ):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(5)
            raw.connect(str(server.socket))
            raw.sendall(garbage)
            raw.shutdown(socket.SHUT_WR)
            try:
                while raw.recv(65536):
                    pass
            except (ConnectionResetError, TimeoutError):
                pass
    rpc = Rpc(parse(server.url))
    try:
        for junk in (b"", b"\xc1", b"\x91\x01", os.urandom(300), b"\x80"):
            for method in ("Hello", "Publish", "Ack", "Record", "Fetch"):
                with pytest.raises(FormatError, match=method):
                    send_raw(rpc, method, junk)
        with pytest.raises(FormatError, match="NoSuchMethod"):
            send_raw(rpc, "NoSuchMethod", b"")
        with pytest.raises(FormatError, match="protocol 99"):
            rpc.call("Hello", Hello(protocol=99, client="old"), Welcome, timeout=10)
    finally:
        rpc.close()
    with wl.connect(server.url) as line:
        assert line.commit(model()) == 1


def send_raw(rpc, method, data):
    from weightline.service.rpc import load_grpc
    from weightline.service.wire import Empty, path_of, unpack_reply

    stub = rpc._channel.unary_unary(path_of(method), request_serializer=None, response_deserializer=None)
    try:
        answer = stub(data, timeout=10)
    except load_grpc().RpcError as error:
        raise rpc._translated(method, error) from None
    return unpack_reply(answer, Empty, what=method)


def test_an_error_longer_than_any_header_crosses_whole(server):
    long = "step-" + "1" * 20_000
    with wl.connect(server.url) as line:
        line.commit(model(), commit_id=long)
        with pytest.raises(wl.ConflictError) as caught:
            line.commit(moved(model()), commit_id=long)
    assert long in caught.value.message
    assert caught.value.hint


def test_no_server_at_the_address_is_told_in_time(runtime_dir):
    started = time.monotonic()
    with pytest.raises(Unavailable, match=r"nobody\.sock") as caught:
        wl.connect(f"unix://{runtime_dir}/nobody.sock", timeout=0.3)
    assert time.monotonic() - started < 5
    assert "weightline serve" in caught.value.hint


def test_a_follower_may_be_started_before_its_server(root, runtime_dir):
    with ServerProcess(root, runtime_dir) as server, ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(wl.connect, f"unix://{runtime_dir}/wl.sock", timeout=30)
        server.start()
        connecting.result(30).close()


def test_a_client_does_not_go_on_with_another_store_behind_the_same_address(server, tmp_path, runtime_dir):
    with wl.connect(server.url, commit_timeout=5) as line:
        line.commit(model())
        server.kill()
        with ServerProcess(tmp_path / "elsewhere", runtime_dir) as other:
            other.start()
            with pytest.raises(wl.ConflictError, match="serves run"):
                line.commit(moved(model()))
            assert line.latest() == 1
            with wl.connect(other.url) as stranger:
                assert stranger.latest() is None


def test_a_store_that_is_not_on_this_host_is_refused_by_name(server, root):
    root.rename(root.with_name("moved"))
    try:
        with pytest.raises(InvalidInput, match="not on this host"):
            wl.connect(server.url)
    finally:
        root.with_name("moved").rename(root)


FORKER = """
import os, sys, warnings, numpy as np, weightline as wl
warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, from 3.12 on
with wl.connect(sys.argv[1]) as line:
    weights = {"w": np.zeros(4, np.float32)}
    line.commit(weights)
    line.wait_for_update(timeout=0)
    for _ in range(5):
        pid = os.fork()
        if pid == 0:
            try:
                line.ack(1, "child")
            except wl.InvalidInput as error:
                print(error.message, flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
    weights["w"][0] = 1
    print(line.commit(weights))
"""


def test_a_process_that_forks_keeps_its_connection_and_hears_no_warnings(server):
    """As a trainer with data loader workers does; a child that uses the connection is told not to."""
    ran = subprocess.run(
        [sys.executable, "-c", FORKER, server.url], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.stderr == ""
    said = ran.stdout.splitlines()
    assert said[-1] == "2"
    assert len(said) == 6
    assert all("this is a fork of it" in line for line in said[:5])


def test_many_connections_leave_no_thread_and_no_descriptor(server):
    def descriptors():
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    def once():
        with wl.connect(server.url) as line:
            line.wait_for_update(timeout=0)

    for _ in range(3):
        once()
    before = descriptors()
    for _ in range(20):
        once()
    until(lambda: descriptors() <= before + 2, "descriptors to be closed", bound=10)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("max_versions", 0), ("sync_timeout", -1), ("cleanup_interval", 0), ("store", "unix:/x")],
)
def test_a_setting_that_cannot_be_is_refused_before_anything_is_made(root, runtime_dir, setting, value):
    with ServerProcess(root, runtime_dir, **{setting: value}) as server:
        said = server.first_line()["error"]
    assert said["kind"] == "invalid_input"
    assert setting in said["message"] or str(value) in said["message"]
    assert not root.exists()
    assert not list(runtime_dir.iterdir())


def test_a_request_that_is_too_large_is_the_callers_error(server):
    with wl.connect(server.url, commit_timeout=5) as line:
        with pytest.raises(InvalidInput, match="Publish"):
            line.commit(model(), metadata={"notes": "x" * (5 << 20)})
        assert line.latest() is None
        assert line.commit(model()) == 1


@pytest.mark.faults
def test_a_server_killed_before_any_durable_step_of_a_publish_loses_and_doubles_nothing(
    root, runtime_dir, tmp_path
):
    kill_file = tmp_path / "kill-at"
    weights = model()
    deaths = 0
    with ServerProcess(root, runtime_dir, kill_file=str(kill_file)) as server, ThreadPoolExecutor(1) as pool:
        server.start()
        for step in range(1, 40):
            kill_file.write_text(str(step))
            weights = moved(weights)
            # A new trainer each time, so that the steps of taking an epoch are among those it dies at.
            with wl.connect(server.url) as line:
                committing = pool.submit(line.commit, weights, step=step)
                until(lambda c=committing: server.process.poll() is not None or c.done(), "an end")
                kill_file.unlink()
                survived = server.process.poll() is None
                if not survived:
                    deaths += 1
                    server.kill()
                    server.start()
                assert committing.result(40) == step
            if survived:
                break
    assert deaths >= 8
    with wl.connect(str(root)) as line:
        records = line.versions()
        assert [(record.version, record.step) for record in records] == [(n, n) for n in range(1, step + 1)]
        assert [record.epoch for record in records] == list(range(1, step + 1))
        assert bits(line.load(step)) == bits(weights)


def test_serve_refuses_to_run_outside_the_main_thread(root, runtime_dir):
    from weightline.service import serve

    with ThreadPoolExecutor(1) as pool, pytest.raises(InvalidInput, match="main thread"):
        pool.submit(serve, root, runtime_dir=runtime_dir).result(30)
    assert serving(root) is None


@pytest.mark.parametrize("door", ["grpc", "http", "listen"])
def test_a_refused_server_leaves_no_empty_store(root, runtime_dir, door):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        with ServerProcess(root, runtime_dir) as server:
            server.options[door] = at if door != "listen" else f"unix:{runtime_dir}/no/wl.sock"
            assert server.first_line()["error"]["kind"] == "invalid_input"
    assert not root.exists()


@pytest.mark.faults
def test_files_that_are_cut_short_in_place_kill_neither_server_nor_follower(server, root):
    """A mapping of such a file kills its process (SIGBUS): nothing is mapped there."""
    weights = {"w": np.zeros(1 << 20, np.uint8), **model()}
    with wl.connect(server.url, name="engine-0") as line:
        line.commit(weights, anchor=True)
        line.commit(moved(weights, "w"))
        delta, whole = line.fetch_delta(2), line.load(1, held=True)
        base = {name: value.copy() for name, value in weights.items()}
        for version, name in ((1, "model.safetensors"), (2, "delta.safetensors")):
            path = root / line.record(version).folder / name
            path.chmod(0o644)
            os.truncate(path, 0)
        # What was fetched is in memory: every byte of it can be looked at.
        assert bits(whole) == bits(weights)
        delta.apply_(base)
        assert bits(base) == bits(moved(weights, "w"))
        for read in (lambda: line.load(2, held=True), lambda: line.fetch_delta(2)):
            with pytest.raises(IntegrityError):
                read()
        # The trainer and the server go on; what is committed now rests on nothing that is lost.
        assert line.commit(weights) == 3
        assert (line.record(3).kind, line.record(3).base) == ("anchor", None)
        line.ack(3, "engine-0")
        assert bits(line.load(3)) == bits(weights)
    assert server.process.poll() is None


@pytest.mark.faults
def test_a_mapping_of_a_file_that_is_cut_short_does_kill_its_process(root):
    """What the test above guards against is real here: the same look through a mapping."""
    with wl.CheckpointEngine(root) as line:
        line.commit({"w": np.zeros(1 << 20, np.uint8)})
        pid = os.fork()
        if pid == 0:  # pragma: no cover - the child
            faulthandler.disable()
            mapped = line.load(1)
            path = root / line.record(1).folder / "model.safetensors"
            path.chmod(0o644)
            os.truncate(path, 0)
            mapped["w"].sum()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] & 0x7F == signal.SIGBUS
