"""Replay: does each greedily sampled token come out again under the very weights that its label names?

The exact bytes of each span's version are rebuilt from the store, upcast to float32 (exactly) and run by
transformers, whole segments at a time, each on the keys and values (KV) that the engine had: those of the old
weights where a swap kept them (`passes.py`). The versions are loaded in turn, each once as far as the outputs
allow, and every pass that waits for one is run.

What counts as what, for a token t at its position, g = (largest logit) - (logit of t):

- g = 0: the token is proved. - 0 < g <= `tie_margin`: a *tie*. Engine and replay round differently (batched
against single rows, one pass against many), so which of two tokens with nearly equal logits is the largest
can differ between them. Counted apart, with the largest g. - g > `tie_margin`, or not a number: a *mismatch*.
The label is wrong, or the bytes, or the engine.

A token whose label no version of the run has is a mismatch as well, and so is one whose label contradicts the
record's own KV provenance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from weightline.audit import rollout_file
from weightline.audit.passes import Pass, passes_of
from weightline.audit.rollout_file import Choice, RolloutRequest
from weightline.audit.weights import Replica
from weightline.errors import InvalidInput
from weightline.service.line import Line

if TYPE_CHECKING:
    import torch

TIE_MARGIN = 5e-4
"""Logit units. See `docs/design/0009-demo-and-replay.md` for the noise that it was measured against."""
LOGPROB_MARGIN = 1e-4
"""Natural logarithm; measured like `TIE_MARGIN`, for engines that compute in float32."""
_LONGEST_PASS = 256
"""Positions of one forward call; bounds the memory of its logits (256 × 49,152 × 4 bytes = 50 MB for
SmolLM2).
"""
_SHOWN = 20


class VersionTally(Struct, frozen=True):
    """What the replay found among the tokens with one label."""

    tokens: int = 0
    mismatches: int = 0
    ties: int = 0


class Mismatch(Struct, frozen=True):
    """One token that its label does not explain."""

    request_id: str
    choice: int
    token: int
    """Output index."""
    label: str
    reason: str
    gap: float | None = None
    """Largest logit minus the token's, in logit units; None when there was nothing to compare."""


class Control(Struct, frozen=True):
    """The same replay of the mixed outputs with the labels of their spans exchanged, so known to be wrong.

    Says what a wrong label looks like on this run: versions that hardly differ sample the same tokens, and
    then the log-probabilities tell more than the tokens do.
    """

    tokens: int
    mismatches: int
    max_logprob_error: float | None
    logprob_outliers: int
    """As in `ReplayReport`; how much larger these two are says how well labels can be told apart."""


class ReplayReport(Struct, frozen=True, kw_only=True):
    """The outcome. Every token of the requests looked at is in `tokens_checked` or in `unchecked`."""

    tokens_checked: int
    requests_checked: int
    mixed_requests_checked: int
    """Requests with a mixed output of which every token was checked."""
    mismatches: int
    ties: int
    by_version: dict[str, VersionTally]
    """Label -> tally."""
    tie_margin: float
    max_tie_gap: float
    """Largest gap among the ties (0 when there are none)."""
    max_logprob_error: float | None
    """Largest |recorded - replayed| log-probability of a checked token (natural logarithm).

    None when the file has none."""
    logprob_outliers: int
    """Checked tokens where that is more than `LOGPROB_MARGIN`. They tell apart versions that sample the same
    tokens, but an engine that computes in fewer bits has them under true labels, too; so they are no
    mismatches.
    """
    first_mismatches: tuple[Mismatch, ...]
    """Up to 20 of them."""
    unchecked: dict[str, int]
    """Reason -> tokens that could not be checked for it."""
    control: Control | None = None
    """None unless it was asked for and mixed outputs were checked."""


class _Job:
    """One output under replay."""

    def __init__(
        self, request: RolloutRequest, index: int, tally: _Tally, choice: Choice | None = None
    ) -> None:
        """`choice`: another claim about the same tokens than the request's own."""
        self.request, self.index, self.tally = request, index, tally
        self.choice: Choice = choice or request.choices[index]
        self.prompt = len(request.prompt_token_ids)
        self.context = [*request.prompt_token_ids, *self.choice.token_ids]
        claim = passes_of(self.choice, self.prompt)
        self.waiting: list[Pass] = list(claim.passes)
        self.contradictions = frozenset(claim.contradictions)
        self.cache: Any = None
        self.checked = 0
        """Tokens that were compared or refuted."""

    @property
    def whole(self) -> bool:
        """Whether every token was checked."""
        return self.checked == len(self.choice.token_ids)


class _Tally:
    def __init__(self, tie_margin: float) -> None:
        self.tie_margin = tie_margin
        self.tokens: dict[str, list[int]] = {}
        self.max_tie_gap = 0.0
        self.max_logprob_error: float | None = None
        self.logprob_outliers = 0
        self.shown: list[Mismatch] = []
        self.unchecked: dict[str, int] = {}

    @property
    def checked(self) -> int:
        return sum(counts[0] for counts in self.tokens.values())

    def skip(self, reason: str, tokens: int) -> None:
        if tokens:
            self.unchecked[reason] = self.unchecked.get(reason, 0) + tokens

    def token(self, job: _Job, index: int, label: str, gap: float | None, reason: str) -> None:
        """One checked token; `reason` is why it is a mismatch whatever the gap, or empty."""
        counts = self.tokens.setdefault(label, [0, 0, 0])
        counts[0] += 1
        job.checked += 1
        if not reason and gap is not None:
            if gap == 0:
                return
            if gap <= self.tie_margin:
                counts[2] += 1
                self.max_tie_gap = max(self.max_tie_gap, gap)
                return
            reason = (
                f"another token is likelier under {label}" if gap == gap else "its logits are not numbers"
            )
        counts[1] += 1
        if len(self.shown) < _SHOWN:
            self.shown.append(Mismatch(job.request.request_id, job.index, index, label, reason, gap))

    def logprob(self, error: float) -> None:
        self.logprob_outliers += not error <= LOGPROB_MARGIN
        if self.max_logprob_error is None or not error <= self.max_logprob_error:  # NaN is never small
            self.max_logprob_error = error


def replay(
    line: Line,
    model_folder: Path | str,
    rollouts: Path | str | Iterable[Any],
    *,
    requests: int | None = None,
    tie_margin: float = TIE_MARGIN,
    control: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ReplayReport:
    """Check the greedy outputs of a rollout file against the versions that their labels name.

    `line`: the store that holds those versions. `model_folder`: a Hugging Face folder, for its configuration.
    `rollouts`: a rollout file, or its lines. `requests`: look at so many requests only, mixed ones first
    (`rollout_file.sample`). `tie_margin`: in logit units. `control`: replay mixed outputs a second time, with
    wrong labels, to show what those look like. `progress` is called with (outputs done, tokens checked).

    Outputs that were not sampled greedily are left out and counted in `unchecked`. Raises `InvalidInput` for
    a malformed file, one of another run, or a model that the versions do not fit; `IntegrityError` when bytes
    of the store are damaged.
    """
    source = Path(rollouts) if isinstance(rollouts, str | Path) else rollouts
    tally, wrong = _Tally(tie_margin), _Tally(tie_margin)
    jobs = _jobs(rollout_file.read(source, line.run), requests, tally)
    controls = []
    if control:
        mixed = [job for job in jobs if job.choice.mixed]
        controls = [_Job(job.request, job.index, wrong, _exchanged(job.choice)) for job in mixed]
    replica = Replica(Path(model_folder))
    for job in jobs:
        if any(not 0 <= t < replica.vocabulary for t in job.context):
            raise InvalidInput(
                f"request {job.request.request_id}: a token id is not below the model's {replica.vocabulary}",
                hint="give the model folder that the engines were started with",
            )

    def tell() -> None:
        if progress is not None:
            progress(sum(not job.waiting for job in jobs), tally.checked)

    _play([*jobs, *controls], replica, line, tell)
    return _report(jobs, tally, wrong if controls else None)


def _play(jobs: list[_Job], replica: Replica, line: Line, tell: Callable[[], None]) -> None:
    """Run every pass of every job, the versions one after the other."""
    known = {record.label: record for record in line.versions()}
    while waiting := [job for job in jobs if job.waiting]:
        for job in waiting:
            label = job.waiting[0].label
            if label not in known:
                _refute_unknown(job)
            elif known[label].retired:
                _give_up(job, f"version {known[label].version} is gone")
        ready = [job for job in waiting if job.waiting]
        if ready:
            # The oldest first: outputs move on from older versions to newer ones, so each is loaded once.
            record = min((known[job.waiting[0].label] for job in ready), key=lambda r: r.version)
            replica.take(line, record.version)
        for job in ready:
            while job.waiting and job.waiting[0].label == record.label:
                _run(replica, job, job.waiting.pop(0))
            if not job.waiting:
                job.cache = None
            tell()


def _jobs(requests: Iterable[RolloutRequest], count: int | None, tally: _Tally) -> list[_Job]:
    greedy = []
    for request in requests:
        reason = request.not_replayable()
        if reason is None:
            greedy.append(request)
        else:
            tally.skip(reason, sum(len(c.token_ids) for c in request.choices))
    return [_Job(r, i, tally) for r in rollout_file.sample(greedy, count) for i in range(len(r.choices))]


def _exchanged(choice: Choice) -> Choice:
    """The same tokens, each span under the label of the one before it, and the first under that of the
    second.
    """
    spans = choice.weight_versions
    labels = [spans[1].version, *(span.version for span in spans[:-1])]
    return msgspec.structs.replace(
        choice,
        weight_versions=tuple(
            msgspec.structs.replace(span, version=label) for span, label in zip(spans, labels, strict=True)
        ),
        kv_weight_versions=None,
    )


def _sampled(job: _Job, step: Pass) -> range:
    """Output indexes that the pass sampled."""
    return range(step.sample_from - (job.prompt - 1), step.end - (job.prompt - 1))


def _refute_unknown(job: _Job) -> None:
    step = job.waiting.pop(0)
    for index in _sampled(job, step):
        job.tally.token(job, index, step.label, None, "no version of the run has this label")
    _give_up(job, "earlier tokens have a label that no version has")


def _give_up(job: _Job, reason: str) -> None:
    job.tally.skip(reason, sum(len(_sampled(job, step)) for step in job.waiting))
    job.waiting.clear()
    job.cache = None


def _run(replica: Replica, job: _Job, step: Pass) -> None:
    """Run one pass on the job's KV, and compare the logits at its sampling positions with the tokens."""
    if step.start == 0:
        job.cache = replica.empty_cache()
    for start in range(step.start, step.end, _LONGEST_PASS):
        end = min(step.end, start + _LONGEST_PASS)
        sampled = max(0, end - max(start, step.sample_from))
        logits = replica.logits(job.context[start:end], job.cache, max(1, sampled))
        if sampled:
            _compare(job, step.label, end - sampled - (job.prompt - 1), logits)


def _compare(job: _Job, label: str, first: int, logits: torch.Tensor) -> None:
    """`logits` [n, vocabulary] belong to output tokens `first` to `first + n`."""
    import torch

    n = logits.shape[0]
    ids = torch.tensor(job.choice.token_ids[first : first + n])
    own = logits.gather(1, ids[:, None])[:, 0]
    gaps = (logits.max(dim=1).values - own).tolist()
    for i, gap in enumerate(gaps):
        contradiction = first + i in job.contradictions
        reason = "its label contradicts the record's kv_weight_versions" if contradiction else ""
        job.tally.token(job, first + i, label, gap, reason)
    recorded = job.choice.logprobs
    if recorded is None or job.request.logprobs_mode != "raw":
        return
    replayed = (own - logits.logsumexp(dim=1)).tolist()
    for value, there in zip(replayed, recorded[first : first + n], strict=True):
        if there is not None:
            job.tally.logprob(abs(value - there))


def _report(jobs: list[_Job], tally: _Tally, wrong: _Tally | None) -> ReplayReport:
    seen = {id(job.request) for job in jobs if job.checked}
    mixed = {id(job.request) for job in jobs if job.choice.mixed and job.whole}
    by_version = {label: VersionTally(*counts) for label, counts in tally.tokens.items()}
    control = None
    if wrong is not None:
        control = Control(
            tokens=wrong.checked,
            mismatches=sum(counts[1] for counts in wrong.tokens.values()),
            max_logprob_error=wrong.max_logprob_error,
            logprob_outliers=wrong.logprob_outliers,
        )
    return ReplayReport(
        tokens_checked=tally.checked,
        requests_checked=len(seen),
        mixed_requests_checked=len(mixed),
        mismatches=sum(t.mismatches for t in by_version.values()),
        ties=sum(t.ties for t in by_version.values()),
        by_version=by_version,
        tie_margin=tally.tie_margin,
        max_tie_gap=tally.max_tie_gap,
        max_logprob_error=tally.max_logprob_error,
        logprob_outliers=tally.logprob_outliers,
        first_mismatches=tuple(tally.shown),
        unchecked=tally.unchecked,
        control=control,
    )
