"""HTTP calls of a plugin to the engine that it runs in, with the standard library alone."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

CALL = 30.0
"""Seconds for one call of the engine's own routes."""


def post(url: str, body: dict[str, Any], *, tolerate: bool = False) -> None:
    """POST `body` as JSON. `tolerate`: an error status is fine. Raises `OSError`."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}, method="POST"
    )
    try:
        with _opener().open(request, timeout=CALL) as response:
            response.read()
    except urllib.error.HTTPError:
        if not tolerate:
            raise


def get(url: str) -> dict[str, Any]:
    """GET a JSON object. Raises `OSError`, `ValueError`."""
    with _opener().open(url, timeout=CALL) as response:
        found: dict[str, Any] = json.loads(response.read())
    return found


def _opener() -> urllib.request.OpenerDirector:
    # No proxy from the environment: the engine speaks to itself.
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))
