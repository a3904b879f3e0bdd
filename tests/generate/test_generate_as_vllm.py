"""The embedded engine beside the real vLLM 0.32: the same requests, and the answers that vLLM gave."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from answer_differences import differences
from generate_server import Server
from vllm_exchanges import RECORDING, exchanges, perform_all, with_stops

pytestmark = pytest.mark.torch

RECORDED = json.loads(RECORDING.read_text())
THEIRS: dict[str, Any] = RECORDED["answers"]
SAMPLED = {"tokens sampled", "tokens n", "tokens stream n", "completion n", "chat n"}
"""Drawn at random: each engine has streams of its own."""
DEVIATIONS: dict[str, str] = {
    "refuse no_such_parameter=1": "an unknown sampling parameter is refused, not ignored in silence",
}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Our answers to every exchange."""
    import torch

    from weightline.demo.models import tiny_model
    from weightline.generate import Engine

    torch.set_num_threads(1)
    folder = tiny_model(tmp_path_factory.mktemp("as-vllm") / "model", arch="qwen3")
    with Engine.open(folder, max_num_seqs=8, max_model_len=2048) as engine:
        server = Server(engine, served_model_name="m")

        def settle(count: int) -> None:
            server.wait_until(lambda state: state.waiting + state.running >= count)

        try:
            yield perform_all(str(server.http.base_url), settle)["answers"]
        finally:
            server.close()


def test_every_exchange_was_recorded() -> None:
    names = {e["name"] for e in [*exchanges(), *with_stops("some text of a model", [1] * 9)] if "name" in e}
    assert names == set(THEIRS)


@pytest.mark.parametrize("name", sorted(set(THEIRS) - set(DEVIATIONS)))
def test_it_answers_as_vllm_does(name: str, ours: dict[str, Any]) -> None:
    assert differences(ours[name], THEIRS[name], sampled=name in SAMPLED) == []
