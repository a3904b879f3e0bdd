"""Servers for the other architectures and a real model: long, by hand (`make soak-vllm`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_weights import nudged, read_folder
from real_world import World
from vllm_server import Server

from weightline.rollout import check
from weightline.testing import conformance

pytestmark = [pytest.mark.vllm, pytest.mark.soak]


@pytest.mark.parametrize(("arch", "tie"), [("llama", False), ("qwen3", True), ("qwen3_moe", False)])
def test_a_server_of_every_architecture_passes_the_suite(
    tiny: Callable[..., Path], tmp_path: Path, arch: str, tie: bool
) -> None:
    server = Server(tiny(arch, tie=tie), tmp_path / "server.log")
    try:
        server.start()
        options = conformance.Options(tokens=20_000, swaps=40, workers=8)
        report = conformance.run("vllm", server.url, server.model, options=options)
        assert [check for check in report.checks if not check.ok] == []
    finally:
        server.kill()


@pytest.mark.parametrize("packed", ["0", "1"])
def test_a_server_of_smollm2_takes_versions_and_computes_with_them(
    tmp_path: Path, with_weights: Any, packed: str
) -> None:
    """Its folder is named by WEIGHTLINE_SMOLLM2. After three refits it answers as one that was started with
    the last version."""
    folder = Path(os.environ["WEIGHTLINE_SMOLLM2"])
    server = Server(folder, tmp_path / "server.log")
    world = World(tmp_path, server, read_folder(folder))
    try:
        server.start(WEIGHTLINE_VLLM_PACKED=packed)
        follower = world.follower()
        for seed in (1, 2, 3):
            world.weights = nudged(world.weights, seed, 0.05)
            world.version = world.engine.commit(world.weights, step=seed)
            world.follow_to(follower, world.version)
        report = check(world.line, follower.port, 3)
        assert (report.ok, bool(report.unreadable)) == (True, packed == "1")
        answers = [server.generate([k, k + 1, k + 2], 24)["token_ids"] for k in (5, 50, 500)]
    finally:
        world.close()
        server.kill()
    fresh = Server(with_weights(folder, world.weights), tmp_path / "fresh.log")
    try:
        fresh.start(WEIGHTLINE_VLLM_PACKED=packed)
        assert [fresh.generate([k, k + 1, k + 2], 24)["token_ids"] for k in (5, 50, 500)] == answers
    finally:
        fresh.kill()
