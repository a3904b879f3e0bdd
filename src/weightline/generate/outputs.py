"""What the Python face hands out: outputs of one request, whole or in parts that merge."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Struct

from weightline.errors import InvalidInput
from weightline.generate.requests import Chunk, Completion, FinishReason
from weightline.generate.sampling import TokenLogprobs
from weightline.types import WeightVersionSpan


class CompletionOutput(Struct, frozen=True, kw_only=True):
    """One output sequence, or what a part of the stream brought to it.

    Spans, like the finish reason, are there only when the sequence has ended, and then cover all of it: also
    what earlier parts brought.
    """

    index: int
    token_ids: tuple[int, ...] = ()
    text: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    weight_versions: tuple[WeightVersionSpan, ...] | None = None
    kv_weight_versions: tuple[WeightVersionSpan, ...] | None = None
    kv_recomputed_at: tuple[int, ...] | None = None

    def merged(self, after: CompletionOutput) -> CompletionOutput:
        """This part and the one after it. What belongs to an end (finish reason, stop reason, spans) is that
        of the last part, also where it has none: an output merged past the end of an input chunk carries no
        spans that stop short of its tokens.
        """
        both_logprobs = None
        if self.logprobs is not None or after.logprobs is not None:
            both_logprobs = (self.logprobs or ()) + (after.logprobs or ())
        text = None
        if self.text is not None or after.text is not None:
            text = (self.text or "") + (after.text or "")
        return msgspec.structs.replace(
            after, token_ids=self.token_ids + after.token_ids, text=text, logprobs=both_logprobs
        )


class RequestOutput(Struct, frozen=True, kw_only=True):
    """Outputs of one request: `n` of them, in order of their index."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool

    def merged(self, after: RequestOutput) -> RequestOutput:
        """This part and the one after it. Raises `InvalidInput` when they are of two requests."""
        if after.request_id != self.request_id:
            raise InvalidInput(
                f"request {after.request_id} does not go on from {self.request_id}",
                hint="merge the parts of one request, in order",
            )
        by_index = {o.index: o for o in self.outputs}
        for output in after.outputs:
            known = by_index.get(output.index)
            by_index[output.index] = output if known is None else known.merged(output)
        outputs = tuple(by_index[i] for i in sorted(by_index))
        return msgspec.structs.replace(after, outputs=outputs)


def part_of(chunk: Chunk) -> CompletionOutput:
    """A chunk as a part of an output."""
    part = CompletionOutput(
        index=chunk.index, token_ids=chunk.token_ids, text=chunk.text, logprobs=chunk.logprobs
    )
    return part if chunk.final is None else ended(part, chunk.final)


def ended(part: CompletionOutput, final: Completion) -> CompletionOutput:
    """`part`, being the last one, with what the end of its sequence says."""
    return msgspec.structs.replace(
        part,
        finish_reason=final.finish_reason,
        stop_reason=final.stop_reason,
        weight_versions=final.weight_versions,
        kv_weight_versions=final.kv_weight_versions,
        kv_recomputed_at=final.kv_recomputed_at,
    )


def whole(request_id: str, prompt: tuple[int, ...], finals: Iterable[Completion]) -> RequestOutput:
    """The output of a request that has ended."""
    outputs = tuple(
        ended(CompletionOutput(index=f.index, token_ids=f.token_ids, text=f.text, logprobs=f.logprobs), f)
        for f in sorted(finals, key=lambda f: f.index)
    )
    return RequestOutput(request_id=request_id, prompt_token_ids=prompt, outputs=outputs, finished=True)
