"""Group-relative policy optimisation, at the size of the idea.

Advantages are rewards normalised within each group (Shao et al. 2024, arXiv:2402.03300, without the KL term);
the objective is PPO's clipped ratio against the log-probabilities that the rollout engine recorded (Schulman
et al. 2017, arXiv:1707.06347), averaged over all tokens of a step. So tokens of older versions are corrected
for, each by its own ratio.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

if TYPE_CHECKING:
    import torch

_EPSILON = 1e-4


class Example(Struct, frozen=True):
    """One sampled answer, ready to learn from."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of `tokens`, under the weights that sampled each of them."""
    advantage: float


class StepResult(Struct, frozen=True):
    """What one optimizer step did."""

    loss: float
    grad_norm: float
    """Before clipping."""
    tokens: int
    """Tokens with an advantage: those of groups whose rewards are all equal teach nothing and are left
    out."""


def advantages(rewards: Sequence[float]) -> list[float]:
    """(reward - mean) / (standard deviation + 1e-4) within one group; all zero when the rewards are equal."""
    mean = math.fsum(rewards) / len(rewards)
    spread = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
    if spread < 1e-9:
        return [0.0] * len(rewards)
    return [(r - mean) / (spread + _EPSILON) for r in rewards]


def train_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    examples: Sequence[Example],
    *,
    clip: float = 0.2,
    max_grad_norm: float = 1.0,
    micro_batch: int = 8,
) -> StepResult:
    """One optimizer step on `examples`, `micro_batch` of them at a time.

    Examples without tokens or with advantage 0 have no gradient and are not computed; with none left the
    optimizer is not stepped. `model`: a causal language model of transformers, fp32. Gradients are cleared at
    the end.
    """
    import torch

    useful = [e for e in examples if e.tokens and e.advantage != 0.0]
    total = sum(len(e.tokens) for e in useful)
    if not useful:
        return StepResult(0.0, 0.0, 0)
    model.train()
    loss = 0.0
    for batch in _batches(useful, micro_batch):
        part = policy_loss(model, batch, clip=clip) / total
        part.backward()  # type: ignore[no-untyped-call]
        loss += float(part.detach())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(loss, float(norm), total)


def policy_loss(model: Any, batch: Sequence[Example], *, clip: float) -> torch.Tensor:
    """Sum over all tokens of `batch` of -min(ratio * A, clip(ratio, 1 - clip, 1 + clip) * A); a scalar."""
    import torch

    logprobs, mask = token_logprobs(model, [(e.prompt, e.tokens) for e in batch])
    old = torch.zeros_like(logprobs)
    for row, example in enumerate(batch):
        old[row, mask[row]] = torch.tensor(example.logprobs, dtype=logprobs.dtype)
    advantage = torch.tensor([e.advantage for e in batch], dtype=logprobs.dtype)[:, None]
    ratio = torch.exp((logprobs - old).clamp(-20.0, 20.0))
    gain = torch.minimum(ratio * advantage, ratio.clamp(1.0 - clip, 1.0 + clip) * advantage)
    return -gain[mask].sum()


def token_logprobs(
    model: Any, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of each answer's tokens after its prompt, and the mask of those that are tokens.

    Both [len(pairs), K]; column j of a row belongs to the position `first + j`, with `first` the shortest
    prompt's length. Rows are padded on the right with attention masked, so padding changes nothing. Logits
    are computed for the last K positions only.
    """
    import torch

    longest = max(len(p) + len(t) for p, t in pairs)
    first = min(len(p) for p, _ in pairs)
    ids = torch.zeros(len(pairs), longest, dtype=torch.long)
    attention = torch.zeros(len(pairs), longest, dtype=torch.long)
    mask = torch.zeros(len(pairs), longest - first, dtype=torch.bool)
    for row, (prompt, tokens) in enumerate(pairs):
        end = len(prompt) + len(tokens)
        ids[row, :end] = torch.tensor([*prompt, *tokens])
        attention[row, :end] = 1
        mask[row, len(prompt) - first : end - first] = True
    logits = model(
        input_ids=ids, attention_mask=attention, logits_to_keep=longest - first + 1, use_cache=False
    ).logits[:, :-1]
    targets = ids[:, first:]
    chosen = logits.gather(-1, targets[..., None])[..., 0]
    return chosen - torch.logsumexp(logits, dim=-1), mask


def _batches(examples: Sequence[Example], size: int) -> Iterator[list[Example]]:
    """Of similar length together, so that little is padding."""
    ordered = sorted(examples, key=lambda e: len(e.prompt) + len(e.tokens))
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]
