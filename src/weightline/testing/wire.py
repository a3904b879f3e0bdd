"""HTTP for the suite: plain connections that can be cut at any moment, and server-sent events."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from weightline.errors import InvalidInput, Unavailable

TIMEOUT = 120.0
"""Seconds without a byte after which a request counts as lost."""


class Wire:
    """One server; a connection of its own for each call, so that threads never share one."""

    def __init__(self, url: str, *, timeout: float = TIMEOUT) -> None:
        """Raises `InvalidInput` for a URL that is none."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise InvalidInput(
                f"engine URL {url!r} does not start with http://", hint="for example http://127.0.0.1:8000"
            )
        self.url = parts._replace(query="", fragment="").geturl().rstrip("/")
        self._host, self._port = parts.hostname, parts.port or 80
        self.timeout = timeout

    def open(
        self, method: str, path: str, body: Any = None, *, timeout: float | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request; the caller reads the answer and closes the connection. Raises `OSError` and
        `http.client.HTTPException`."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout or self.timeout)
        try:
            content = None if body is None else json.dumps(body).encode()
            headers = {} if body is None else {"content-type": "application/json"}
            connection.request(method, path, content, headers)
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and decoded answer (None when it is no JSON). Raises `Unavailable` when none comes."""
        try:
            connection, response = self.open(method, path, body)
            try:
                content = response.read()
            finally:
                connection.close()
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(
                f"engine {self.url}: {path}: {error or type(error).__name__}",
                hint="is the engine running at that address?",
            ) from None
        try:
            return response.status, json.loads(content)
        except ValueError:
            return response.status, None

    def expect(self, method: str, path: str, body: Any = None) -> Any:
        """The answer of a call that must succeed. Raises `Unavailable`."""
        status, answer = self.call(method, path, body)
        if status != 200:
            raise Unavailable(
                f"engine {self.url}: {path}: HTTP {status}: {str(answer)[:200]}", hint="see the engine's log"
            )
        return answer


def events(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of each server-sent event, in order."""
    while line := response.readline():
        if line.startswith(b"data:"):
            yield line[5:].strip().decode()
