"""The suite has teeth: each classic fault fails it by name, and a healthy engine passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testing_double import FAULTS, Double, write_model

from weightline.testing import conformance
from weightline.testing.faults import FAULTS as LABEL_FAULTS

NAMED = {
    "label at admission": "labels.admission",
    "label at reply time": "labels.reply",
    "label one token early": "labels.early",
    "label one token late": "labels.late",
    "label per chunk": "labels.chunk",
    "stale kv served": "kv.recomputed",
    "final chunk dropped": "stream.final-chunk",
    "double finish": "terminals.once",
    "prefix cache shared across versions": "kv.prefix-cache",
}


@pytest.fixture
def double(tmp_path: Path) -> Iterator[Callable[[str | None], Double]]:
    opened: list[Double] = []

    def start(fault: str | None = None) -> Double:
        opened.append(Double(write_model(tmp_path / "model"), fault))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def options(**more: object) -> conformance.Options:
    fields = {"tokens": 1200, "swaps": 12, "workers": 12, "longest": 640, "prefix": 48}
    return conformance.Options(**{**fields, "output_modes": ("tokens",), **more})


def test_a_healthy_engine_passes_every_check_and_two_reports_say_the_same(
    double: Callable[[str | None], Double],
) -> None:
    url = double(None).url
    report = conformance.run("embedded", url, options=options())
    assert [(c.id, c.evidence) for c in report.failed] == []
    assert report.ok
    assert len(report.checks) >= 135
    assert report.figures["wrong"] == 0
    again = conformance.run("embedded", url, options=options(accept=False))
    verdicts = [(check.id, check.what, check.ok) for check in again.checks]
    assert verdicts == [(c.id, c.what, c.ok) for c in report.checks][-len(verdicts) :]


@pytest.mark.parametrize("fault", FAULTS)
def test_each_classic_fault_fails_by_name(fault: str, double: Callable[[str | None], Double]) -> None:
    kinds = ("kv",) if NAMED[fault].startswith("kv.") else ("plain",)
    chosen = options(accept=False, kinds=kinds, tokens=800, swaps=8)
    report = conformance.run("embedded", double(fault).url, options=chosen)
    failed = {check.id.split(".", 2)[2] for check in report.failed if check.id.startswith("marker.")}
    name = NAMED[fault]
    assert name in failed, [(c.id, c.evidence) for c in report.failed]
    # No other cause is named: a label fault is not blamed on the cache, nor on another label fault.
    others = ({*LABEL_FAULTS, *NAMED.values()} - {name}) & failed
    assert others == set(), [(c.id, c.evidence) for c in report.failed]
    assert ("labels.exact" in failed) == name.startswith("labels.")
