"""Commands around the codec: diff and apply on files or folders, and bench codec."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from weightline.cli.app import app, command
from weightline.cli.arguments import JsonOption
from weightline.cli.output import human_bytes, print_json, say, table

WeightsArgument = Annotated[
    Path, typer.Argument(help="A safetensors file or a Hugging Face folder.", show_default=False)
]

bench = typer.Typer(
    no_args_is_help=True,
    help="Figures, each with its baseline in the same run.\n\nExample: weightline bench codec ./old ./new",
)
app.add_typer(bench, name="bench", rich_help_panel="Codec")


@contextmanager
def _progress(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr while a terminal is there to see it."""
    if quiet:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total)


@command("diff", "Codec", store=False)
def diff(
    old: WeightsArgument,
    new: WeightsArgument,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The patch to write.")],
    level: Annotated[
        Literal["fast", "dense"], typer.Option("--level", help="dense is smaller, fast is faster.")
    ] = "dense",
    json: JsonOption = False,
) -> None:
    """Write a lossless patch that turns the weights of OLD into those of NEW.

    Example: weightline diff ./policy-7 ./policy-8 -o step.safetensors
    """
    from weightline.codec.files import diff_files

    with _progress("compare", quiet=json) as progress:
        patch = diff_files(old, new, output, level=level, progress=progress)
    if json:
        print_json({**patch._asdict(), "level": level, "path": str(output)})
    else:
        ratio = patch.raw_nbytes / patch.nbytes
        say(
            f"{output}: {human_bytes(patch.nbytes)} for {human_bytes(patch.raw_nbytes)} ({ratio:.0f}x), "
            f"{patch.changed} of {patch.elements} elements in {patch.tensors} tensors"
        )


@command("apply", "Codec", store=False)
def apply(
    old: WeightsArgument,
    patch: Annotated[Path, typer.Argument(metavar="FILE", help="A patch.", show_default=False)],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="NEW", help="What to write; must not exist.")
    ],
    json: JsonOption = False,
) -> None:
    """Write the weights that a patch makes of OLD, checked against the digests in the patch.

    Example: weightline apply ./policy-7 step.safetensors -o ./policy-8
    """
    from weightline.codec.files import apply_files

    with _progress("apply", quiet=json) as progress:
        nbytes = apply_files(old, patch, output, progress=progress)
    if json:
        print_json({"path": str(output), "nbytes": nbytes})
    else:
        say(f"{output}: {human_bytes(nbytes)}, every changed tensor has the digest that the patch names")


@bench.command("codec")
def bench_codec(old: WeightsArgument, new: WeightsArgument, json: JsonOption = False) -> None:
    """Bytes and speed of each level on a real step, beside the entropy bounds and what others ship.

    Example: weightline bench codec ./policy-7 ./policy-8
    """
    from weightline.codec.bench import bench_codec as measure

    figures = measure(old, new)
    if json:
        print_json(figures)
        return
    density = figures["changed"] / max(1, figures["elements"])
    exact = "exact" if figures["exact"] else "NOT EXACT"
    say(f"{figures['changed']} of {figures['elements']} elements changed ({density:.3%}); {exact}")
    say(f"memcpy {figures['memcpy_GBps']:.1f} GB/s in this run; bounds in bytes:")
    say(f"  order-0 {figures['order0_bound_bytes']:.0f}, exponent {figures['exponent_bound_bytes']:.0f}")
    rows = []
    for name, row in {**figures["levels"], **figures["baselines"]}.items():
        decode = f"{row['decode_x_memcpy']:.2f}" if "decode_x_memcpy" in row else "-"
        ratio = f"{figures['raw_bytes'] / row['bytes']:.1f}x"
        rows.append([name, str(row["bytes"]), ratio, f"{row['encode_x_memcpy']:.2f}", decode])
    table(["encoding", "bytes", "vs full", "encode x memcpy", "decode x memcpy"], rows)
