"""Repair of a mirror: whatever is right in one half is copied to the other; nothing is made up."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from weightline.errors import IntegrityError, Unavailable
from weightline.store.disk import Disk, draft_name, failure, sha256_of
from weightline.store.mirror import MARK, MirrorPlace
from weightline.store.mirror_judge import expected, sound
from weightline.store.place import Place
from weightline.store.place_local import LocalPlace
from weightline.types import Problem, VerifyReport

logger = logging.getLogger(__name__)


class _Step(Struct, frozen=True):
    """What is wrong with one object, and what can be done. `lost`: no half is right; `split`: both are."""

    key: str
    kind: Literal["copy", "delete", "lost", "split"]
    source: LocalPlace
    target: LocalPlace


def repair_mirror(place: Place) -> list[str]:
    """Make both halves of a mirror equal and whole; gives what was done, in words. Nothing for other places.

    When the arbiter is lost, the other half is promoted first: whoever calls this says that it will not come
    back by itself. Raises `Unavailable` when a folder cannot be written, `IntegrityError` for an entry that
    differs in the two halves.
    """
    if not isinstance(place, MirrorPlace):
        return []
    done: list[str] = []
    marks = [place.mark_of(half) for half in place.halves]
    if place.arbiter is None or place.mark_of(place.arbiter) is None:
        done.append(f"made {place.promote().url} the arbiter of the log")
    first, second = _ordered(place)
    if not second.root.parent.is_dir():
        raise Unavailable(
            f"there is no folder {second.root.parent}", hint="mount the disk, then repair again"
        )
    for step in _steps(place, first, second):
        done += _take(place, step)
    known = [mark.generation for mark in marks if mark is not None]
    if len(known) < len(marks) or len(set(known)) > 1 or place.degraded:
        place.accept(second)
        done.append(f"{second.url} is a whole half of the mirror again")
    for line in done:
        logger.warning("repair of %s: %s", place.url, line)
    return done


def with_mirror(report: VerifyReport, place: Place) -> VerifyReport:
    """The report and, for a mirror, what is wrong in one of its halves only."""
    if not isinstance(place, MirrorPlace):
        return report
    problems = list(report.problems)
    for half in place.halves:
        if place.mark_of(half) is None:
            path = f"{half.url}/{MARK}"
            problems.append(
                Problem("mirror", None, path, "the half is empty, replaced or not mounted; " + _HEAL)
            )
    if not any(problem.kind == "mirror" for problem in problems):
        for step in _steps(place, *_ordered(place)):
            what = {
                "copy": f"it is missing or damaged here, and whole in {step.source.url}; {_HEAL}",
                "delete": f"it was deleted in {step.source.url}; {_HEAL}",
                "lost": "no half has it whole; restore it from a copy",
                "split": f"it differs from {step.source.url}: both were written to alone; move one away",
            }[step.kind]
            problems.append(Problem("mirror", None, str(step.target.path(step.key)), what))
    return msgspec.structs.replace(report, ok=not problems, problems=tuple(problems))


_OF_A_FOLDER = ("catalog.sqlite", "server.", "cleaner.")
"""What lies in the folder of a store that was no mirror yet, and means nothing to any other host."""
_HEAL = "`weightline verify --repair` heals it"


def _ordered(place: MirrorPlace) -> tuple[LocalPlace, LocalPlace]:
    first = place.arbiter
    if first is None:
        raise Unavailable(f"{place.url} has no half that can be read", hint="mount one of the folders")
    return first, next(half for half in place.halves if half is not first)


def _steps(place: MirrorPlace, first: LocalPlace, second: LocalPlace) -> Iterator[_Step]:
    digests = expected(place.halves)
    keys = {item.key for half in place.halves for item in half.list("")} | set(digests)
    keys = {key for key in keys if not key.startswith(_OF_A_FOLDER)}
    # The log last: an entry never names what is not there yet.
    for key in sorted(keys - {MARK}, key=lambda key: (key.startswith("log/"), key)):
        if (step := _step(first, second, key, digests)) is not None:
            yield step


def _step(first: LocalPlace, second: LocalPlace, key: str, digests: dict[str, str]) -> _Step | None:
    if key not in digests and not key.startswith("log/") and not first.path(key).exists():
        # A lease that ended, a version that was deleted, while the other half was away.
        return _Step(key, "delete", first, second)
    good = (_good(first, key, digests), _good(second, key, digests))
    if good == (True, True):
        if key in digests or first.read(key) == second.read(key):
            return None
        return _Step(key, "split" if key.startswith("log/") else "copy", first, second)
    if good == (False, False):
        return _Step(key, "lost", first, second)
    return _Step(key, "copy", first, second) if good[0] else _Step(key, "copy", second, first)


def _take(place: MirrorPlace, step: _Step) -> list[str]:
    if step.kind == "split":
        raise IntegrityError(
            f"{step.key} differs in {step.source.url} and {step.target.url}: both were written to alone",
            hint="move one of them away, then repair from the other",
        )
    if step.kind == "lost":
        logger.error("%s is damaged or missing in both halves of %s", step.key, place.url)
        return []
    if step.kind == "delete":
        step.target.delete(step.key)
        return [f"deleted {step.key} in {step.target.url}, as in {step.source.url}"]
    _copy(step.source.path(step.key), step.target.path(step.key), step.target.disk)
    return [f"copied {step.key} from {step.source.url} to {step.target.url}"]


def _good(half: LocalPlace, key: str, digests: dict[str, str]) -> bool:
    path = half.path(key)
    try:
        if not path.is_file():
            return False
        return sha256_of(path) == digests[key] if key in digests else sound(key, path.read_bytes())
    except OSError as error:
        logger.warning("cannot read %s: %s", path, error)
        return False


def _copy(source: Path, target: Path, disk: Disk) -> None:
    draft = target.with_name(draft_name())
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        disk.copy_new(source, draft)
        draft.replace(target)
        disk.fsync_folder(target.parent)
    except OSError as error:
        raise failure(str(target), error) from error
    finally:
        with suppress(OSError):
            draft.unlink()
