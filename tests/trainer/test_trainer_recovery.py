"""After a crash a trainer goes on: next number, right parent, the same bits as if it had never died."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import child_trainer
import pytest
import torch

import weightline
from weightline.demo.models import tiny_model
from weightline.errors import FormatError, IntegrityError, InvalidInput, VersionNotFound
from weightline.store import Store
from weightline.trainer import ATTACHMENT, Committer, resume, save_state

pytestmark = pytest.mark.torch
CHILD = Path(__file__).with_name("child_trainer.py")


@contextlib.contextmanager
def trainer(store: Path, model: Path, steps: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(CHILD), str(store), str(model), str(steps)], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def events(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def run_to_end(store: Path, model: Path, steps: int) -> list[dict[str, Any]]:
    with trainer(store, model, steps) as process:
        seen = list(events(process))
        assert process.wait(60) == 0
    return seen


def kill_while_committing(
    store: Path, model: Path, steps: int, at: int, delay: float
) -> list[dict[str, Any]]:
    seen = []
    with trainer(store, model, steps) as process:
        for event in events(process):
            seen.append(event)
            if event["event"] == "committing" and event["step"] == at:
                # Not a wait for a condition: the moment of death is what the test varies.
                time.sleep(delay)
                process.kill()
                break
    return seen


def bits(line: Any, version: int) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in line.load(version).items()}


def test_a_killed_trainer_goes_on_as_one_that_never_died(tmp_path: Path) -> None:
    model, steps = tiny_model(tmp_path / "model"), 7
    rng = random.Random()
    delays = [rng.uniform(0.0, 0.06), rng.uniform(0.0, 0.06)]
    print(f"delays {delays}")
    store = tmp_path / "killed" / "store"
    store.parent.mkdir()
    kill_while_committing(store, model, steps, at=3, delay=delays[0])
    with weightline.CheckpointEngine(store) as line:
        first = line.latest()
        assert first in (2, 3)  # the third was published or it was not; there is nothing between
        before = {v: bits(line, v) for v in range(1, first + 1)}
    seen = kill_while_committing(store, model, steps, at=5, delay=delays[1])
    assert seen[0] == {"event": "resumed", "step": first, "version": first, "newest": first}
    with weightline.CheckpointEngine(store) as line:
        second = line.latest()
        assert second in (4, 5)
    seen = run_to_end(store, model, steps)
    assert seen[0]["version"] == second
    assert seen[-1] == {"event": "done", "position": steps}

    whole = tmp_path / "whole" / "store"
    whole.parent.mkdir()
    threads = torch.get_num_threads()
    child_trainer.main(str(whole), str(model), steps)  # in this process: it need not die
    torch.set_num_threads(threads)
    with weightline.CheckpointEngine(store) as line, weightline.CheckpointEngine(whole) as reference:
        records = line.versions()
        assert [(r.version, r.parent, r.step) for r in records] == [
            (v, v - 1 or None, v) for v in range(1, steps + 1)
        ]
        assert [r.epoch for r in records] == sorted(r.epoch for r in records)
        assert len({r.epoch for r in records}) == 3  # one an incarnation
        assert all(bits(line, v) == before[v] for v in before)
        for version in range(1, steps + 1):
            assert bits(line, version) == bits(reference, version), version
    opened = Store.open(store)
    opened.sweep()  # what the dead had not finished
    assert opened.verify(deep=True).ok


class Run:
    """A small trainer in this process, with attachments on every n-th version only."""

    def __init__(self, line: Any, folder: Path) -> None:
        self.line, self.folder = line, folder
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.step = 0

    def train(self) -> None:
        self.model(torch.randn(4, 8)).square().mean().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def commit(self, *, state: bool, masters: bool = True) -> int:
        attachments: dict[str, Any] | None = None
        if state:
            path = self.folder / f"state-{self.step}"
            save_state(path, step=self.step, model=self.model if masters else None, optimizer=self.optimizer)
            attachments = {ATTACHMENT: path}
        with Committer(self.line, self.model) as committer:
            future = committer.after_step(self.step, attachments=attachments)
            assert future is not None
            return future.result(60)


def test_rewind_goes_on_under_the_next_number_from_the_recovered_parent(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with weightline.CheckpointEngine(store) as line:
        run = Run(line, tmp_path)
        for version in range(1, 8):
            run.train()
            assert run.commit(state=version == 5) == version
        served = {v: bits(line, v) for v in range(1, 8)}
    with weightline.CheckpointEngine(store) as line:
        run = Run(line, tmp_path)
        resumed = resume(line, run.model, run.optimizer)
        assert (resumed.version, resumed.step, resumed.newest, resumed.abandoned) == (5, 5, 7, (6, 7))
        run.step = resumed.step
        for expected in (8, 9):
            run.train()
            assert run.commit(state=False) == expected
        records = {r.version: r for r in line.versions()}
        assert (records[8].parent, records[8].step, records[8].base) == (5, 6, 7)
        assert records[9].parent == 8
        assert [v for v, r in records.items() if r.abandoned] == [6, 7]
        # The same data and state as the first time, so the same weights, under new numbers.
        assert bits(line, 8) == served[6]
        assert bits(line, 9) == served[7]
        assert all(bits(line, v) == served[v] for v in served)


def test_a_state_without_masters_takes_the_weights_of_its_version(tmp_path: Path) -> None:
    with weightline.CheckpointEngine(tmp_path / "store") as line:
        run = Run(line, tmp_path)
        run.train()
        run.commit(state=True, masters=False)
        stored = line.load(1, like="torch")
        other = Run(line, tmp_path)
        other.train()
        resume(line, other.model, other.optimizer)
        for name, tensor in other.model.state_dict().items():
            assert torch.equal(tensor, stored[name].float())


def test_nothing_to_recover_says_so(tmp_path: Path) -> None:
    with weightline.CheckpointEngine(tmp_path / "store") as line:
        run = Run(line, tmp_path)
        with pytest.raises(VersionNotFound):
            resume(line, run.model, run.optimizer)
        run.commit(state=False)
        with pytest.raises(VersionNotFound):
            resume(line, run.model, run.optimizer)


def test_masters_of_another_version_are_refused(tmp_path: Path) -> None:
    with weightline.CheckpointEngine(tmp_path / "store") as line:
        run = Run(line, tmp_path)
        save_state(tmp_path / "old", step=1, model=run.model, optimizer=run.optimizer)
        run.train()
        with Committer(line, run.model) as committer:
            committer.after_step(1, attachments={ATTACHMENT: tmp_path / "old"})
        with pytest.raises(IntegrityError, match=r"version 1: tensor 0\.bias differs"):
            resume(line, run.model, run.optimizer)


def test_a_state_of_another_step_is_refused(tmp_path: Path) -> None:
    with weightline.CheckpointEngine(tmp_path / "store") as line:
        run = Run(line, tmp_path)
        save_state(tmp_path / "s", step=4, model=run.model)
        with Committer(line, run.model) as committer:
            committer.after_step(5, attachments={ATTACHMENT: tmp_path / "s"})
        with pytest.raises(FormatError, match="step 5, its state says 4"):
            resume(line, run.model)


def test_an_attachment_of_another_name_is_named(tmp_path: Path) -> None:
    with weightline.CheckpointEngine(tmp_path / "store") as line:
        run = Run(line, tmp_path)
        with Committer(line, run.model) as committer:
            committer.after_step(1, attachments={"mine": b"x"})
        with pytest.raises(InvalidInput, match="no attachment 'trainer'") as caught:
            resume(line, run.model)
        assert "mine" in caught.value.hint


def test_another_model_is_refused_before_it_is_changed(tmp_path: Path) -> None:
    with weightline.CheckpointEngine(tmp_path / "store") as line:
        run = Run(line, tmp_path)
        run.commit(state=True, masters=False)
        other = torch.nn.Sequential(torch.nn.Linear(8, 17), torch.nn.Tanh(), torch.nn.Linear(17, 4))
        before = other[0].weight.clone()
        with pytest.raises(InvalidInput, match=r"tensor 0\.bias is \[16\], the model has \[17\]"):
            resume(line, other)
        assert torch.equal(other[0].weight, before)
