"""Audit: proves or refutes the labels of a rollout file by replaying it."""

from __future__ import annotations

from weightline.audit.replay import TIE_MARGIN, Control, Mismatch, ReplayReport, VersionTally, replay

__all__ = ["TIE_MARGIN", "Control", "Mismatch", "ReplayReport", "VersionTally", "replay"]
