"""A batch cut by version, for a replay that loads each version once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from weightline.errors import InvalidInput
from weightline.spans.ragged import Span, SpanBatch
from weightline.spans.tokens import Source, as_batch, lineage_of, versions_of


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
    flat = as_batch(spans)
    outputs, contexts = outputs or {}, contexts or {}
    for name, values in outputs.items():
        if len(values) != flat.tokens:
            raise InvalidInput(
                f"{name} has {len(values)} rows for {flat.tokens} tokens", hint="give one row a token, flat"
            )
    starts = _prompt_rows(flat, contexts, prompts)
    versions = versions_of(flat, lineage_of(source))[flat.code]
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
