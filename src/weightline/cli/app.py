"""The command tree, and the one place where errors become exit codes."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from weightline.cli.output import fail
from weightline.errors import WeightlineError

STORE_VARIABLE = "WEIGHTLINE_STORE"


class StoreCommand(TyperCommand):
    """A command whose first argument is STORE, which `WEIGHTLINE_STORE` may give instead.

    Arguments fill from the left, so with the variable set `weightline show 3` would read 3 as the store. When
    an argument is then missing, or the only one is a plain number, the variable's store goes in front.
    """

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        store = os.environ.get(STORE_VARIABLE)
        if store:
            given = self._positional(args)
            arguments = [p for p in self.params if isinstance(p, TyperArgument)]
            short = len(given) < sum(p.required for p in arguments)
            lone_number = (
                len(given) == 1 and given[0].isdigit() and any(p.name == "version" for p in arguments)
            )
            if not given or short or lone_number:
                args = [store, *args]
        return super().parse_args(ctx, args)

    def _positional(self, args: list[str]) -> list[str]:
        """The items of `args` that are neither options nor options' values."""
        with_value = {
            text for p in self.params if isinstance(p, TyperOption) and not p.is_flag for text in p.opts
        }
        found: list[str] = []
        rest = iter(args)
        for item in rest:
            if item == "--":
                return [*found, *rest]
            if item in with_value:
                next(rest, None)
            elif item == "-" or not item.startswith("-"):
                found.append(item)
        return found


class ErrorsToExitCodes(TyperGroup):
    """Every typed error of the library ends as one line on stderr, a hint, and the exit code of its kind."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except WeightlineError as error:
            fail(error)
        except BrokenPipeError:
            # The reader of our output went away (`weightline log | head`); nothing is left to say.
            sys.stderr.close()
            raise SystemExit(0) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise SystemExit(130) from None


app = typer.Typer(
    cls=ErrorsToExitCodes,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="The weight line for RL post-training: commit every version of your policy, ship it as a "
    "lossless delta, swap it into live engines, and know which weights sampled every token.",
)


def command(
    name: str, panel: str, *, store: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command under a heading of `--help`; `store=True` when its first argument is STORE."""
    return app.command(name, cls=StoreCommand if store else TyperCommand, rich_help_panel=panel)


@app.callback(invoke_without_command=True)
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
) -> None:
    if version:
        from weightline import __version__

        typer.echo(f"weightline {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point of the console script."""
    # Imported for the commands that they register, in the order of `--help`.
    for module in ("processes", "proving", "writing", "history", "keeping", "patches", "offline"):
        importlib.import_module(f"weightline.cli.{module}")
    app()
