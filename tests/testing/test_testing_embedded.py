"""The conformance suite on the real embedded engine, a real store and a real follower."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from testing_engine import EngineProcess
from testing_models import model_of

from weightline.demo.models import tiny_model
from weightline.testing import conformance

pytestmark = pytest.mark.torch


@pytest.fixture
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[EngineProcess, Path]]:
    arch, tie = getattr(request, "param", ("qwen3", False))
    if arch == "qwen2":  # of which there is no recipe with a tokenizer
        folder = model_of(arch, tie, tmp_path / "model")
    else:
        folder = tiny_model(tmp_path / "model", arch=arch, tie=tie, hidden=64, vocab=300)
    process = EngineProcess(folder, tmp_path / "engine.log")
    yield process, folder
    process.close()


def test_a_slice_of_the_suite_holds_on_the_embedded_engine(engine, run_weightline) -> None:
    process, _ = engine
    command = ["conform", f"embedded={process.url}", "--tokens", "2000", "--swaps", "10"]
    outcome = run_weightline(*command, "--seed", "1", "--pid", process.pid, "--json")
    report = json.loads(outcome.out)
    failed = [(c["id"], c["evidence"]) for c in report["checks"] if not c["ok"]]
    assert failed == []
    assert outcome.code == 0
    assert len(report["checks"]) >= 135
    assert len({c["id"] for c in report["checks"]}) == len(report["checks"])
    figures = report["figures"]
    assert figures["wrong"] == 0
    assert figures["tokens"] >= 2000
    assert figures["mixed"] > 0
    assert figures["aborted"] > 0


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "engine", [("qwen3", False), ("qwen3_moe", True), ("llama", True), ("qwen2", False)], indirect=True
)
def test_no_wrong_label_in_a_hundred_thousand_tokens(engine, tmp_path: Path) -> None:
    process, folder = engine
    options = conformance.Options(pid=process.pid)
    report = conformance.run("embedded", process.url, folder, options=options)
    (tmp_path / "report.json").write_bytes(msgspec.json.encode(report))
    assert [(c.id, c.evidence) for c in report.failed] == []
    assert report.figures["tokens"] >= 100_000
    assert report.figures["swaps"] == 200
