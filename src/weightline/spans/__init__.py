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

from weightline.core.spans import SpanBuilder, from_tokens, merge, validate
from weightline.spans.ragged import SpanBatch, batch
from weightline.spans.segments import Segment, split
from weightline.spans.tokens import Ages, Lineage, ages, mask, per_token, staleness

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
