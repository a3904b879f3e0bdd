"""From counts to a verdict: are the labels of a rollout file proved, refuted, or is the replay too blunt to
tell?"""

from __future__ import annotations

from typing import Literal, NamedTuple

from weightline.audit.replay import Control, ReplayReport

Word = Literal["proved", "refuted", "undecided"]

NOISE = 0.05
"""Share of tokens up to which an engine that computes in fewer bits may sample another one than the
replay."""
APART = 2.0
"""Wrong labels must lead to so many times more mismatches than the true ones, or versions cannot be told
apart."""


class Verdict(NamedTuple):
    """The outcome, and why."""

    word: Word
    why: str


def verdict(report: ReplayReport) -> Verdict:
    """Judge a replay, best one with `control=True`: then the same tokens under labels known to be wrong
    tell how well this replay can tell versions apart.

    - "refuted": a label that no version has or that its own record contradicts, or tokens that their labels
      do not explain.
    - "undecided": nothing was checked; or wrong labels pass just as well (versions that sample the same
      tokens), or fail hardly more often than the file's own (the noise between engine and replay is larger
      than the difference between the versions).
    - "proved": every token checked comes out again under its label's weights.
    """
    if report.tokens_checked == 0:
        return Verdict("undecided", "no token could be checked")
    certain = [m for m in report.first_mismatches if m.gap is None or "contradicts" in m.reason]
    if certain:
        first = certain[0]
        return Verdict("refuted", f"request {first.request_id}, token {first.token}: {first.reason}")
    control, wrong = report.control, report.mismatches / report.tokens_checked
    if report.mismatches == 0:
        if control is not None and _passes_too(control, report):
            why = "labels known to be wrong pass just as well: the versions sample the same tokens"
            return Verdict("undecided", why)
        return Verdict("proved", f"{report.tokens_checked} tokens come out again under their labels")
    if control is not None and control.tokens and wrong <= NOISE:
        there = control.mismatches / control.tokens
        if there <= APART * wrong:
            why = f"{wrong:.2%} of the tokens differ, and {there:.2%} under labels known to be wrong"
            return Verdict("undecided", why)
    count = f"{report.mismatches} of {report.tokens_checked}"
    return Verdict("refuted", f"{count} tokens do not come from their labels")


def _passes_too(control: Control, report: ReplayReport) -> bool:
    """Whether the replay under wrong labels looks as good as the one under the file's own."""
    worse = control.mismatches > 0 or control.logprob_outliers > report.logprob_outliers
    return control.tokens > 0 and not worse
