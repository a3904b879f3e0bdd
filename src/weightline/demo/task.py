"""What the demo learns: an endless stream of prompts and a reward that verifies each answer.

Prompt `i` of a stream depends on the seed and on `i` only, so a position (the next `i`) is all that has to be
saved to go on with the same prompts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

from weightline.errors import InvalidInput

TASKS = ("sums", "tokens")


class Prompt(Struct, frozen=True):
    """One prompt of a task."""

    index: int
    """Its place in the stream."""
    token_ids: tuple[int, ...]
    answer: str
    """What the reward checks against; empty when it needs nothing."""


class Task(Protocol):
    """A stream of prompts with a verifiable reward. Not thread-safe; rewards may be computed from any
    thread."""

    position: int
    """Index of the next prompt. May be set, to go on from a saved one."""

    def draw(self) -> Prompt:
        """The next prompt; `position` moves on by one."""
        ...

    def reward(self, prompt: Prompt, token_ids: Sequence[int], *, finished: bool) -> float:
        """From 0 to 1. `finished`: the model ended the answer itself, before the limit on tokens."""
        ...


class SumsTask:
    """Sums of two one-digit numbers, for a chat model: "5 + 6 = ?".

    Reward: 0.6 when the last number of the answer is the sum, 0.2 when the answer is finished, and 0.2 when
    it is the sum and nothing else (a full stop apart). SmolLM2-135M-Instruct, at temperature 1 and 16 tokens,
    scores about 0.2 in the mean, and 7 of 8 groups of 4 samples get rewards that differ.
    """

    name = "sums"

    def __init__(self, tokenizer: Any, *, seed: int = 0, position: int = 0) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise InvalidInput(
                "task sums: the model's tokenizer has no chat template",
                hint='use the task "tokens" for a model that does not chat',
            )
        self._tokenizer = tokenizer
        self._seed = seed
        self.position = position

    def draw(self) -> Prompt:
        """The next sum, through the model's own chat template."""
        index, self.position = self.position, self.position + 1
        rng = random.Random(f"sums {self._seed} {index}")
        a, b = rng.randint(1, 9), rng.randint(1, 9)
        chat = [
            {"role": "system", "content": "Answer briefly."},
            {"role": "user", "content": f"{a} + {b} = ?"},
        ]
        ids = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        return Prompt(index, tuple(ids), str(a + b))

    def reward(self, prompt: Prompt, token_ids: Sequence[int], *, finished: bool) -> float:
        """See the class. The text of the answer is decoded and read; nothing is assumed of its tokens."""
        return sum_reward(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=True),
            prompt.answer,
            finished=finished,
        )


def sum_reward(text: str, answer: str, *, finished: bool) -> float:
    """The reward of `SumsTask` for an answer's text."""
    numbers = re.findall(r"\d+", text)
    right = bool(numbers) and numbers[-1] == answer
    bare = text.strip().removesuffix(".") == answer
    return round(0.6 * right + 0.2 * finished + 0.2 * bare, 3)


class TokensTask:
    """For a model that knows no language: random prompts; the reward is the share of its tokens in a fixed
    half of the vocabulary.

    Random weights hit that half more or less often by chance, so the samples of a group differ, and a
    gradient can raise it.
    """

    name = "tokens"

    def __init__(self, vocabulary: int, *, seed: int = 0, position: int = 0, length: int = 8) -> None:
        if vocabulary < 16:
            raise InvalidInput(
                f"task tokens: a vocabulary of {vocabulary}", hint="it needs at least 16 tokens"
            )
        self._vocabulary = vocabulary
        self._seed = seed
        self._length = length
        self.position = position
        self.wanted = frozenset(random.Random(f"wanted {seed}").sample(range(vocabulary), vocabulary // 2))

    def draw(self) -> Prompt:
        """The next prompt: `length` random token ids, none of the first eight (special tokens as a rule)."""
        index, self.position = self.position, self.position + 1
        rng = random.Random(f"tokens {self._seed} {index}")
        return Prompt(index, tuple(rng.randrange(8, self._vocabulary) for _ in range(self._length)), "")

    def reward(self, prompt: Prompt, token_ids: Sequence[int], *, finished: bool) -> float:  # noqa: ARG002
        """Share of `token_ids` in `wanted`; 0 for no tokens."""
        return sum(token in self.wanted for token in token_ids) / len(token_ids) if token_ids else 0.0


def load_task(name: str, model: Path, *, seed: int, position: int = 0) -> Task:
    """The task `name` for the model in the folder `model`. Raises `InvalidInput` for an unknown name, or a
    model that cannot do it."""
    if name not in TASKS:
        raise InvalidInput(f"no task {name!r}", hint=f"use one of {', '.join(TASKS)}")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    if name == "sums":
        return SumsTask(tokenizer, seed=seed, position=position)
    return TokensTask(len(tokenizer), seed=seed, position=position)
