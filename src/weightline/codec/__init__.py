"""Lossless deltas of weights: compare bits, encode what changed, apply it in place, and a digest that
follows along.

numpy only at import; numba is loaded with the first kernel, torch never (its tensors are accepted).
"""

from __future__ import annotations

from weightline.codec.apply import Undo, apply_
from weightline.codec.backend import set_threads, threads, warm
from weightline.codec.delta import Delta, TensorChange
from weightline.codec.diffing import diff, full
from weightline.codec.digest import (
    combine,
    difference,
    digest_at,
    digest_of,
    digest_rows,
    digest_update,
    narrow,
    weights_digest,
)
from weightline.codec.dtypes import (
    SUPPORTED,
    bits_dtype,
    bits_of,
    count_of,
    from_bits,
    is_torch,
    nbytes_of,
    numpy_dtype,
    parse_dtype,
    spec_of,
    specs_of,
    width_of,
)
from weightline.codec.merging import join, merge, squash
from weightline.codec.reading import read_delta, write_delta
from weightline.codec.shadow import Shadow

__all__ = [
    "SUPPORTED",
    "Delta",
    "Shadow",
    "TensorChange",
    "Undo",
    "apply_",
    "bits_dtype",
    "bits_of",
    "combine",
    "count_of",
    "diff",
    "difference",
    "digest_at",
    "digest_of",
    "digest_rows",
    "digest_update",
    "from_bits",
    "full",
    "is_torch",
    "join",
    "merge",
    "narrow",
    "nbytes_of",
    "numpy_dtype",
    "parse_dtype",
    "read_delta",
    "set_threads",
    "spec_of",
    "specs_of",
    "squash",
    "threads",
    "warm",
    "weights_digest",
    "width_of",
    "write_delta",
]
