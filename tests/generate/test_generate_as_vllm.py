"""The embedded engine beside the real vLLM 0.32: the same requests, and the answers that vLLM gave."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from answer_differences import differences
from generate_server import Server
from vllm_exchanges import RECORDING, SAMPLED, exchanges, perform_all, with_stops

pytestmark = pytest.mark.torch

RECORDED = json.loads(RECORDING.read_text())
THEIRS: dict[str, Any] = RECORDED["answers"]
DEVIATIONS = {"refuse no_such_parameter=1"}
"""vLLM ignores a sampling parameter that it does not know; here nothing is ignored in silence."""


@pytest.fixture(scope="module")
def ours(tiny: Path) -> Iterator[dict[str, Any]]:
    """Our answers to every exchange."""
    import torch

    from weightline.generate import Engine

    torch.set_num_threads(1)
    with Engine.open(tiny, max_num_seqs=8, max_model_len=2048) as engine:
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


def test_an_unknown_sampling_parameter_is_refused_by_name(ours: dict[str, Any]) -> None:
    (name,) = DEVIATIONS
    assert (THEIRS[name]["status"], ours[name]["status"]) == (200, 400)
    assert "no_such_parameter" in ours[name]["body"]["error"]["message"]
