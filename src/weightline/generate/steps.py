"""The step: one pass of the loop through the model. The label is read once, before it, and stamps every
token that it samples.
"""

from __future__ import annotations

import logging

import torch

from weightline.generate.kv import SlotCache
from weightline.generate.model import LoadedModel
from weightline.generate.prefix import PrefixCache
from weightline.generate.requests import Chunk, FinishReason, Sequence
from weightline.generate.sampling import (
    GREEDY_BELOW,
    SamplingParams,
    TokenLogprobs,
    raw_logprobs,
    sample,
    shaped,
)
from weightline.generate.scheduler import Scheduler

log = logging.getLogger(__name__)


class Stepper:
    """Runs steps over a scheduler's rows. Only the engine thread calls it."""

    def __init__(
        self,
        model: LoadedModel,
        cache: SlotCache,
        scheduler: Scheduler,
        prefix: PrefixCache,
        *,
        max_model_len: int,
        prefill_tokens: int,
    ) -> None:
        self.model = model
        self.cache = cache
        self.scheduler = scheduler
        self.prefix = prefix
        self.max_model_len = max_model_len
        self.prefill_tokens = prefill_tokens
        self.steps = 0
        self.sampled = 0

    def step(self, label: str, *, admit: bool = True) -> None:
        """Compute prompts for at most `prefill_tokens` positions, then one token for every row that is
        ready. `admit`: requests that never ran may begin; preempted ones go on in any case.
        """
        self.steps += 1
        scheduler, budget = self.scheduler, self.prefill_tokens
        scheduler.make_room()
        while budget > 0:
            if scheduler.ready == len(scheduler.rows) and not self._admit(fresh=admit):
                break
            budget -= self._prefill(budget, label)
        if scheduler.ready:
            self._decode(label)

    def _admit(self, *, fresh: bool) -> bool:
        if not (fresh or self.scheduler.resuming):
            return False
        first = len(self.scheduler.rows)
        admitted = self.scheduler.admit()
        for row, sequence in enumerate(admitted, first):
            self.prefix.restore(sequence, row)
            if not sequence.output:
                sequence.cached_tokens = sequence.computed
        return bool(admitted)

    def _prefill(self, budget: int, label: str) -> int:
        scheduler, row = self.scheduler, self.scheduler.ready
        sequence = scheduler.rows[row]
        if not sequence.computed:
            sequence.namespace = self.prefix.namespace
        start, count = sequence.computed, min(budget, sequence.pending)
        mask = self.cache.for_prefill(row, start, count, self.model.dtype, self.model.device)
        tokens = torch.tensor([sequence.context(start, start + count)], device=self.model.device)
        positions = torch.arange(start, start + count, device=self.model.device)[None]
        logits = self.model.logits(tokens, positions, mask, self.cache)
        sequence.cover(label, count)
        if sequence.pending == 0:
            self.prefix.keep(sequence, row, label)
            siblings = scheduler.computed_prompt(sequence)
            self._sample(siblings, logits.expand(len(siblings), -1), label)
        return count

    def _decode(self, label: str) -> None:
        rows = self.scheduler.rows[: self.scheduler.ready]
        places = [s.computed for s in rows]
        mask = self.cache.for_decode(places, self.model.dtype, self.model.device)
        tokens = torch.tensor(
            [s.context(p, p + 1) for s, p in zip(rows, places, strict=True)], device=self.model.device
        )
        positions = torch.tensor(places, device=self.model.device)[:, None]
        logits = self.model.logits(tokens, positions, mask, self.cache)
        for sequence in rows:
            sequence.cover(label, 1)
        self._sample(rows, logits, label)

    def _sample(self, sequences: list[Sequence], logits: torch.Tensor, label: str) -> None:
        finite = torch.isfinite(logits.amax(-1)).tolist()
        greedy = logits.argmax(-1).tolist()
        for i, sequence in enumerate(sequences):
            if not finite[i]:
                sequence.poisoned = True
                self.prefix.renew()  # its prompt may be held, and hold NaN
                log.error(
                    "request %s: logits are not finite under label %s", sequence.request.external_id, label
                )
                self.finish(sequence, "error")
                continue
            params = sequence.request.params
            token = greedy[i] if _is_argmax(params) else self._draw(sequence, logits[i])
            logprobs = None if params.logprobs is None else raw_logprobs(logits[i], token, params.logprobs)
            sequence.accept(token, label, logprobs)
            self.sampled += 1
            self._tell(sequence, token, label, None if logprobs is None else (logprobs,))

    def _draw(self, sequence: Sequence, row: torch.Tensor) -> int:
        request = sequence.request
        if not request.params.plain:
            barred = request.stop_ids | self.model.stop_ids
            row = shaped(row, request.params, request.prompt, sequence.output, barred)
        return sample(row, request.params, sequence.generator)

    def _tell(
        self, sequence: Sequence, token: int, label: str, logprobs: tuple[TokenLogprobs, ...] | None
    ) -> None:
        """Send the chunk of a token just accepted; the last one when it ends the sequence."""
        reason = self._ended(sequence, token)
        if sequence.text is not None:
            met = sequence.text.push(token, stopped=reason == "stop")
            if met is not None:
                reason, sequence.stop_reason = "stop", met
        final = None
        if reason is not None:
            final = sequence.complete(reason)
            self._leave(sequence, label)
        text = None if sequence.text is None else sequence.text.take(final=final is not None)
        sequence.request.deliver(
            Chunk(index=sequence.index, token_ids=(token,), logprobs=logprobs, text=text, final=final)
        )

    def _leave(self, sequence: Sequence, label: str) -> None:
        """Free the row of a sequence that has ended; what it computed serves the next turn of a
        conversation.
        """
        self.prefix.keep(sequence, self.scheduler.rows.index(sequence), label)
        self.scheduler.leave(sequence)

    def _ended(self, sequence: Sequence, token: int) -> FinishReason | None:
        request = sequence.request
        if token in request.stop_ids:
            by_eos = token in self.model.stop_ids and not request.params.ignore_eos
            sequence.stop_reason = None if by_eos else token
            return "stop"
        if len(sequence.output) >= request.max_tokens or sequence.length >= self.max_model_len:
            return "length"
        return None

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence without a new token: its terminal chunk, then its row is free. A second end does
        nothing.
        """
        if sequence.finished:
            return
        final = sequence.complete(reason)
        self.scheduler.leave(sequence)
        empty = () if sequence.request.params.logprobs is not None else None
        text = None if sequence.text is None else sequence.text.take(final=True)
        sequence.request.deliver(
            Chunk(index=sequence.index, token_ids=(), logprobs=empty, text=text, final=final)
        )


def _is_argmax(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_BELOW and params.plain
