"""The answers that the embedded engine is held against, held against a live vLLM."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_server import Server

sys.path.append(str(Path(__file__).parents[1] / "generate"))

from answer_differences import differences
from vllm_exchanges import RECORDING, SAMPLED, perform_all

pytestmark = [pytest.mark.vllm, pytest.mark.soak]

RECORDED = json.loads(RECORDING.read_text())


@pytest.fixture(scope="module")
def live(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tiny("qwen3"), tmp_path_factory.mktemp("recording") / "server.log").start()
    try:
        yield server
    finally:
        server.kill()


def test_vllm_still_answers_as_recorded(live: Server) -> None:
    # Nothing tells how many requests have arrived at a paused vLLM, so they are given a second. Under load it
    # sends several tokens in one event, hence `coalesced`.
    answers: dict[str, Any] = perform_all(live.url, lambda _count: time.sleep(1.0))["answers"]
    assert answers.keys() == RECORDED["answers"].keys()
    changed = {
        name: found
        for name, theirs in RECORDED["answers"].items()
        if (found := differences(answers[name], theirs, sampled=name in SAMPLED, coalesced=True))
    }
    assert changed == {}
