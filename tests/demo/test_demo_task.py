"""Tasks: rewards verify what they read, and a position is all that a stream needs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from weightline.demo.models import tiny_model
from weightline.demo.task import Prompt, Task, TokensTask, load_task, sum_reward
from weightline.errors import InvalidInput

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("task") / "tiny")


@pytest.mark.parametrize(
    ("text", "finished", "reward"),
    [
        ("11", True, 1.0),
        (" 11.\n", True, 1.0),
        ("11", False, 0.8),
        ("5 + 6 = 11", True, 0.8),
        ("The answer is 11, of course", False, 0.6),
        ("11 is what 5 + 6 is", True, 0.2),
        ("111", True, 0.2),
        ("eleven", True, 0.2),
        ("", True, 0.2),
        ("5 + 6 = 12 and so", False, 0.0),
    ],
)
def test_a_sum_is_read_from_the_text(text: str, finished: bool, reward: float) -> None:
    assert sum_reward(text, "11", finished=finished) == reward


def test_the_reward_decodes_what_the_model_said(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    task = load_task("sums", tiny, seed=3)
    prompt = task.draw()
    text = tokenizer.decode(prompt.token_ids)
    a, b = text.split("user\n")[1].split(" = ?")[0].split(" + ")
    assert prompt.answer == str(int(a) + int(b))
    said = [*tokenizer(f"{a} + {b} = {prompt.answer}").input_ids, tokenizer.eos_token_id]
    assert task.reward(prompt, said, finished=True) == 0.8
    wrong = tokenizer(str(int(prompt.answer) + 1)).input_ids
    assert task.reward(prompt, wrong, finished=False) == 0.0


@pytest.mark.parametrize("name", ["sums", "tokens"])
def test_a_stream_goes_on_from_its_position(tiny: Path, name: str) -> None:
    task = load_task(name, tiny, seed=5)
    first = [task.draw() for _ in range(10)]
    again = load_task(name, tiny, seed=5, position=6)
    assert [again.draw() for _ in range(4)] == first[6:]
    assert again.position == task.position == 10
    assert [p.index for p in first] == list(range(10))
    assert [load_task(name, tiny, seed=6, position=i).draw() for i in range(10)] != first
    assert len({p.token_ids for p in first}) > 5


def test_the_share_of_wanted_tokens_is_the_reward() -> None:
    task: Task = TokensTask(512, seed=1)
    prompt = task.draw()
    wanted = sorted(task.wanted)  # type: ignore[attr-defined]
    other = sorted(set(range(512)) - set(wanted))
    assert len(wanted) == 256
    assert task.reward(prompt, wanted[:3] + other[:1], finished=False) == 0.75
    assert task.reward(prompt, other[:4], finished=True) == 0.0
    assert task.reward(prompt, [], finished=True) == 0.0
    assert all(8 <= token < 512 for token in prompt.token_ids)


def test_what_cannot_be_learnt_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no task 'chess'"):
        load_task("chess", tiny, seed=0)
    with pytest.raises(InvalidInput, match="vocabulary of 4"):
        TokensTask(4)
    mute = tmp_path / "mute"
    shutil.copytree(tiny, mute)
    (mute / "chat_template.jinja").unlink()
    with pytest.raises(InvalidInput, match="no chat template"):
        load_task("sums", mute, seed=0)
    assert isinstance(load_task("tokens", mute, seed=0).draw(), Prompt)
