"""The spans of several outputs, checked and laid out flat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from weightline.errors import InvalidInput
from weightline.types import WeightVersionSpan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

Span = WeightVersionSpan | Mapping[str, Any]
_MOST = 1 << 62
_HINT = "spans are half-open, start at output token 0, have no gap and cover every returned token once"


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
    for spans in _iterable(outputs, "outputs"):
        before = len(begin)
        for span in _iterable(spans, f"request {_called(ids, len(counts))!r}: its spans"):
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


def _called(ids: Sequence[object] | None, output: int) -> object:
    return output if ids is None or output >= len(ids) else ids[output]


def _iterable(value: Any, what: str) -> Iterator[Any]:
    """Its items; a chunk of a stream that is not the last has null where the spans will be."""
    try:
        return iter(value)
    except TypeError:
        raise InvalidInput(
            f"{what} are {value!r}", hint="the spans of an output come with its last chunk, as a list"
        ) from None


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
    whole = type(name) is str and type(first) is int and type(last) is int
    if not whole or not 0 <= first <= last < _MOST:
        raise InvalidInput(
            f"request {_called(ids, output)!r}: {span!r} is no span",
            hint='{"version": str, "start": int, "end": int}',
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
