"""Commands that decide what stays, and where training goes on: gc, pin, unpin, yank, adopt, recover."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weightline.cli.app import command
from weightline.cli.arguments import JsonOption, StoreArgument, opened_store
from weightline.cli.history import VersionArgument
from weightline.cli.output import human_bytes, print_json, say, table

if TYPE_CHECKING:
    from weightline.store import Store


@contextmanager
def _serving(store: Store) -> Iterator[None]:
    """Leases what live engines serve, as their acknowledgements tell, while something is collected."""
    from weightline.service.fetching import LEASE_SECONDS

    leases = []
    try:
        for subscriber in store.subscribers():
            version = subscriber.version
            live = store.clock() - subscriber.seen < LEASE_SECONDS
            if live and version is not None and version not in store.state.retired:
                leases.append(store.lease((version,), f"subscriber:{subscriber.name}", LEASE_SECONDS))
        yield
    finally:
        for lease in leases:
            store.release(lease)


@command("gc", "Keeping")
def gc(
    store: StoreArgument,
    max_versions: Annotated[
        int | None, typer.Option("--max-versions", help="Anchors to keep at most; default: no bound.", min=1)
    ] = None,
    disk_budget: Annotated[
        int | None,
        typer.Option(
            "--disk-budget", help="Bytes to keep at most; default: a quarter of the room that is free.", min=1
        ),
    ] = None,
    grace: Annotated[
        float,
        typer.Option("--grace", help="Seconds between telling that bytes go and deleting them.", min=0),
    ] = 60.0,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Change nothing; say what would happen to each version, and why."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Let go of what the bounds do not allow, and sweep what dead processes left. Never the newest, nor what
    is pinned, leased, served or needed to recover.

    Example: weightline gc ./ckpt --disk-budget 20000000000 --dry-run
    """
    with opened_store(store) as opened, _serving(opened):
        report = opened.collect(
            max_versions=max_versions, disk_budget=disk_budget, grace=grace, dry_run=dry_run
        )
        swept = [] if dry_run else opened.sweep()
    decision = report.decision
    if json:
        print_json(
            {
                "dry_run": dry_run,
                "held": "" if dry_run else report.held,
                "retired": report.retired,
                "thinned": report.thinned,
                "deleted": report.deleted,
                "failed": report.failed,
                "swept": swept,
                "kept_nbytes": decision.kept_nbytes,
                "freed_nbytes": decision.freed_nbytes,
                "anchor_wanted": decision.anchor_wanted,
                "versions": decision.explained,
            }
        )
        return
    if decision.explained:
        table(
            ["version", "action", "bytes", "why"],
            [[str(e.version), e.action, human_bytes(e.nbytes), e.why] for e in decision.explained],
        )
    if report.held and not dry_run:
        say(f"nothing was done: {report.held}")
    would = "would keep" if dry_run else "keeps"
    say(f"{would} {human_bytes(decision.kept_nbytes)}, lets go of {human_bytes(decision.freed_nbytes)}")
    if not dry_run:
        say(f"deleted now: {', '.join(map(str, report.deleted)) or 'no version'}")
    for folder in swept:
        say(f"swept {folder}: its writer is dead and no entry names it")
    for failure in report.failed:
        typer.echo(f"warning: {failure}", err=True)


@command("pin", "Keeping")
def pin(store: StoreArgument, version: VersionArgument, json: JsonOption = False) -> None:
    """Keep a version, and what it rests on, until it is unpinned.

    Example: weightline pin ./ckpt 120
    """
    with opened_store(store) as opened:
        opened.pin(version)
    _done(json, version, pinned=True, said=f"version {version} is pinned")


@command("unpin", "Keeping")
def unpin(store: StoreArgument, version: VersionArgument, json: JsonOption = False) -> None:
    """Let retention decide about a version again.

    Example: weightline unpin ./ckpt 120
    """
    with opened_store(store) as opened:
        opened.record(version)
        opened.unpin(version)
    _done(json, version, pinned=False, said=f"version {version} is not pinned")


@command("yank", "Keeping")
def yank(
    store: StoreArgument,
    version: VersionArgument,
    reason: Annotated[str, typer.Option("--reason", help="Why; noted in the log.")] = "",
    json: JsonOption = False,
) -> None:
    """Tell every engine not to serve a version. Its bytes and its number stay; it cannot be taken back.

    Example: weightline yank ./ckpt 121 --reason "reward hacking"
    """
    with opened_store(store) as opened:
        opened.yank(version, reason)
        seq = opened.state.seq
    _done(json, version, yanked=True, reason=reason, seq=seq, said=f"version {version} is yanked")


@command("adopt", "Keeping")
def adopt(
    store: StoreArgument,
    fork: Annotated[
        bool,
        typer.Option("--fork", help="The original lives on: give this copy a run of its own."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Say what a copied store is: the store itself, moved here, or (--fork) the beginning of another run.

    A copy can be read at once; commits are refused until this is said, for two stores that go on under one
    run and the same numbers would be mistaken for each other. Versions, numbers and bytes stay as they are.

    Example: weightline adopt ./ckpt-copy --fork
    """
    with opened_store(store) as opened:
        was, copied = opened.run, opened.copied
        run = opened.adopt_copy(fork=fork)
    if json:
        print_json({"run": run, "was_copy": copied, "forked_from": was if fork else None})
    elif fork:
        say(f"run {run} begins here, with the versions of run {was}")
    else:
        say(f"run {run} is at home here" + ("" if copied else "; it was already"))


@command("recover", "Keeping")
def recover(
    store: StoreArgument,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Write weights and attachments there; must not exist."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Where training can go on from: the newest version that has attachments, its step, and their files.

    With --out the folder gets the weights as a Hugging Face folder and, in attachments/, the files of that
    same version. Nothing in the store changes.

    Example: weightline recover ./ckpt --out ./resume
    """
    from weightline.store.disk import Disk, typed

    with opened_store(store) as opened:
        found = opened.recover()
        files = found.attachments
        newest = opened.latest()
        if out is not None:
            opened.checkout(found.version, out)
            with typed(str(out)):
                (out / "attachments").mkdir()
                files = {name: out / "attachments" / name for name in found.attachments}
                for name, source in found.attachments.items():
                    Disk().copy_new(source, files[name])
    if json:
        print_json(
            {
                "version": found.version,
                "label": found.record.label,
                "step": found.step,
                "newest": newest,
                "passed_over": found.passed_over,
                "attachments": {name: str(path) for name, path in files.items()},
                "path": None if out is None else str(out),
            }
        )
        return
    step = "" if found.step is None else f", step {found.step}"
    say(f"version {found.version} ({found.record.label}){step}; the newest is {newest}")
    for version in found.passed_over:
        say(f"  version {version} was passed over: files of it are damaged, see `weightline verify`")
    for name, path in sorted(files.items()):
        say(f"  {name}  {path}")


@command("mirror", "Keeping")
def mirror(
    store: StoreArgument,
    other: Annotated[
        Path,
        typer.Argument(
            metavar="OTHER", help="Folder on another disk; new, empty or half filled.", show_default=False
        ),
    ],
    json: JsonOption = False,
) -> None:
    """Copy a store to a second disk and keep both from now on: the loss of one loses nothing.

    Stop the server and the trainer first, and start them again on the URL that this prints. The store's
    folder stays the one that decides about the log. Cut short, the same command goes on.

    Example: weightline mirror /disk1/ckpt /disk2/ckpt
    """
    from weightline.errors import STATUS, InvalidInput
    from weightline.service.address import store_of
    from weightline.service.presence import ServerLock
    from weightline.store import Store
    from weightline.store.mirror_make import make_mirror

    folder = store_of(store)
    if isinstance(folder, str):
        raise InvalidInput(
            f"{store} is not a folder", hint="a mirror is of two folders; S3 keeps its own copies"
        )
    Store.open(folder).close()  # before the lock makes a file where no store is
    lock = ServerLock.take(folder)
    try:
        url, done = make_mirror(folder, other)
    finally:
        lock.release()
    with opened_store(url) as opened:
        report = opened.verify()
    if json:
        print_json(
            {"store": url, "arbiter": str(folder), "done": done, "ok": report.ok, "problems": report.problems}
        )
    else:
        say(f"{len(done)} things were done; the store is {url} from now on")
        for problem in report.problems:
            say(f"{problem.kind}: {problem.path}\n  hint: {problem.hint}")
    if not report.ok:
        raise SystemExit(STATUS["integrity"].exit_code)


def _done(as_json: bool, version: int, *, said: str, **facts: object) -> None:
    if as_json:
        print_json({"version": version, **facts})
    else:
        say(said)
