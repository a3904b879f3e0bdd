"""Tests for other people's engines: marker versions and the conformance suite (`weightline conform`)."""

from __future__ import annotations

from weightline.testing.marker import MarkerModel
from weightline.testing.report import Check, ConformanceReport

__all__ = ["Check", "ConformanceReport", "MarkerModel"]
