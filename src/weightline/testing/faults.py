"""Which classic fault explains a wrong list of labels.

The tokens of a marker model say which version really sampled each of them, so a wrong claim can be compared
with what every known fault would have claimed. A fault is named only for outputs that no other fault
explains: one token early and one token late look like a label read at reply time or at admission on short
outputs, and would be named beside them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from msgspec import Struct

FAULTS = {
    "labels.admission": "labels are not those of the moment when the request was admitted",
    "labels.reply": "labels are not read when the reply is made",
    "labels.early": "no boundary lies one token too early",
    "labels.late": "no boundary lies one token too late",
    "labels.chunk": "labels are not read once a chunk",
}
"""Name of the check -> the rule that it stands for."""
_FAR = 16
"""Tokens that a boundary may be off for an answer in one piece and still be explained by chunks inside the
engine."""


class Claim(Struct, frozen=True):
    """One output whose labels are wrong. Versions, not labels: one for each token."""

    truth: tuple[int, ...]
    """What the tokens say."""
    claimed: tuple[int, ...]
    """What `weight_versions` says."""
    chunks: tuple[int, ...] = ()
    """Tokens of each event of a stream."""
    floor: int = 0
    """The version that was live when the request was sent."""
    ceiling: int = 0
    """The newest version that the engine could serve when the answer was complete."""


def explanations(claim: Claim) -> set[str]:
    """Names of all faults that would have led to this very claim."""
    truth, claimed = claim.truth, claim.claimed
    found = set()
    if len(set(claimed)) == 1:
        if claim.floor <= claimed[0] <= truth[0]:
            found.add("labels.admission")
        if truth[-1] <= claimed[0] <= max(claim.ceiling, truth[-1]):
            found.add("labels.reply")
    if claimed[:-1] == truth[1:] and truth[-1] <= claimed[-1]:
        found.add("labels.early")
    if claimed[1:] == truth[:-1] and claimed[0] <= truth[0]:
        found.add("labels.late")
    if _by_chunk(claim):
        found.add("labels.chunk")
    return found


def _by_chunk(claim: Claim) -> bool:
    """Whether each chunk has one label: that of its first token, or one read when it went out, which is
    after its last token and before the first of the next chunk."""
    truth, claimed = claim.truth, claim.claimed
    last = max(claim.ceiling, truth[-1])
    if not claim.chunks:
        # Chunks inside the engine, of an unknown size: labels from a little later.
        later = (*truth[_FAR:], *[last] * min(_FAR, len(truth)))
        return all(t <= c <= most for t, c, most in zip(truth, claimed, later, strict=True))
    ends = list(itertools.accumulate(claim.chunks))
    for start, end in zip([0, *ends], ends, strict=False):
        if start == end:
            continue
        label = claimed[start]
        until = truth[end] if end < len(truth) else last
        if set(claimed[start:end]) != {label} or not (
            label == truth[start] or truth[end - 1] <= label <= until
        ):
            return False
    return ends[-1] == len(truth)


def name(claims: Sequence[Claim]) -> dict[str, list[Claim]]:
    """Fault -> the claims that only it explains."""
    named: dict[str, list[Claim]] = {}
    for claim in claims:
        found = explanations(claim)
        if len(found) == 1:
            named.setdefault(found.pop(), []).append(claim)
    return named
