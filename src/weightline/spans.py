"""Spans as data: whose weights sampled which token, over whole batches at once. numpy only; `like="torch"`
for tensors.

A batch is ragged: the tokens of all outputs lie one after the other, and `offsets` says where each output
begins. Work is done once a span and spread over the tokens by `numpy.repeat`, so a million tokens cost
milliseconds.

```python batch = wl.spans.batch([answer["weight_versions"] for answer in answers],
lengths=[len(a["token_ids"]) for a in answers]) age = wl.spans.staleness(batch, now=120, source=line)
# int64 [tokens], steps along the lineage loss = (loss * wl.spans.mask(batch, line, now=120, at_most=4,
like="torch")).sum() for version, segments in wl.spans.split(batch, line, outputs={"logprobs":
logprobs}).items(): ... ```

Labels become versions through a *source*: anything with `versions()` (a line, a store), a `Lineage`, or a
mapping from label to version (then each version counts as made from the one before it). A label says which
weights *sampled* a token, not which computed the keys and values that it attended to: see docs/spans.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from msgspec import Struct

from weightline.core import staleness as lines
from weightline.core.spans import SpanBuilder, from_tokens, merge, validate
from weightline.errors import InvalidInput, VersionNotFound
from weightline.types import VersionRecord, WeightVersionSpan

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Array = NDArray[Any] | torch.Tensor

__all__ = [
    "Ages",
    "Lineage",
    "Segment",
    "SpanBatch",
    "SpanBuilder",
    "ages",
    "batch",
    "from_tokens",
    "mask",
    "merge",
    "per_token",
    "split",
    "staleness",
    "validate",
]

Like = Literal["numpy", "torch"]
Span = WeightVersionSpan | Mapping[str, Any]
_HINT = "spans are half-open, start at output token 0, have no gap and cover every returned token once"


class HasVersions(Protocol):
    """A line, or a store."""

    def versions(self) -> Sequence[VersionRecord]:
        """All committed versions."""
        ...


class Lineage(Struct, frozen=True):
    """What labels mean, and what each version was made from."""

    labels: Mapping[str, int]
    """Label -> version."""
    parents: Mapping[int, int | None] | None
    """Version -> the version that training went on from. None: each from the one before it in number."""


Source = HasVersions | Lineage | Mapping[str, int]


class SpanBatch:
    """The spans of several outputs. Made by `batch`."""

    __slots__ = ("code", "ids", "labels", "lengths", "offsets", "owner", "starts")

    def __init__(
        self,
        labels: tuple[str, ...],
        code: Integers,
        starts: Integers,
        lengths: Integers,
        owner: Integers,
        offsets: Integers,
        ids: Sequence[object],
    ) -> None:
        self.labels = labels
        """Distinct labels, in the order of their first token."""
        self.code = code
        """int64 [spans]: index into `labels`."""
        self.starts = starts
        """int64 [spans]: flat index of its first token."""
        self.lengths = lengths
        """int64 [spans]: its tokens."""
        self.owner = owner
        """int64 [spans]: the output that each span belongs to."""
        self.offsets = offsets
        """int64 [outputs + 1]: output i has the flat tokens `offsets[i]` to `offsets[i + 1]`."""
        self.ids = ids
        """What each output is called in errors."""

    def __len__(self) -> int:
        """Outputs."""
        return len(self.offsets) - 1

    @property
    def tokens(self) -> int:
        """Tokens of all outputs."""
        return int(self.offsets[-1])

    def place(self, span: int) -> str:
        """Where a span begins, for an error: its request and token."""
        output = int(self.owner[span])
        return f"request {self.ids[output]!r}, token {int(self.starts[span] - self.offsets[output])}"


def batch(
    outputs: Iterable[Iterable[Span]],
    *,
    lengths: Sequence[int] | Integers | None = None,
    ids: Sequence[object] | None = None,
) -> SpanBatch:
    """Check the spans of several outputs and lay them out flat.

    `outputs`: for each output its `weight_versions`, as records or as JSON objects. `lengths`: how many
    tokens each output has; None takes the end of its last span. `ids`: what to call the outputs in errors,
    by default their index.

    Raises `InvalidInput`, naming the request and the token, for a gap, an overlap, a range that cannot be,
    and spans that do not end with the output.
    """
    names: list[str] = []
    begin: list[int] = []
    end: list[int] = []
    counts: list[int] = []
    for spans in outputs:
        before = len(begin)
        for span in spans:
            if isinstance(span, WeightVersionSpan):
                names.append(span.version)
                begin.append(span.start)
                end.append(span.end)
            else:
                _take(span, names, begin, end, len(counts), ids)
        counts.append(len(begin) - before)
    called = range(len(counts)) if ids is None else ids
    if len(called) != len(counts):
        raise InvalidInput(f"{len(called)} ids for {len(counts)} outputs", hint="give one id an output")
    distinct = {name: i for i, name in enumerate(dict.fromkeys(names))}
    code = np.fromiter((distinct[name] for name in names), np.int64, len(names))
    owner = np.repeat(np.arange(len(counts)), counts)
    first, last = np.array(begin, np.int64), np.array(end, np.int64)
    _check_order(first, last, owner, called, names)
    sizes = _sizes(lengths, counts, last, called)
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    return SpanBatch(tuple(distinct), code, first + offsets[owner], last - first, owner, offsets, called)


def _take(
    span: Span,
    names: list[str],
    begin: list[int],
    end: list[int],
    output: int,
    ids: Sequence[object] | None,
) -> None:
    try:
        name, first, last = span["version"], span["start"], span["end"]  # type: ignore[index]
    except (KeyError, TypeError):
        name = first = last = None
    if type(name) is not str or type(first) is not int or type(last) is not int or not 0 <= first <= last:
        called = output if ids is None or output >= len(ids) else ids[output]
        raise InvalidInput(
            f"request {called!r}: {span!r} is no span", hint='{"version": str, "start": int, "end": int}'
        )
    names.append(name)
    begin.append(first)
    end.append(last)


def _sizes(
    lengths: Sequence[int] | Integers | None, counts: list[int], last: Integers, ids: Sequence[object]
) -> Integers:
    ends = np.zeros(len(counts), np.int64)
    stops = np.cumsum(counts)
    some = np.array(counts, np.int64) > 0
    ends[some] = last[stops[some] - 1] if len(last) else 0
    if lengths is None:
        return ends
    sizes = np.asarray(lengths)
    if sizes.shape != (len(counts),) or (len(counts) and sizes.dtype.kind not in "iu"):
        raise InvalidInput(
            f"lengths has shape {sizes.shape} and dtype {sizes.dtype} for {len(counts)} outputs",
            hint="give the number of tokens of each output",
        )
    wrong = np.flatnonzero(ends != sizes)
    if len(wrong):
        i = int(wrong[0])
        covered, size = int(ends[i]), int(sizes[i])
        raise InvalidInput(
            f"request {ids[i]!r}, token {min(covered, size)}: spans cover {covered} tokens of {size}",
            hint=_HINT,
        )
    return sizes.astype(np.int64)


def _check_order(
    first: Integers, last: Integers, owner: Integers, ids: Sequence[object], names: list[str]
) -> None:
    """Every span begins where the one before it in the same output ended."""
    if not len(first):
        return
    wanted = np.concatenate(([0], last[:-1]))
    wanted[np.concatenate(([True], owner[1:] != owner[:-1]))] = 0
    wrong = np.flatnonzero(first != wanted)
    if len(wrong):
        i = int(wrong[0])
        what = "overlap" if first[i] < wanted[i] else "gap"
        raise InvalidInput(
            f"request {ids[int(owner[i])]!r}, token {min(int(first[i]), int(wanted[i]))}: {what}: "
            f"span [{first[i]}, {last[i]}) of label {names[i]!r} does not follow on from token {wanted[i]}",
            hint=_HINT,
        )


def _as_batch(spans: SpanBatch | Iterable[Span]) -> SpanBatch:
    return spans if isinstance(spans, SpanBatch) else batch([spans])


def _lineage(source: Source) -> Lineage:
    if isinstance(source, Lineage):
        return source
    if isinstance(source, Mapping):
        return Lineage(source, None)
    records = source.versions()
    return Lineage({r.label: r.version for r in records}, {r.version: r.parent for r in records})


def _versions(spans: SpanBatch, lineage: Lineage) -> Integers:
    """int64 [labels]: the version of each distinct label."""
    found = np.empty(len(spans.labels), np.int64)
    for i, label in enumerate(spans.labels):
        version = lineage.labels.get(label)
        if version is None:
            span = int(np.flatnonzero(spans.code == i)[0])
            raise VersionNotFound(
                f"{spans.place(span)}: no version has the label {label!r}",
                hint="resolve labels through the store of their own run, or add the label to the mapping",
            )
        found[i] = version
    return found


def _spread(spans: SpanBatch, values: NDArray[Any], like: Like, device: object) -> Array:
    """`values` [spans] as one value a token."""
    flat = np.repeat(values, spans.lengths)
    if like == "numpy":
        return flat
    if like != "torch":
        raise InvalidInput(f"like is {like!r}", hint="like is numpy or torch")
    import torch

    tensor = torch.from_numpy(flat)
    return tensor if device is None else tensor.to(device)  # type: ignore[call-overload]


def per_token(
    spans: SpanBatch | Iterable[Span],
    source: Source | None = None,
    *,
    like: Like = "numpy",
    device: object = None,
) -> Array:
    """The version of every token, int64 [tokens]; without a source its label (an array of `str`, numpy only).

    Raises `VersionNotFound` for a label that the source does not know, naming request and token, and
    `InvalidInput` as `batch`.
    """
    flat = _as_batch(spans)
    if source is None:
        return _spread(flat, np.array(flat.labels, dtype=object)[flat.code], like, device)
    return _spread(flat, _versions(flat, _lineage(source))[flat.code], like, device)


def _ages(spans: SpanBatch, now: int | Sequence[int] | Integers, source: Source) -> Integers:
    """int64 [spans]: steps along the lineage between each span's version and `now`."""
    lineage = _lineage(source)
    versions = _versions(spans, lineage)
    current = np.asarray(now)
    typed = current.dtype.kind in "iu" or not current.size
    if not typed or current.shape not in ((), (len(spans),)):
        raise InvalidInput(
            f"now has shape {current.shape} and dtype {current.dtype} for {len(spans)} outputs",
            hint="give one version, or one an output",
        )
    target = np.broadcast_to(current, (len(spans),))[spans.owner] if len(spans) else np.empty(0, np.int64)
    pairs, where = np.unique(np.stack((versions[spans.code], target)), axis=1, return_inverse=True)
    if lineage.parents is None:
        steps = np.abs(pairs[0] - pairs[1])
    else:
        both = pairs.T.tolist()
        steps = np.array([lines.distance(lineage.parents, a, b) for a, b in both], np.int64)
    found: Integers = steps[where.reshape(-1)]
    return found


def staleness(
    spans: SpanBatch | Iterable[Span],
    now: int | Sequence[int] | Integers,
    source: Source,
    *,
    like: Like = "numpy",
    device: object = None,
) -> Array:
    """Training steps between the version that sampled each token and `now`, int64 [tokens].

    Along the lineage, not the numbers: after a rewind a token of an abandoned version counts its steps off
    the line, too. `now`: the version that is trained on (one, or one for each output). Raises
    `VersionNotFound` and `InvalidInput`.
    """
    flat = _as_batch(spans)
    return _spread(flat, _ages(flat, now, source), like, device)


def mask(
    spans: SpanBatch | Iterable[Span],
    source: Source,
    *,
    now: int | Sequence[int] | Integers | None = None,
    at_most: int | None = None,
    versions: Iterable[int] | None = None,
    like: Like = "numpy",
    device: object = None,
) -> Array:
    """Which tokens to train on, bool [tokens]: at most `at_most` steps stale against `now`, and of one of
    `versions`.

    Either condition may be left out. Raises `InvalidInput` when both are, or only one of `now` and
    `at_most` is given.
    """
    if (now is None) != (at_most is None) or (now is None and versions is None):
        raise InvalidInput(
            "mask needs now and at_most, or versions",
            hint="for example mask(batch, line, now=120, at_most=4)",
        )
    flat = _as_batch(spans)
    keep = np.ones(len(flat.code), bool)
    if now is not None and at_most is not None:
        keep &= _ages(flat, now, source) <= at_most
    if versions is not None:
        wanted = np.fromiter(versions, np.int64)
        keep &= np.isin(_versions(flat, _lineage(source))[flat.code], wanted)
    return _spread(flat, keep, like, device)


class Ages(Struct, frozen=True):
    """Staleness of each output: over its tokens, in training steps."""

    min: NDArray[np.int64]
    """[outputs]; -1 for an output without tokens."""
    max: NDArray[np.int64]
    """[outputs]; -1 for an output without tokens."""
    mean: NDArray[np.float64]
    """[outputs]; NaN for an output without tokens."""


def ages(spans: SpanBatch | Iterable[Span], now: int | Sequence[int] | Integers, source: Source) -> Ages:
    """Least, greatest and mean staleness of each output. Raises as `staleness`."""
    flat = _as_batch(spans)
    steps = _ages(flat, now, source)
    some = flat.lengths > 0
    steps, owner, lengths = steps[some], flat.owner[some], flat.lengths[some]
    low = np.full(len(flat), np.iinfo(np.int64).max)
    high = np.full(len(flat), -1, np.int64)
    np.minimum.at(low, owner, steps)
    np.maximum.at(high, owner, steps)
    tokens = np.diff(flat.offsets)
    total = np.bincount(owner, weights=steps * lengths, minlength=len(flat))
    with np.errstate(invalid="ignore"):
        mean = np.where(tokens > 0, total / np.maximum(tokens, 1), np.nan)
    return Ages(np.where(tokens > 0, low, -1), high, mean)


class Segment(Struct, frozen=True):
    """Consecutive tokens of one output that one version sampled."""

    output: int
    """Index in the batch."""
    id: object
    version: int
    label: str
    start: int
    """Output tokens `start` to `end`."""
    end: int
    flat: slice
    """The same, in the flat tokens of the batch."""
    values: dict[str, Any]
    """Views into what was given to `split`: of `outputs` one row an output token; of `contexts` the rows of
    the forward passes that sampled these tokens, with the prompt's for the first segment."""


def split(
    spans: SpanBatch | Iterable[Span],
    source: Source,
    *,
    outputs: Mapping[str, Any] | None = None,
    contexts: Mapping[str, Sequence[Any]] | None = None,
    prompts: Sequence[int] | None = None,
) -> dict[int, list[Segment]]:
    """The batch by version, oldest first, so that each version is loaded once for a replay.

    `outputs`: name -> flat values with one row for each output token (log-probabilities, `sampling_mask`):
    an array, a tensor or a list. `contexts`: name -> for each output its rows over context positions,
    prompt and output but the last token (`routed_experts` as vLLM gives it); needs `prompts`, the number of
    prompt tokens of each output. Nothing is copied.

    Raises `InvalidInput`, naming the value and the request, when rows are missing, and as `per_token`.
    """
    flat = _as_batch(spans)
    outputs, contexts = outputs or {}, contexts or {}
    for name, values in outputs.items():
        if len(values) != flat.tokens:
            raise InvalidInput(
                f"{name} has {len(values)} rows for {flat.tokens} tokens", hint="give one row a token, flat"
            )
    starts = _prompt_rows(flat, contexts, prompts)
    versions = _versions(flat, _lineage(source))[flat.code]
    found: dict[int, list[Segment]] = {}
    for i in np.lexsort((flat.starts, versions)).tolist():
        begin, size, output = int(flat.starts[i]), int(flat.lengths[i]), int(flat.owner[i])
        if not size:
            continue
        start = begin - int(flat.offsets[output])
        where = slice(begin, begin + size)
        values = {name: rows[where] for name, rows in outputs.items()}
        for name, each in contexts.items():
            # Output token i is sampled by the pass over context position prompt + i - 1.
            lead = starts[output] - 1
            values[name] = each[output][0 if start == 0 else lead + start : lead + start + size]
        version = int(versions[i])
        segment = Segment(
            output, flat.ids[output], version, flat.labels[flat.code[i]], start, start + size, where, values
        )
        found.setdefault(version, []).append(segment)
    return found


def _prompt_rows(
    flat: SpanBatch, contexts: Mapping[str, Sequence[Any]], prompts: Sequence[int] | None
) -> Sequence[int]:
    if not contexts:
        return ()
    if prompts is None or len(prompts) != len(flat):
        raise InvalidInput(
            f"prompts has {0 if prompts is None else len(prompts)} entries for {len(flat)} outputs",
            hint="values over context positions need the number of prompt tokens of each output",
        )
    sizes = np.diff(flat.offsets)
    for name, each in contexts.items():
        if len(each) != len(flat):
            raise InvalidInput(
                f"{name} has {len(each)} entries for {len(flat)} outputs", hint="one an output"
            )
        for i, rows in enumerate(each):
            wanted = prompts[i] + int(sizes[i]) - 1
            if sizes[i] and len(rows) != wanted:
                raise InvalidInput(
                    f"request {flat.ids[i]!r}: {name} has {len(rows)} rows for {wanted} context positions",
                    hint="prompt and output tokens, the last one excepted",
                )
    return prompts
