"""Fixtures around `s3_world`: one server a session, calm at the start of every test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from s3_world import FaultProxy, moto


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultProxy]:
    """moto's server, or the one that WEIGHTLINE_TEST_S3 names, with a container `wl-test` in it."""
    given = os.environ.get("WEIGHTLINE_TEST_S3")
    log = tmp_path_factory.mktemp("s3") / "moto.log"
    with nullcontext(given) if given else moto(log) as endpoint:
        proxy = FaultProxy(endpoint)
        try:
            yield proxy
        finally:
            proxy.close()


@pytest.fixture
def s3(s3_server: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> FaultProxy:
    """The proxy before a real S3 server, without faults until `inject`."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    s3_server.calm()
    return s3_server
