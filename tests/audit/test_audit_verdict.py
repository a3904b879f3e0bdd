"""Verdicts from counts alone."""

from __future__ import annotations

from typing import Any

import pytest

from weightline.audit.replay import Control, Mismatch, ReplayReport
from weightline.audit.verdict import verdict


def report(**fields: Any) -> ReplayReport:
    plain: dict[str, Any] = {
        "tokens_checked": 1000,
        "requests_checked": 10,
        "mixed_requests_checked": 5,
        "mismatches": 0,
        "ties": 0,
        "by_version": {},
        "tie_margin": 5e-4,
        "max_tie_gap": 0.0,
        "max_logprob_error": None,
        "logprob_outliers": 0,
        "first_mismatches": (),
        "unchecked": {},
        "control": control(300),
    }
    return ReplayReport(**{**plain, **fields})


def control(mismatches: int, outliers: int = 0) -> Control:
    return Control(1000, mismatches, None, outliers)


def mismatch(reason: str, gap: float | None) -> Mismatch:
    return Mismatch("r7", 0, 3, "2@bb", reason, gap)


UNKNOWN = mismatch("no version of the run has this label", None)
CONTRADICTS = mismatch("its label contradicts the record's kv_weight_versions", 0.0)
LIKELIER = mismatch("another token is likelier under 2@bb", 0.3)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "proved"),
        ({"control": None}, "proved"),
        ({"control": control(0)}, "undecided"),
        ({"control": control(0, outliers=200)}, "proved"),
        ({"control": control(0, outliers=200), "logprob_outliers": 200}, "undecided"),
        ({"tokens_checked": 0}, "undecided"),
        ({"mismatches": 20, "first_mismatches": (LIKELIER,)}, "refuted"),
        ({"mismatches": 20, "first_mismatches": (LIKELIER,), "control": control(35)}, "undecided"),
        ({"mismatches": 20, "first_mismatches": (LIKELIER,), "control": None}, "refuted"),
        # Noise does not turn every third token: wrong labels do.
        ({"mismatches": 300, "first_mismatches": (LIKELIER,), "control": control(300)}, "refuted"),
        ({"mismatches": 1, "first_mismatches": (UNKNOWN,), "control": control(1)}, "refuted"),
        ({"mismatches": 1, "first_mismatches": (CONTRADICTS,), "control": control(1)}, "refuted"),
    ],
)
def test_a_verdict_follows_from_what_was_found(fields: dict[str, Any], word: str) -> None:
    assert verdict(report(**fields)).word == word


def test_a_refutation_names_the_token() -> None:
    why = verdict(report(mismatches=1, first_mismatches=(UNKNOWN,))).why
    assert why == "request r7, token 3: no version of the run has this label"
