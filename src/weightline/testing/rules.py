"""The rules of a single answer, as named checks."""

from __future__ import annotations

from weightline.core import spans
from weightline.errors import InvalidInput
from weightline.testing.client import Output, Reply
from weightline.testing.report import Findings
from weightline.testing.swaps import Mark


def ended(found: Findings, id: str, reply: Reply, reason: str) -> bool:
    """One terminal, of this reason, and for `length` with all tokens."""
    output = reply.single
    fine = reply.status == 200 and not reply.error and output.finish == [reason] and reply.ends == 1
    text = f"HTTP {reply.status} {reply.error} finish {output.finish}, {reply.ends} ends"
    found.add(
        f"{id}.ended", f"it ends once, with finish reason {reason}", fine and not output.after_final, text
    )
    return fine


def whole(found: Findings, id: str, reply: Reply) -> None:
    """All tokens that were asked for."""
    count = len(reply.single.token_ids)
    found.add(f"{id}.tokens", "no token is lost or doubled", count == reply.ask.max_tokens, f"{count} tokens")


def delivered(found: Findings, id: str, reply: Reply) -> None:
    """Spans on the final output only."""
    output = reply.single
    fine = output.spans is not None and not output.early_spans
    text = f"spans {output.spans}, {output.early_spans} events had them earlier"
    found.add(f"{id}.delivery", "spans come with the final output, and with no other", fine, text)


def text_is_there(found: Findings, id: str, reply: Reply) -> None:
    """Text mode brings text beside the tokens."""
    output = reply.single
    found.add(f"{id}.text", "text mode brings text", isinstance(output.text, str), repr(output.text)[:80])


def covered(found: Findings, id: str, output: Output) -> bool:
    """Spans are canonical over the output."""
    try:
        spans.validate(output.versions(), len(output.token_ids))
    except InvalidInput as error:
        return found.add(f"{id}.cover", "spans cover every token once", False, error.message)
    return found.add(f"{id}.cover", "spans cover every token once", True, output.spans)


def labelled(found: Findings, id: str, output: Output, *marks: Mark) -> bool:
    """The ranges have exactly these labels, in this order."""
    got = [span.get("version") for span in output.spans or []]
    wanted = [mark.label for mark in marks]
    return found.add(f"{id}.labels", f"{len(wanted)} ranges, of the labels in order", got == wanted, got)


def exact(found: Findings, id: str, output: Output, *marks: Mark) -> bool:
    """Every token is the one that its label's version emits."""
    by_label = {mark.label: mark for mark in marks}
    try:
        labels = spans.per_token(output.versions())
    except InvalidInput as error:
        return found.add(f"{id}.exact", "every token is that of its label's version", False, error.message)
    wrong = [
        i
        for i, (label, token) in enumerate(zip(labels, output.token_ids, strict=False))
        if label not in by_label or by_label[label].token != token
    ]
    text = (
        f"token {wrong[0]} is {output.token_ids[wrong[0]]} under {labels[wrong[0]]}"
        if wrong
        else f"{len(labels)} tokens"
    )
    fine = not wrong and len(labels) == len(output.token_ids)
    return found.add(f"{id}.exact", "every token is that of its label's version", fine, text)


def boundary(found: Findings, id: str, output: Output, old: Mark, new: Mark) -> None:
    """The acceptance of the proposal: a zeroed head emits 0, so the boundary sits at the first 0."""
    tokens = output.token_ids
    found_spans = output.spans or []
    at = found_spans[1].get("start") if len(found_spans) == 2 else None
    first = tokens.index(0) if 0 in tokens else None
    found.add(
        f"{id}.boundary",
        "the boundary sits at the first 0",
        at is not None and at == first,
        f"boundary {at}, first 0 at {first}",
    )
    before = tokens[at - 1] if isinstance(at, int) and 0 < at <= len(tokens) else None
    found.add(
        f"{id}.before", "the token before the boundary is not 0", before == old.token, f"it is {before}"
    )
    after = tokens[at:] if isinstance(at, int) else []
    found.add(
        f"{id}.after",
        "all tokens from the boundary on are 0",
        bool(after) and set(after) == {new.token},
        after[:8],
    )
