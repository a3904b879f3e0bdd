"""The trainer process of the demo: `python -m weightline.demo.trainer --config FILE.json`.

GRPO with fp32 masters on rollouts that engines sample all the while; one `Committer.after_step` a step is all
that the training loop knows of the line. Events go to stdout as JSON Lines: `start`, `version`, `step`,
`rollouts`, `dropped`, `resumed`, `done` and, when it fails, `error`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

import weightline
from weightline.demo.announce import Announcer, emit
from weightline.demo.grpo import Example, advantages, train_step
from weightline.demo.rollouts import Group, RolloutClient, RolloutOptions
from weightline.demo.task import Task, load_task
from weightline.errors import InvalidInput, VersionNotFound, WeightlineError
from weightline.trainer import Committer, resume, save_state
from weightline.trainer.recovery import take_weights
from weightline.trainer.state import ATTACHMENT

if TYPE_CHECKING:
    from weightline.service.line import Line


class TrainerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the trainer process is told."""

    store: str = ""
    """What `weightline.connect` takes."""
    engines: tuple[str, ...] = ()
    """Base URLs of the rollout engines."""
    model: str = ""
    """Hugging Face folder that version 1 is made from."""
    rollouts: str = ""
    """The rollout file; lines are added at its end."""
    task: str = "sums"
    steps: int = 5
    """The number of the last step; a resumed trainer does the rest of them."""
    group_size: int = 4
    """Samples a prompt."""
    groups_per_step: int = 4
    groups_in_flight: int = 5
    """Groups launched and not yet trained on. Above `groups_per_step`, so that engines have work during a
    step."""
    max_tokens: int = 16
    """Most tokens an answer."""
    lr: float = 2e-6
    micro_batch: int = 4
    """Answers in one forward and backward pass: what bounds the memory of activations."""
    seed: int = 0
    attachments_every: int = 0
    """Optimizer state rides on every version with a multiple of this step, and on the last one; 0: on the
    last only."""
    start_timeout: float = 300.0
    """Seconds that engines may take to come up."""


def default_config(model: str) -> TrainerConfig:
    """Settings for "tiny", "smollm2" or a Hugging Face folder; the places (`store`, `engines`, …) are left to
    the caller.

    Learning rates are chosen so that a step changes about one in a hundred of the stored values, as real RL
    steps do.
    """
    if model == "tiny":
        return TrainerConfig(
            task="tokens",
            steps=8,
            max_tokens=48,
            lr=1e-5,
            groups_in_flight=6,
            micro_batch=16,
            attachments_every=3,
        )
    if model == "smollm2":
        return TrainerConfig()
    return TrainerConfig(task="sums" if _chats(Path(model)) else "tokens")


def _chats(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        return b'"chat_template"' in (folder / "tokenizer_config.json").read_bytes()
    except OSError:
        return False


def read_config(path: Path) -> TrainerConfig:
    """Raises `InvalidInput` naming the file and the field."""
    try:
        config = msgspec.json.decode(path.read_bytes(), type=TrainerConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidInput(f"{path}: {error}", hint="see weightline.demo.trainer.TrainerConfig") from error
    for field in ("store", "engines", "model", "rollouts"):
        if not getattr(config, field):
            raise InvalidInput(f"{path}: {field} is not set", hint="the trainer needs it")
    for field in ("steps", "groups_per_step", "micro_batch"):
        if getattr(config, field) < 1:
            raise InvalidInput(f"{path}: {field} is {getattr(config, field)}", hint="it must be at least 1")
    if config.groups_in_flight < config.groups_per_step:
        raise InvalidInput(
            f"{path}: groups_in_flight is {config.groups_in_flight}, "
            f"groups_per_step is {config.groups_per_step}",
            hint="a step could never get its groups",
        )
    return config


class Trainer:
    """One training run against one line: `run` does it all."""

    def __init__(self, config: TrainerConfig, line: Line) -> None:
        import torch

        self.config = config
        self.line = line
        torch.manual_seed(config.seed)
        self.model = _load_model(config.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.task = load_task(config.task, Path(config.model), seed=config.seed)
        self.step = 0
        self.committer = Committer(line, self.model, dtype="BF16", model_files=config.model)
        self.announcer = Announcer(line, self.committer)

    def run(self) -> None:
        """Version 1 or the newest recoverable state; then steps, with rollouts in flight all the time."""
        began = time.perf_counter()
        config = self.config
        emit(
            "start", model=config.model, task=config.task, steps=config.steps, run=self.line.run, lr=config.lr
        )
        self._begin()
        client = RolloutClient(
            config.engines,
            self.task,
            run=self.line.run,
            options=RolloutOptions(
                group_size=config.group_size,
                max_tokens=config.max_tokens,
                in_flight=config.groups_in_flight,
                seed=config.seed,
                start_timeout=config.start_timeout,
            ),
            path=Path(config.rollouts),
            serves=self.announcer.knows,
            on_drop=lambda request, engine, reason: emit(
                "dropped", request=request, engine=engine, reason=reason
            ),
        )
        client.start()
        try:
            while self.step < config.steps:
                self._one_step(client)
        finally:
            counts = client.stop()
        self.committer.close()
        self.announcer.close()
        emit("rollouts", **msgspec.to_builtins(counts))
        emit("done", step=self.step, version=self.line.latest(), seconds=time.perf_counter() - began)

    def _begin(self) -> None:
        left = self._state_path("*")
        for path in left.parent.glob(left.name):  # by a trainer that was killed
            path.unlink()
        newest = self.line.latest()
        if newest is None:
            self._commit({})
            self.committer.flush()
            return
        try:
            resumed = resume(self.line, self.model, self.optimizer)
        except VersionNotFound:
            # No version has optimizer state yet: the newest weights are still the place to go on from.
            record = self.line.record(newest)
            take_weights(self.model, self.line.load(newest), newest)
            self.step = record.step or 0
            self.announcer.begin(newest)
            emit("resumed", version=newest, step=self.step, abandoned=[], optimizer=False)
            return
        self.step, self.task.position = resumed.step, int(resumed.position)
        self.announcer.begin(resumed.version, newest=resumed.newest)
        emit("resumed", version=resumed.version, step=self.step, abandoned=resumed.abandoned, optimizer=True)

    def _one_step(self, client: RolloutClient) -> None:
        began = time.perf_counter()
        groups = client.take(self.config.groups_per_step)
        waited = time.perf_counter()
        examples, rewards = examples_of(groups, self.task)
        staleness = self.announcer.staleness([s for g in groups for s in g.samples])
        result = train_step(self.model, self.optimizer, examples, micro_batch=self.config.micro_batch)
        trained = time.perf_counter()
        self.step += 1
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        self._commit({"reward_mean": mean})
        emit(
            "step",
            step=self.step,
            reward_mean=mean,
            reward_std=(sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5 if rewards else 0.0,
            groups=len(groups),
            groups_with_variance=sum(len({self._reward(g, s) for s in g.samples}) > 1 for g in groups),
            loss=result.loss,
            grad_norm=result.grad_norm,
            staleness=staleness,
            tokens=sum(len(s.token_ids) for g in groups for s in g.samples),
            mixed=sum(s.mixed for g in groups for s in g.samples),
            wait_s=waited - began,
            train_s=trained - waited,
        )
        emit("rollouts", **msgspec.to_builtins(client.counts))

    def _reward(self, group: Group, sample: Any) -> float:
        return self.task.reward(group.prompt, sample.token_ids, finished=sample.finish_reason == "stop")

    def _commit(self, metadata: dict[str, Any]) -> None:
        """The one call after a step."""
        every = self.config.attachments_every
        attachments: dict[str, Path | str | bytes] | None = None
        if self.step == self.config.steps or (every and self.step % every == 0):
            path = self._state_path(str(self.step))
            save_state(
                path, step=self.step, model=self.model, optimizer=self.optimizer, position=self.task.position
            )
            attachments = {ATTACHMENT: path}
        future = self.committer.after_step(
            self.step, anchor=self.step == 0, attachments=attachments, metadata=metadata, force=True
        )
        if future is None:
            return
        if attachments:
            future.add_done_callback(lambda _: path.unlink(missing_ok=True))
        self.announcer.announce(self.step, future)

    def _state_path(self, step: str) -> Path:
        """Where the state waits until the store has its copy."""
        return Path(self.config.rollouts).with_name(f"trainer-state-{step}.safetensors")


def examples_of(groups: Sequence[Group], task: Task) -> tuple[list[Example], list[float]]:
    """All answers of the groups with their advantages, and their rewards."""
    examples: list[Example] = []
    rewards: list[float] = []
    for group in groups:
        if not group.samples:
            continue
        scores = [
            task.reward(group.prompt, s.token_ids, finished=s.finish_reason == "stop") for s in group.samples
        ]
        rewards += scores
        for sample, advantage in zip(group.samples, advantages(scores), strict=True):
            examples.append(Example(group.prompt.token_ids, sample.token_ids, sample.logprobs, advantage))
    return examples, rewards


def _load_model(folder: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process; the exit code is 0, or that of the error's kind."""
    parser = argparse.ArgumentParser(prog="python -m weightline.demo.trainer", description=__doc__)
    parser.add_argument("--config", required=True, type=Path, help="JSON file: TrainerConfig")
    options = parser.parse_args(arguments)
    try:
        config = read_config(options.config)
        line = weightline.connect(config.store)
        try:
            Trainer(config, line).run()
        finally:
            line.close()
    except WeightlineError as error:
        emit("error", **error.to_dict())
        sys.stderr.write(f"trainer: {error.message}\n" + (f"  {error.hint}\n" if error.hint else ""))
        return error.status.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
