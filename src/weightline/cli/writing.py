"""Commands that add to a store: commit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from weightline.cli.app import command
from weightline.cli.arguments import JsonOption, StoreArgument, exists, opened, parse_pairs
from weightline.cli.output import human_bytes, print_json, say


@command("commit", "Writing")
def commit(
    store: StoreArgument,
    weights: Annotated[
        Path,
        typer.Argument(
            metavar="WEIGHTS", help="A safetensors file or a Hugging Face folder.", show_default=False
        ),
    ],
    step: Annotated[
        int | None, typer.Option("--step", help="Optimizer step that made these weights.")
    ] = None,
    label: Annotated[
        str | None, typer.Option("--label", help="Label for engines; must be new in the run.")
    ] = None,
    anchor: Annotated[
        bool,
        typer.Option("--anchor", help="Store the whole weights; needed when names, shapes or dtypes change."),
    ] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="WEIGHTS holds only some tensors; the rest is unchanged.")
    ] = False,
    attachment: Annotated[
        list[str] | None,
        typer.Option("--attachment", metavar="NAME=FILE", help="A file that rides in the same atomic step."),
    ] = None,
    metadata: Annotated[
        list[str] | None, typer.Option("--metadata", metavar="KEY=VALUE", help="Noted in the entry.")
    ] = None,
    commit_id: Annotated[
        str | None,
        typer.Option("--commit-id", help="Repeating a commit with the same id gives the same version."),
    ] = None,
    check_finite: Annotated[
        bool, typer.Option("--check-finite", help="Refuse weights with NaN or infinity.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Commit a safetensors file or a Hugging Face folder as the next version; makes the store if need be.

    Example: weightline commit ./ckpt ./policy --step 120
    """
    from weightline.store.offer import check_first

    files = parse_pairs(attachment or [], "--attachment")
    options: dict[str, Any] = {
        "step": step,
        "label": label,
        "anchor": anchor,
        "partial": partial,
        "attachments": {name: Path(path) for name, path in files.items()} or None,
        "metadata": parse_pairs(metadata or [], "--metadata") or None,
        "model_files": weights if weights.is_dir() else None,
        "commit_id": commit_id,
        "check_finite": check_finite,
    }
    if not exists(store):
        check_first(weights, options)  # a commit that is refused leaves no empty store behind
    with opened(store, create=True) as line:
        version = line.commit(weights, **options)
        record = line.record(version)
    if json:
        print_json(
            {
                "version": version,
                "label": record.label,
                "nbytes": record.nbytes,
                "changed": record.changed,
                "elements": record.elements,
                "kind": record.kind,
                "digest": record.digest,
                "step": record.step,
            }
        )
    else:
        say(
            f"version {version} ({record.label}): {record.kind}, "
            f"{record.changed} of {record.elements} elements changed, "
            f"{human_bytes(record.nbytes)} stored for {human_bytes(record.raw_nbytes)}"
        )
