"""Stagings: version folders that no log entry names yet, who owns them, and when they may go.

`owner.json` in the folder decides. Whoever renames it away owns the folder's fate: the process that publishes
it for somebody else (`adopt`), the one that gives up (`discard`) or the one that cleans up after the dead
(`sweep`). A rename succeeds for one of them only, so a folder is never deleted under a publisher.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import Struct

from weightline.core.ledger import LedgerState
from weightline.errors import InvalidInput, Unavailable, WeightlineError
from weightline.store import owner as owners
from weightline.store.disk import NO_ROOM, Disk, draft_name, typed
from weightline.store.manifest import ATTACHMENTS, VERSIONS
from weightline.store.place import Missing

if TYPE_CHECKING:
    from weightline.store.store import Store

logger = logging.getLogger(__name__)

OWNER = "owner.json"
DECIDED = "decided.json"
"""In a folder that was uploaded: who publishes it for somebody else, or sweeps it. The first one decides."""
_CLAIM = ".claim-"
_CLAIMER = ".claimer-"
"""Who holds the claim of the same token: one that died with it may be overtaken."""


class _Decision(Struct, frozen=True):
    """decided.json."""

    act: Literal["publish", "sweep"]
    by: owners.Owner


def create(root: Path, disk: Disk) -> Path:
    """A new, empty staging of this process; `seal` makes it durable. Raises `StorageFull`, `Unavailable`."""
    folder = root / VERSIONS / uuid.uuid4().hex
    with typed(str(folder)):
        try:
            # The owner is durable before the folder gets its name: no sweeper, and nobody after a power loss,
            # sees a folder that does not say whose it is.
            draft = folder.with_name(draft_name())
            draft.mkdir()
            disk.write_new(draft / OWNER, [owners.encode(owners.this_process())])
            disk.fsync_folder(draft)
            disk.on_step(f"rename {folder.name}")
            draft.rename(folder)
        except BaseException:
            disk.remove_tree(draft)
            disk.remove_tree(folder)
            raise
    return folder


def seal(folder: Path, disk: Disk) -> None:
    """Make the names in a complete staging durable. Raises `OSError`."""
    if (folder / ATTACHMENTS).is_dir():
        disk.fsync_folder(folder / ATTACHMENTS)
    disk.fsync_folder(folder)
    disk.fsync_folder(folder.parent)


def locate(root: Path, relative: str) -> Path:
    """The folder that a request names. Raises `InvalidInput` unless it is one below `versions/`."""
    parts = Path(relative).parts
    if len(parts) != 2 or parts[0] != VERSIONS or not parts[1].isalnum():
        raise InvalidInput(
            f"{relative!r} is not a staging of this store", hint="stage in this store's folder"
        )
    return root / relative


def adopt(folder: Path, store: Store) -> None:
    """Make a staging that another process wrote this process's own. Raises `Unavailable` when it is gone."""
    if not is_here(store):
        return _adopt_upload(folder, store)
    disk = store.disk
    with typed(str(folder)):
        if _owner(folder / OWNER) == owners.this_process():
            return None
        # A server that died between its claim and its name on the folder must not lock the next one out.
        source = _claimable(folder)
        claim = _claim(folder, source) if source is not None else None
        if claim is None:
            raise Unavailable(f"staging {folder} is gone", hint="stage and commit again")
        disk.write_new(folder / OWNER, [owners.encode(owners.this_process())])
        claim.unlink(missing_ok=True)
        (folder / claim.name.replace(_CLAIM, _CLAIMER)).unlink(missing_ok=True)
    return None


def _adopt_upload(folder: Path, store: Store) -> None:
    """The same for a folder that was uploaded: its trainer may die while this process publishes it."""
    prefix = f"{VERSIONS}/{folder.name}"
    if _owner(folder / OWNER) != owners.this_process() and not _decide(store, prefix, "publish"):
        raise Unavailable(f"staging {prefix} is gone", hint="stage and commit again")


def _decide(store: Store, prefix: str, act: Literal["publish", "sweep"]) -> bool:
    """May this process do that with an uploaded folder? Only if nobody alive does something else with it."""
    key, mine = f"{prefix}/{DECIDED}", _Decision(act, owners.this_process())
    for _ in range(2):
        if store.place.put_if_absent(key, msgspec.json.encode(mine)) == "created":
            return True
        with suppress(Missing):
            try:
                there = msgspec.json.decode(store.place.read(key), type=_Decision)
            except msgspec.DecodeError:
                return False
            if there == mine or not owners.is_dead(there.by):
                return there == mine
            store.place.delete(key)
    return False


def discard(folder: Path, store: Store) -> bool:
    """Delete a staging of this process that nothing names. Never raises: what cannot be deleted is swept
    later.
    """
    try:
        gone = _delete(folder, store.disk, _naming(store), lambda owner: owner == owners.this_process())
        prefix = f"{VERSIONS}/{folder.name}"
        if gone and not is_here(store) and prefix not in _named(store.read_log()):
            store.place.delete_folder(prefix)
        elif not gone and not is_here(store):
            # Published for somebody else and refused: whoever staged it decides again.
            store.place.delete(f"{prefix}/{DECIDED}")
        return gone
    except (OSError, WeightlineError) as error:
        logger.warning("could not remove staging %s (swept later): %s", folder, error)
        return False


def is_here(store: Store) -> bool:
    """Is the place the folder in which this process stages?"""
    return store.place.url == str(store.root)


def sweep(store: Store) -> list[str]:
    """Delete the stagings of dead processes of this host; gives their folders."""
    named, log = _named(store.read_log()), _naming(store)
    gone = []
    for folder in sorted((store.root / VERSIONS).iterdir()):
        relative = f"{VERSIONS}/{folder.name}"
        if (relative in named and is_here(store)) or not folder.is_dir():
            continue
        try:
            if _delete(folder, store.disk, log, is_dead):
                gone.append(relative)
        except OSError as error:
            logger.warning("could not sweep %s: %s", folder, error)
    return gone if is_here(store) else sorted({*gone, *_sweep_place(store, named)})


def _named(state: LedgerState) -> set[str]:
    return {entry.folder for entry in state.versions()}


def _naming(store: Store) -> Callable[[], set[str]]:
    """What gives the stagings on this host that the log may not lose: none once they are uploaded."""
    return (lambda: _named(store.read_log())) if is_here(store) else set


def _sweep_place(store: Store, named: set[str]) -> list[str]:
    """The same for what was uploaded."""
    gone = []
    folders = {"/".join(item.key.split("/")[:2]) for item in store.place.list(VERSIONS)} - named
    for folder in sorted(folders):
        try:
            owner = owners.decode(store.place.read(f"{folder}/{OWNER}"))
            # Only once it is decided is it certain that nobody publishes it; the log may name it by then.
            if is_dead(owner) and _decide(store, folder, "sweep") and folder not in _named(store.read_log()):
                store.place.delete_folder(folder)
                gone.append(folder)
        except Missing:
            continue  # somebody else sweeps it now, or it is still being uploaded
        except WeightlineError as error:
            logger.warning("could not sweep %s: %s", folder, error)
    return gone


def standing(folder: Path) -> owners.Standing:
    """Does the process live that decides about a staging: its owner, or whoever claimed it?"""
    if (source := _claimable(folder)) is not None:
        return owners.standing(_owner(source))
    # Claimed by a process that is not dead: it is being swept or published now.
    return "alive" if any(folder.glob(f"{_CLAIM}*")) else "unsaid"


def is_dead(owner: owners.Owner | None) -> bool:
    """Is the owner known, and certainly gone?"""
    return owner is not None and owners.is_dead(owner)


def _delete(
    folder: Path, disk: Disk, named: Callable[[], set[str]], mine: Callable[[owners.Owner | None], bool]
) -> bool:
    source = _claimable(folder)
    if source is None or not mine(_owner(source)):
        return False
    claim = _claim(folder, source)
    if claim is None:
        return False
    relative = f"{VERSIONS}/{folder.name}"
    # Only now is it certain that nobody publishes it any more; the log may have come to name it before.
    if not mine(_owner(claim)) or relative in named():
        with suppress(OSError):
            claim.rename(folder / OWNER)
        return False
    disk.remove_tree(folder)
    return True


def _claimable(folder: Path) -> Path | None:
    """The file to rename for a claim: owner.json, or the claim of a process that died with it."""
    if (folder / OWNER).exists():
        return folder / OWNER
    for claim in folder.glob(f"{_CLAIM}*"):
        claimer = _owner(folder / claim.name.replace(_CLAIM, _CLAIMER))
        if claimer is None or owners.is_dead(claimer):
            return claim
    return None


def _claim(folder: Path, source: Path) -> Path | None:
    """Rename `source` to a claim of this process; None when somebody else was first."""
    token = uuid.uuid4().hex
    claim, claimer = folder / f"{_CLAIM}{token}", folder / f"{_CLAIMER}{token}"
    try:
        try:
            claimer.write_bytes(owners.encode(owners.this_process()))
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            # A full disk must not keep what filled it: the rename alone needs no room.
            claimer.unlink(missing_ok=True)
        source.rename(claim)
    except FileNotFoundError:
        claimer.unlink(missing_ok=True)
        return None
    return claim


def _owner(path: Path) -> owners.Owner | None:
    try:
        return owners.decode(path.read_bytes())
    except OSError:
        return None
