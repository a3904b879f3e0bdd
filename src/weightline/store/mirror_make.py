"""Making a mirror out of a store that is there: what the folder holds is copied to a second one.

Only the store's own folder is marked as a half at first, so that the other one looks like a disk that was
replaced, and is filled as after that (`mirror_repair`). Cut short anywhere, the same call, or `verify
--repair` on the mirror, goes on.
"""

from __future__ import annotations

import sqlite3
import uuid
from contextlib import closing
from pathlib import Path

import msgspec

from weightline.core.seal import seal
from weightline.errors import ConflictError, InvalidInput
from weightline.store.catalog import NAME
from weightline.store.disk import typed
from weightline.store.mirror import MARK, Mark, MirrorPlace, mirror_url, read_mark
from weightline.store.mirror_repair import repair_mirror
from weightline.store.opening import local_folder
from weightline.store.place import Place
from weightline.store.place_local import LocalPlace
from weightline.store.run import RUN, is_copy, read_run, settle


def make_mirror(folder: Path, other: Path) -> tuple[str, list[str]]:
    """(URL of the mirror, what was done, in words). The store in `folder` stays the arbiter of the log.

    No server, cleaner or trainer may be at the store meanwhile; a handle that was left open on the folder
    alone is refused when it commits next. Raises `StoreNotFound`, `InvalidInput` (`other` holds something
    else, or lies on a disk that is not mounted; `folder` is a copy), `StorageFull`, `Unavailable`.
    """
    folder, other = folder.absolute(), other.absolute()
    place = LocalPlace(folder)
    run = read_run(place).run
    if (mark := read_mark(place)) is None:
        _check(place, run, other)
        mine = uuid.uuid4().hex
        mark = Mark(uuid.uuid4().hex, mine, mine, 1)
        place.put(MARK, seal(msgspec.json.encode(mark)) + b"\n")
    elif (theirs := read_mark(LocalPlace(other))) is None:
        _check_room(place, run, other)
    elif theirs.mirror != mark.mirror:
        raise InvalidInput(f"{folder} and {other} are halves of two mirrors", hint="give a new folder")
    _keep_catalogue(folder, local_folder(mirror_url([folder, other])))
    mirror = MirrorPlace((folder, other))
    done = repair_mirror(mirror)
    settle(mirror, run)
    return mirror.url, done


def refuse_half(place: Place) -> None:
    """Raises `ConflictError` for a folder that is half of a mirror: written to alone, the two would part."""
    if isinstance(place, LocalPlace) and place.size(MARK) is not None:
        raise ConflictError(
            f"{place.url} is half of a mirror: what is written to it alone would be missing in the other",
            hint=f"open it as mirror:{place.url},OTHER; reading it alone is fine",
        )


def _check(place: LocalPlace, run: str, other: Path) -> None:
    folder = place.root
    if is_copy(place, run):
        raise InvalidInput(
            f"{folder} is a copy of a store", hint="say which it is with Store.adopt_copy() first"
        )
    if other == folder or folder in other.parents or other in folder.parents:
        raise InvalidInput(
            f"{other} lies in the store, or the store in it", hint="give a second disk's folder"
        )
    if not other.parent.is_dir():
        raise InvalidInput(f"there is no folder {other.parent}", hint="mount the disk, or make the folder")
    _check_room(place, run, other)


def _check_room(place: LocalPlace, run: str, other: Path) -> None:
    """Nothing is in `other` but what an earlier call copied."""
    there = LocalPlace(other)
    foreign = next((item.key for item in there.list("") if place.size(item.key) is None), None)
    if foreign is None and there.size(RUN) is not None and read_run(there).run != run:
        foreign = RUN
    if foreign is not None:
        raise InvalidInput(f"{other} holds something else: {foreign}", hint="give a new or empty folder")


def _keep_catalogue(folder: Path, local: Path) -> None:
    """Acknowledgements and traces go on in the folder of this host that goes with the mirror."""
    if not (folder / NAME).exists() or (local / NAME).exists():
        return
    with typed(str(local)):
        local.mkdir(parents=True, exist_ok=True)
    draft = local / f".{NAME}"
    draft.unlink(missing_ok=True)
    with closing(sqlite3.connect(folder / NAME)) as old, closing(sqlite3.connect(draft)) as new:
        old.backup(new)
    draft.replace(local / NAME)
