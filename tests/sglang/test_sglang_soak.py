"""Servers of the other architectures, and SGLang without its overlap scheduler (`make soak-sglang`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from sglang_server import Server

from weightline.testing import conformance

pytestmark = [pytest.mark.sglang, pytest.mark.soak]

TOKENS = int(os.environ.get("WEIGHTLINE_SPAN_TOKENS", "20000"))


@pytest.mark.parametrize("overlap", ["1", "0"], ids=["overlap", "plain"])
@pytest.mark.parametrize(("arch", "tie"), [("qwen3", True), ("llama", False), ("qwen3_moe", False)])
def test_a_server_of_every_architecture_passes_the_suite(
    tiny: Callable[..., Path], tmp_path: Path, arch: str, tie: bool, overlap: str
) -> None:
    server = Server(tiny(arch, tie=tie), tmp_path / "server.log")
    try:
        server.start(OVERLAP=overlap)
        options = conformance.Options(tokens=TOKENS, swaps=max(10, TOKENS // 400), workers=16)
        report = conformance.run("sglang", f"{server.url}?kv=keep", server.model, options=options)
        assert [check for check in report.checks if not check.ok] == []
    finally:
        server.kill()
