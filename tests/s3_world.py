"""A real S3 server process on loopback, and a proxy before it that loses, delays and refuses on demand."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

import httpx

Kind = Literal["503", "drop", "lose", "conflict", "break", "refuse"]
"""`drop`: the connection ends before the server sees the request. `lose`: it ends after the server did what
was asked. `refuse`: what `refusal` says. `conflict`: 409, as S3 says while another writer is at it. `break`:
half of the answer's bytes."""
CONTAINER = "wl-test"
_STORM: tuple[Kind, ...] = ("503", "drop", "lose", "break")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def process(command: list[str], port: int, log: Path, env: dict[str, str] | None = None) -> Iterator[str]:
    """A server process that has begun to listen; its endpoint."""
    with log.open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **(env or {})})
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    if child.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"{command[0]} did not start:\n{log.read_text()}") from None
                    time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            child.kill()
            child.wait()


@contextmanager
def moto(log: Path) -> Iterator[str]:
    """moto's S3 server with one empty container."""
    port = free_port()
    with process([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port, log) as url:
        httpx.put(f"{url}/{CONTAINER}").raise_for_status()
        yield url


class FaultProxy:
    """Forwards to `upstream`; `inject` what shall go wrong.

    Creates go through one at a time: the server's source has no lock between its look and its write.
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream.removeprefix("http://")
        self._rules: list[tuple[Kind, Callable[[str, str], bool], int]] = []
        self._lock = threading.Lock()
        self._creating = threading.Lock()
        self.latency = 0.0
        """Seconds before each answer."""
        self.list_latency = 0.0
        self.refusal = (403, "AccessDenied", "")
        """Status, S3 code and further XML of a `refuse`."""
        self.dies_after: int | None = None
        """So many writes are still done, the last without an answer; then nobody is there any more."""
        self.received = 0
        """Bytes of all requests."""
        self.storm = 0
        """Every so many requests something goes wrong, in turn; 0: never."""
        self._turn = 0
        self.seen: list[tuple[str, str]] = []
        """(method, path) of every request."""
        self.struck: list[tuple[Kind, str, str]] = []
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def inject(
        self, kind: Kind, method: str = "", match: str = "", *, times: int = 1, after: int = 0
    ) -> None:
        """The next `times` requests of `method` with `match` in the path go wrong, `after` so many."""
        left = [after]

        def applies(verb: str, path: str) -> bool:
            if (method and verb != method) or match not in path:
                return False
            left[0] -= 1
            return left[0] < 0

        with self._lock:
            self._rules.append((kind, applies, times))

    def calm(self) -> None:
        """Nothing goes wrong any more; what was seen is forgotten."""
        with self._lock:
            self._rules.clear()
            self.latency = self.list_latency = 0.0
            self.dies_after = None
            self.received = self.storm = 0
            self.seen.clear()
            self.struck.clear()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def fault(self, method: str, path: str, creates: bool = False) -> Kind | None:
        with self._lock:
            self._turn += 1
            if self.storm and self._turn % self.storm == 0:
                # What became of a create whose answer is lost, a caller of the place has to find out.
                kinds = _STORM[:2] if creates else _STORM
                self.struck.append((kinds[(self._turn // self.storm) % len(kinds)], method, path))
                return self.struck[-1][0]
            self.seen.append((method, path))
            if self.dies_after is not None:
                if self.dies_after == 0:
                    return "drop"
                if method not in ("GET", "HEAD"):
                    self.dies_after -= 1
                    if self.dies_after == 0:
                        return "lose"
            for index, (kind, applies, times) in enumerate(self._rules):
                if applies(method, path):
                    self._rules[index : index + 1] = [(kind, applies, times - 1)] if times > 1 else []
                    self.struck.append((kind, method, path))
                    return kind
        return None

    def forward(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self._upstream, timeout=60)
        conditional = any(name.lower() == "if-none-match" for name in headers) and method == "PUT"
        try:
            if conditional:
                self._creating.acquire()
            connection.request(method, path, body or None, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            if conditional:
                self._creating.release()
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultProxy

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.proxy.received += len(body)
        path = unquote(self.path)
        creates = self.headers.get("If-None-Match") is not None
        fault = self.proxy.fault(self.command, path, creates)
        if fault == "drop":
            return self._hang_up()
        if fault in ("503", "conflict"):
            code, name = (503, "SlowDown") if fault == "503" else (409, "ConditionalRequestConflict")
            text = f"<Error><Code>{name}</Code><Message>{name}</Message></Error>".encode()
            return self._answer(code, [("Content-Type", "application/xml")], text)
        if fault == "refuse":
            code, name, more = self.proxy.refusal
            text = f"<Error><Code>{name}</Code><Message>No.</Message>{more}</Error>".encode()
            return self._answer(code, [("Content-Type", "application/xml")], text)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("connection", "content-length")}
        headers["Content-Length"] = str(len(body))
        time.sleep(self.proxy.latency + (self.proxy.list_latency if "list-type" in self.path else 0))
        status, answered, data = self.proxy.forward(self.command, self.path, headers, body)
        if fault == "lose":
            return self._hang_up()
        return self._answer(status, answered, data, half=fault == "break")

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, half: bool = False) -> None:
        self.send_response_only(status)
        length = str(len(data))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if half else data)
        if half:
            self._hang_up()

    def _hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        return None

    # Their names are the standard library's.
    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle  # noqa: N815
