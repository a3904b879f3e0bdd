"""A place in two folders, of which one may be lost.

One of them is the arbiter: its `put_if_absent` decides. `mirror.json` in both says who it is and in which
generation. What was created there is copied to the other before the call returns. When the other cannot be
written, policy `both` answers `Unavailable` (the same call goes through once it is back, under the same
commit_id), and `degrade` goes on with a warning. When the arbiter is away, reads come from the other and
nothing is written until it is back or `promote` makes the other the arbiter of the next generation; a writer
that still knows the older one looks at the generation in both folders before it writes, and is refused.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct

from weightline.core.seal import seal, unseal
from weightline.errors import (
    ConflictError,
    FormatError,
    IntegrityError,
    InvalidInput,
    StoreNotFound,
    Unavailable,
)
from weightline.store.disk import Disk
from weightline.store.manifest import MANIFEST, Blob, digest_of
from weightline.store.mirror_judge import expected, sound
from weightline.store.place import Listed, Missing, Outcome, missing, probe
from weightline.store.place_local import LocalPlace
from weightline.store.reading import check_blob

logger = logging.getLogger(__name__)

MARK = "mirror.json"
Policy = Literal["both", "degrade"]
T = TypeVar("T")


class Mark(Struct, frozen=True):
    """mirror.json: which half of which mirror a folder is."""

    mirror: str
    id: str
    arbiter: str
    """`id` of the half whose put-if-absent decides."""
    generation: int


def read_mark(place: LocalPlace) -> Mark | None:
    """None for a folder that is away, empty, or no half of a mirror. Raises `FormatError`, `Unavailable`."""
    try:
        data = place.read(MARK)
    except Missing:
        return None
    where = f"{place.url}/{MARK}"
    try:
        return msgspec.json.decode(
            unseal(data, where=where, hint="restore it from the other folder"), type=Mark
        )
    except msgspec.DecodeError as error:
        raise FormatError(f"{where} is not that of a mirror: {error}", hint="restore it") from None


def mirror_url(folders: Sequence[Path]) -> str:
    """How a mirror is called, in whichever order its folders are given."""
    return "mirror:" + ",".join(sorted(map(str, folders)))


class MirrorPlace:
    """See `Place`. `degraded` says why a half is not written to; empty when both are."""

    poll_s = 0.02

    def __init__(
        self,
        folders: tuple[Path, Path],
        *,
        policy: Policy = "both",
        create: bool = False,
        disk: Disk | None = None,
    ) -> None:
        if folders[0].resolve() == folders[1].resolve():
            raise InvalidInput(f"both halves of the mirror are {folders[0]}", hint="give two folders")
        self.halves = tuple(LocalPlace(folder, disk) for folder in folders)
        self.policy = policy
        self.degraded = ""
        self._behind = False
        self._owed: set[str] = set()
        """What may be in the arbiter and is not known to be in the other half."""
        marks: Sequence[Mark | None] = [self.mark_of(half) for half in self.halves]
        if create and not any(marks):
            marks = self._make()
        known = [mark for mark in marks if mark is not None]
        if not known:
            raise StoreNotFound(
                f"{self.url}: neither folder is half of a mirror",
                hint="check that both disks are mounted; commit and serve make a new one",
            )
        if len({mark.mirror for mark in known}) > 1:
            raise InvalidInput(f"{self.url}: these are halves of two mirrors", hint="give the right folders")
        newest = max(known, key=lambda mark: mark.generation)
        if any(mark.generation == newest.generation and mark.arbiter != newest.arbiter for mark in known):
            raise InvalidInput(
                f"{self.url}: both halves were the arbiter of generation {newest.generation}",
                hint="they were written to alone: move one of them away, then `weightline verify --repair`",
            )
        self._newest = newest
        self._arbiter = next(
            (i for i, m in enumerate(marks) if m is not None and m.id == newest.arbiter), None
        )
        if None in marks:
            self._degrade(f"{self.halves[marks.index(None)].url} is empty, replaced or not mounted")
        elif len({mark.generation for mark in known}) > 1:
            self._degrade("one half is behind: it was away while the other was written to")
        else:
            self._settle()

    @property
    def url(self) -> str:
        return mirror_url([half.root for half in self.halves])

    def free(self) -> int | None:
        found = []
        for half in self.halves:
            try:
                found.append(half.free() or 0)
            except Unavailable as error:
                logger.warning("%s", error)
        return min(found, default=None)

    def skew(self) -> float:
        return 0.0

    @property
    def arbiter(self) -> LocalPlace | None:
        """The half that decides; None while it is away."""
        return None if self._arbiter is None else self.halves[self._arbiter]

    def put_if_absent(self, key: str, data: bytes) -> Outcome:
        first, second = self._writable()
        self._owed.add(key)
        outcome = first.put_if_absent(key, data)
        if outcome == "lost":
            return outcome
        there = data if outcome == "created" else first.read(key)
        try:
            self._second(second, f"create {key}", lambda half: self._copy(half, key, there))
        except Unavailable as error:
            # It is in the log of the arbiter: only reading back and trying again leads on.
            logger.warning("%s is in one half of the mirror only: %s", key, error)
            return "lost"
        self._owed.discard(key)
        return outcome

    def put(self, key: str, data: bytes) -> None:
        first, second = self._writable()
        first.put(key, data)
        self._second(second, f"write {key}", lambda half: half.put(key, data))

    def read(self, key: str) -> bytes:
        found: list[bytes] = []
        failed: list[Exception] = []
        for half in self._order():
            try:
                data = half.read(key)
            except (Missing, Unavailable) as error:
                failed.append(error)
                continue
            if sound(key, data) and not key.endswith(f"/{MANIFEST}"):
                return self._paid(key, data)
            found.append(data)
        if len(set(found)) > 1:
            found = [self._right(key, found)]
        if found:
            return found[0]
        raise next((e for e in failed if isinstance(e, Unavailable)), missing(self.url, key))

    def _paid(self, key: str, data: bytes) -> bytes:
        """`data`, once it is in both halves. Raises `Unavailable` when policy wants that and it cannot be."""
        if key in self._owed:
            _, second = self._writable()
            self._second(second, f"create {key}", lambda half: self._copy(half, key, data))
            self._owed.discard(key)
        return data

    def _settle(self) -> None:
        """Copy the entries that a writer, which died between the two halves, left in the arbiter alone."""
        first, second = self._order()
        try:
            there = {item.key for item in second.list("log")}
            for item in first.list("log"):
                if item.key not in there and sound(item.key, data := first.read(item.key)):
                    second.put_if_absent(item.key, data)
                    logger.warning("%s was in %s only and is in both halves now", item.key, first.url)
        except (Missing, Unavailable) as error:
            self._degrade(str(error))

    def size(self, key: str) -> int | None:
        for half in self._order():
            try:
                if (size := half.size(key)) is not None:
                    return size
            except Unavailable as error:
                logger.warning("%s", error)
        return None

    def list(self, prefix: str, *, after: str = "") -> Iterator[Listed]:
        found: dict[str, Listed] = {}
        failed: list[Unavailable] = []
        for half in reversed(self._order()):
            try:
                found.update((item.key, item) for item in half.list(prefix, after=after))
            except Unavailable as error:
                logger.warning("%s", error)
                failed.append(error)
        if len(failed) == len(self.halves):
            raise failed[0]
        return iter(sorted(item for item in found.values() if item.key != MARK))

    def delete(self, key: str) -> None:
        self._delete(key, lambda half: half.delete(key))

    def delete_folder(self, prefix: str) -> None:
        self._delete(prefix, lambda half: half.delete_folder(prefix))

    def upload(self, prefix: str, folder: Path, same: Mapping[str, str] = {}) -> None:
        first, second = self._writable()
        first.upload(prefix, folder, same)
        self._second(second, f"upload {prefix}", lambda half: half.upload(prefix, folder, same))

    def file(self, key: str, *, nbytes: int, sha256: str) -> Path:
        failed: list[Exception] = []
        for half in self._order():
            try:
                path = half.file(key, nbytes=nbytes, sha256=sha256)
                check_blob(path, Blob(key, nbytes, sha256, "delta"))
                return path
            except (Missing, IntegrityError, Unavailable) as error:
                logger.warning("%s", error)
                failed.append(error)
        raise next((e for e in failed if not isinstance(e, Missing)), missing(self.url, key))

    def probe(self) -> None:
        for half in self.halves:
            if read_mark(half) is not None:
                half.probe()
        probe(self)

    def promote(self) -> LocalPlace:
        """Make the half that is there the arbiter, because the other is lost; gives it.

        A disk that comes back later is an older generation: it is written to again after a repair.
        """
        marks = [self.mark_of(half) for half in self.halves]
        alive = [i for i, mark in enumerate(marks) if mark is not None]
        if len(alive) != 1:
            raise InvalidInput(f"{self.url}: both halves are there", hint="nothing has to be promoted")
        index = alive[0]
        mark = marks[index]
        if mark is None:
            raise InvalidInput(f"{self.halves[index].url} has no {MARK}", hint="mount it")
        if mark.arbiter != mark.id:
            mark = msgspec.structs.replace(mark, arbiter=mark.id, generation=self._newest.generation + 1)
            self._write_mark(self.halves[index], mark)
            logger.warning("%s is the arbiter of generation %d now", self.halves[index].url, mark.generation)
        self._newest, self._arbiter = mark, index
        return self.halves[index]

    def accept(self, half: LocalPlace) -> None:
        """Say that a half is complete again, after a repair."""
        if (mark := self.mark_of(half)) is None:
            mark = msgspec.structs.replace(self._newest, id=uuid.uuid4().hex)
        mark = msgspec.structs.replace(mark, arbiter=self._newest.arbiter, generation=self._newest.generation)
        self._write_mark(half, mark)
        self.degraded, self._behind = "", False

    def _make(self) -> Sequence[Mark | None]:
        for half in self.halves:
            if half.size("run.json") is not None:
                raise InvalidInput(
                    f"{half.url} holds a store already",
                    hint="make a mirror of two new folders",
                )
        mirror, ids = uuid.uuid4().hex, (uuid.uuid4().hex, uuid.uuid4().hex)
        marks = [Mark(mirror, one, ids[0], 1) for one in ids]
        # The arbiter last: a mirror that was half made has none, and is made again.
        for half, mark in reversed(list(zip(self.halves, marks, strict=True))):
            self._write_mark(half, mark)
        return marks

    def _write_mark(self, half: LocalPlace, mark: Mark) -> None:
        half.put(MARK, seal(msgspec.json.encode(mark)) + b"\n")

    def mark_of(self, half: LocalPlace) -> Mark | None:
        """The mark of a half; None when it is away, empty or damaged."""
        try:
            return read_mark(half)
        except (FormatError, Unavailable) as error:
            logger.warning("%s", error)
            return None

    def _order(self) -> tuple[LocalPlace, ...]:
        return self.halves if self._arbiter != 1 else self.halves[::-1]

    def _writable(self) -> tuple[LocalPlace, LocalPlace]:
        """(arbiter, other). Raises `Unavailable` without an arbiter, `ConflictError` if it is another now."""
        first, second = self._order()
        marks = self.mark_of(first), self.mark_of(second)
        newest = max((m for m in marks if m is not None), key=lambda m: m.generation, default=None)
        if newest is not None and newest.generation > self._newest.generation:
            raise ConflictError(
                f"{self.url}: another process made the other half the arbiter", hint="open the mirror anew"
            )
        if self._arbiter is None or marks[0] is None or marks[0].id != self._newest.arbiter:
            raise Unavailable(
                f"{self.url}: the half that decides about the log is away",
                hint="mount it again; if it is lost, `weightline verify --repair` promotes the other",
            )
        return first, second

    def _second(self, half: LocalPlace, what: str, act: Callable[[LocalPlace], T]) -> None:
        mark = self.mark_of(half)
        try:
            if mark is None or mark.generation != self._newest.generation:
                raise Unavailable(f"{half.url} is empty, replaced, not mounted or behind", hint="")
            act(half)
        except Unavailable as error:
            if self.policy == "both":
                raise Unavailable(
                    f"cannot {what} in both halves of {self.url}: {error.message}",
                    hint="mount it or run `weightline verify --repair`, then repeat the call; "
                    "or open the mirror with policy=degrade",
                ) from error
            if not self._behind and (mark is None or mark.generation == self._newest.generation):
                # Says in the arbiter that the other half is behind, also for whoever opens it later.
                first = self._order()[0]
                ours = msgspec.structs.replace(self._newest, id=self._newest.arbiter)
                self._newest = msgspec.structs.replace(ours, generation=ours.generation + 1)
                self._write_mark(first, self._newest)
                self._behind = True
            self._degrade(error.message)
        else:
            if self.degraded:
                logger.warning("%s: both halves are written to again", self.url)
            self.degraded, self._behind = "", False

    def _copy(self, half: LocalPlace, key: str, data: bytes) -> None:
        outcome = half.put_if_absent(key, data)
        if outcome == "lost" or (outcome == "exists" and not sound(key, half.read(key))):
            half.put(key, data)
        elif outcome == "exists" and half.read(key) != data:
            raise IntegrityError(
                f"{key} differs in the two halves of {self.url}: both were written to alone",
                hint="nothing is written before one of them is moved away and the other repaired",
            )

    def _delete(self, what: str, act: Callable[[LocalPlace], None]) -> None:
        first, second = self._writable()
        act(first)
        try:
            if self.mark_of(second) is not None:
                act(second)
        except Unavailable as error:
            logger.warning("%s stays in one half until a repair: %s", what, error)

    def _right(self, key: str, found: Sequence[bytes]) -> bytes:
        """Which of two different contents the log names."""
        digest = expected(self.halves).get(key)
        logger.warning("%s differs in the two halves of %s: run `weightline verify --repair`", key, self.url)
        return next((data for data in found if digest_of(data) == digest), found[0])

    def _degrade(self, why: str) -> None:
        if why != self.degraded:
            logger.error("%s is degraded: %s; a loss of the other half loses versions", self.url, why)
        self.degraded = why
