"""The limits of one engine. Apart from the engine, so that a command line can name them without torch."""

from __future__ import annotations

from msgspec import Struct


class EngineOptions(Struct, frozen=True, kw_only=True):
    """Limits of one engine."""

    max_num_seqs: int = 16
    """Sequences that run at once; each has a key-value row of `max_model_len` positions."""
    max_model_len: int = 2048
    """Prompt and output tokens of one sequence."""
    prefill_tokens: int = 512
    """Prompt positions computed in one step: bounds how long running requests wait for a new prompt."""
    kv_tokens: int | None = None
    """Context positions that running sequences may have together; when they have more, the request admitted
    last waits and is computed anew later. None: all rows in full.
    """
    prefix_tokens: int = 4096
    """Positions of ended and running requests whose keys and values are held for new requests with the same
    beginning; 0: none.
    """
    session_timeout: float = 30.0
    """Seconds after which a silent refit session is undone."""
