"""The main job in small, as real processes: server, engines with their followers, and a trainer that learns a
real task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightline.demo.report import DemoReport as DemoReport
    from weightline.demo.supervisor import run_demo as run_demo

__all__ = ["DemoReport", "run_demo"]


def __getattr__(name: str) -> Any:
    # Late: the trainer's process imports this package too, and needs neither rich nor the supervisor.
    if name == "run_demo":
        from weightline.demo.supervisor import run_demo

        return run_demo
    if name == "DemoReport":
        from weightline.demo.report import DemoReport

        return DemoReport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
