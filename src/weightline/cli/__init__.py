"""The `weightline` command."""

from weightline.cli.app import main

__all__ = ["main"]
