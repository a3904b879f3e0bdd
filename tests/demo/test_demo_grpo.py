"""GRPO: advantages, the clipped objective, and a step against figures worked out another way."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightline.demo.grpo import Example, advantages, policy_loss, token_logprobs, train_step
from weightline.demo.models import tiny_model

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("grpo") / "tiny")


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_advantages_sum_to_nothing_and_keep_the_order(rewards: list[float]) -> None:
    found = advantages(rewards)
    assert math.isclose(sum(found), 0.0, abs_tol=1e-6)
    for a, x in zip(rewards, found, strict=True):
        for b, y in zip(rewards, found, strict=True):
            assert not (a < b and x > y)


def test_equal_rewards_teach_nothing() -> None:
    assert advantages([0.3, 0.3, 0.3]) == [0.0, 0.0, 0.0]
    assert advantages([0.0, 1.0]) == pytest.approx([-1.0, 1.0], rel=1e-3)


def direct(model: Any, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> torch.Tensor:
    """One sequence, no padding, all logits."""
    ids = torch.tensor([[*prompt, *tokens]])
    logs = model(input_ids=ids).logits[0].log_softmax(-1)
    places = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    return logs[places, torch.tensor(tokens)]


PAIRS = [((5, 6, 7), (8, 9)), ((10,), (11, 12, 13, 14)), ((20, 21, 22, 23, 24), (25,))]


def test_padding_and_batching_change_no_log_probability(folder: Path) -> None:
    model = load(folder)
    with torch.no_grad():
        logprobs, mask = token_logprobs(model, PAIRS)
        for row, (prompt, tokens) in enumerate(PAIRS):
            assert int(mask[row].sum()) == len(tokens)
            torch.testing.assert_close(logprobs[row, mask[row]], direct(model, prompt, tokens))


def test_the_objective_is_clipped_ratio_times_advantage(folder: Path) -> None:
    model = load(folder)
    shifts = {1.5: 0.5, -0.9: -0.8}  # advantage -> how far the old log-probabilities are below the new ones
    batch, expected = [], 0.0
    with torch.no_grad():
        for (prompt, tokens), (advantage, shift) in zip(PAIRS, [*shifts.items(), (0.7, 0.01)], strict=True):
            new = direct(model, prompt, tokens)
            batch.append(Example(prompt, tokens, tuple((new - shift).tolist()), advantage))
            ratio = math.exp(shift)
            clipped = min(max(ratio, 0.8), 1.2)
            expected -= len(tokens) * min(ratio * advantage, clipped * advantage)
        assert float(policy_loss(model, batch, clip=0.2)) == pytest.approx(expected, rel=1e-4)


def test_a_clipped_token_has_no_gradient(folder: Path) -> None:
    model = load(folder)
    prompt, tokens = PAIRS[0]
    new = direct(model, prompt, tokens).detach()
    policy_loss(model, [Example(prompt, tokens, tuple((new - 1.0).tolist()), 1.0)], clip=0.2).backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def examples(model: Any) -> list[Example]:
    found = []
    with torch.no_grad():
        for (prompt, tokens), advantage in zip(PAIRS, (1.0, -1.0, 0.0), strict=True):
            found.append(Example(prompt, tokens, tuple(direct(model, prompt, tokens).tolist()), advantage))
    return found


def test_a_step_raises_what_was_good_and_lowers_what_was_bad(folder: Path) -> None:
    model = load(folder)
    batch = examples(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    result = train_step(model, optimizer, batch)
    assert result.tokens == 6  # the one without an advantage is left out
    assert result.grad_norm > 0
    with torch.no_grad():
        for example in batch[:2]:
            change = direct(model, example.prompt, example.tokens).sum() - sum(example.logprobs)
            assert change * example.advantage > 0
    assert all(p.grad is None for p in model.parameters())


def test_micro_batches_give_the_gradient_of_the_whole(folder: Path) -> None:
    norms = []
    for size in (1, 8):
        model = load(folder)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        norms.append(train_step(model, optimizer, examples(model), micro_batch=size).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_nothing_to_learn_leaves_weights_and_optimizer_alone(folder: Path) -> None:
    model = load(folder)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    result = train_step(model, optimizer, [Example((1,), (2,), (-1.0,), 0.0), Example((1,), (), (), 1.0)])
    assert (result.loss, result.grad_norm, result.tokens) == (0.0, 0.0, 0)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not optimizer.state
