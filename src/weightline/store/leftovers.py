"""Leftovers: hidden files and stagings of processes that were killed while they wrote. Nothing names them.

A draft's name tells whose it is, a staging's `owner.json` does. They are removed when that process is
certainly gone, never by age: a slow writer is not a dead one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from weightline.errors import WeightlineError
from weightline.store import owner as owners
from weightline.store import staging
from weightline.store.disk import HIDDEN
from weightline.store.index import INDEX
from weightline.store.leases import LEASES, PINS
from weightline.store.log import LOG
from weightline.store.manifest import VERSIONS
from weightline.store.mirror import MirrorPlace
from weightline.store.ranks import RANKS
from weightline.types import Problem

if TYPE_CHECKING:
    from weightline.store.store import Store

logger = logging.getLogger(__name__)

_SWEPT = "the next writer or `weightline gc` removes it"


def leftovers(store: Store) -> Iterator[tuple[Problem, bool]]:
    """(what lies there, is it harmless) of every leftover; what a living process is writing is none."""
    for path in _drafts(store):
        match owners.standing_of_name(path.name):
            case "dead":
                yield Problem("leftover", None, str(path), f"its process is dead; {_SWEPT}"), True
            case "elsewhere":
                hint = "written on another host, or left there by a crash; remove it if it stays"
                yield Problem("leftover", None, str(path), hint), True
            case "unsaid" if path.exists():
                hint = "nobody knows who wrote it, and nothing names it; remove it by hand"
                yield Problem("draft", None, str(path), hint), False
    named = {entry.folder for entry in store.state.versions()}
    for folder in sorted((store.root / VERSIONS).iterdir()):
        if f"{VERSIONS}/{folder.name}" in named or folder.name.startswith("."):
            continue
        match staging.standing(folder):
            case "dead":
                yield Problem("leftover", None, str(folder), f"its writer is dead; {_SWEPT}"), True
            case "unsaid" if folder.exists():
                hint = "no entry names it and it has no owner; remove it by hand"
                yield Problem("dangling", None, str(folder), hint), False


def sweep_drafts(store: Store) -> list[str]:
    """Remove the drafts of dead processes of this host; gives their paths."""
    gone = []
    for path in _drafts(store):
        if owners.standing_of_name(path.name) != "dead":
            continue
        try:
            if path.is_dir():
                store.disk.remove_tree(path)
            else:
                path.unlink(missing_ok=True)
            gone.append(str(path))
        except OSError as error:
            logger.warning("could not sweep %s: %s", path, error)
    return gone


def sweep_for_writer(store: Store) -> None:
    """What killed writers left on this host goes when the next one opens. Never raises."""
    try:
        sweep_drafts(store)
        if staging.is_here(store):
            staging.sweep(store)
    except (OSError, WeightlineError) as error:
        logger.warning("could not sweep %s: %s", store.root, error)


def _drafts(store: Store) -> Iterator[Path]:
    roots = [store.root]
    if isinstance(store.place, MirrorPlace):
        roots += [half.root for half in store.place.halves]
    for root in roots:
        folders = [root, *(root / name for name in (LOG, INDEX, VERSIONS, LEASES, PINS))]
        if (root / RANKS).is_dir():
            folders += [root / RANKS, *(path for path in (root / RANKS).iterdir() if path.is_dir())]
        for folder in folders:
            for prefix in HIDDEN:
                yield from sorted(folder.glob(f"{prefix}*"))
