"""The trainer's side of the line: commit after each step, save what is needed to go on, go on after a crash.

`Committer` (one call after `optimizer.step()`), `save_state` / `load_state` (masters, optimizer, scheduler,
RNGs and data position in one safetensors file) and `resume`. torch is imported on first use.
"""

from weightline.trainer.committer import Committer, CommitTiming
from weightline.trainer.names import named_tensors, plain_name
from weightline.trainer.recovery import Resumed, resume
from weightline.trainer.snapshot import CastPolicy, Snapshot
from weightline.trainer.state import ATTACHMENT, TrainerState, load_state, save_state

__all__ = [
    "ATTACHMENT",
    "CastPolicy",
    "CommitTiming",
    "Committer",
    "Resumed",
    "Snapshot",
    "TrainerState",
    "load_state",
    "named_tensors",
    "plain_name",
    "resume",
    "save_state",
]
