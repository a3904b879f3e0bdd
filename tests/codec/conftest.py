"""Fixtures of the codec's tests; strategies are in `conftest_codec`."""

from conftest_codec import pair

__all__ = ["pair"]
