"""Where two answers differ in a way that a client would notice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

EXTRA = frozenset({"kind", "hint", "kv_weight_versions", "kv_recomputed_at", "cached_tokens"})
"""What our answers have beside vLLM's: of an error, and of an ended sequence."""
FREE = frozenset({"message", "id", "request_id", "created", "system_fingerprint", "owned_by", "version"})
"""Keys whose values are each engine's own; their types are compared."""
_CLOSE = 2e-3


def differences(
    ours: dict[str, Any], theirs: dict[str, Any], *, sampled: bool = False, coalesced: bool = False
) -> list[str]:
    """Of two put-down answers. With `sampled` what was sampled may differ, and with it the texts; with
    `coalesced` the events of a stream may bring several tokens each.
    """
    found = [
        f"{key}: {ours[key]!r}, not {theirs[key]!r}"
        for key in ("status", "media")
        if ours[key] != theirs[key]
    ]
    mine, other = ours["body"], theirs["body"]
    if isinstance(other, list) and isinstance(mine, list):
        mine, other = _by_choice(mine), _by_choice(other)
        if coalesced:
            mine, other = _joined(mine), _joined(other)
    return found + list(_differences("body", mine, other, sampled))


def _by_choice(events: list[Any]) -> dict[str, list[Any]]:
    """Events of a stream in order, each choice by itself: how choices take turns is nobody's promise."""
    told: dict[str, list[Any]] = defaultdict(list)
    for event in events:
        choices = event["choices"] if isinstance(event, dict) else []
        told[f"choice {choices[0]['index']}" if choices else "end"].append(event)
    return dict(told)


def _joined(told: dict[str, list[Any]]) -> dict[str, Any]:
    """All tokens and all text of each choice, and its last event without them."""
    out: dict[str, Any] = {"end": told.pop("end")}
    for name, events in told.items():
        choices = [e["choices"][0] for e in events]
        tokens = [t for c in choices for t in c.get("token_ids") or ()]
        text = "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)
        gone = dict.fromkeys(("token_ids", "text", "logprobs", "delta"))
        last = {**events[-1], "choices": [{**choices[-1], **gone}]}
        out[name] = {"token_ids": tokens, "text": text, "last": last}
    return out


def _differences(path: str, ours: Any, theirs: Any, sampled: bool) -> Iterator[str]:
    key = path.rsplit(".", 1)[-1].split("[")[0]
    if _kind(ours) is not _kind(theirs):
        yield f"{path}: {ours!r}, not {theirs!r}"
    elif isinstance(theirs, dict):
        if sampled and key in ("top_logprobs", "logit_bias"):
            return
        lacking, extra = theirs.keys() - ours.keys(), ours.keys() - theirs.keys() - EXTRA
        if lacking or extra:
            yield f"{path}: lacks {sorted(lacking)}, has {sorted(extra)} beside"
        for name in theirs.keys() & ours.keys():
            yield from _differences(f"{path}.{name}", ours[name], theirs[name], sampled)
    elif isinstance(theirs, list):
        if len(ours) != len(theirs):
            if not sampled or key not in ("bytes",):
                yield f"{path}: {len(ours)} entries, not {len(theirs)}: {ours!r}, not {theirs!r}"
            return
        for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(f"{path}[{i}]", mine, other, sampled)
    elif isinstance(theirs, float):
        if not sampled and abs(ours - theirs) > _CLOSE:
            yield f"{path}: {ours!r}, not {theirs!r}"
    elif ours != theirs and key not in FREE and not (sampled and _is_drawn(key)):
        yield f"{path}: {ours!r}, not {theirs!r}"


def _is_drawn(key: str) -> bool:
    return key in ("token_ids", "text", "content", "token", "token_id", "rank", "bytes")


def _kind(value: Any) -> type:
    return float if isinstance(value, int) and not isinstance(value, bool) else type(value)
