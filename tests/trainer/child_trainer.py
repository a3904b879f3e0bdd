"""A trainer process for the crash tests: `child_trainer.py STORE MODEL STEPS`, one line of JSON an event on
stdout.

Its data come from torch's global generator, so training goes on bit for bit only when every part of the state
came back.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import weightline
from weightline.trainer import ATTACHMENT, Committer, resume, save_state


def tell(event: str, **fields: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def main(store: str, folder: str, steps: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=50)
    with weightline.CheckpointEngine(store) as line:
        step = position = 0
        if line.latest() is not None:
            resumed = resume(line, model, optimizer, scheduler=scheduler)
            step, position = resumed.step, resumed.position
            tell("resumed", step=step, version=resumed.version, newest=resumed.newest)
        with Committer(line, model, model_files=folder) as committer:
            while step < steps:
                batch = torch.randint(0, 512, (2, 16))
                position += 1
                model(input_ids=batch, labels=batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                step += 1
                state = Path(store).with_name(f"state-{step}")
                save_state(
                    state, step=step, model=model, optimizer=optimizer, scheduler=scheduler, position=position
                )
                tell("committing", step=step)
                committer.after_step(step, attachments={ATTACHMENT: state})
                tell("committed", step=step, version=committer.flush())
                state.unlink()
    tell("done", position=position)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
