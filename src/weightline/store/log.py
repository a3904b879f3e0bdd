"""The log on a local folder: one file an entry, and the loop that performs a machine's effects."""

from __future__ import annotations

import errno
import logging
import uuid
from pathlib import Path

import msgspec

from weightline.core import commit as machines
from weightline.core import ledger
from weightline.core.ledger import Entry, LedgerState
from weightline.errors import IntegrityError, InvalidInput, Unavailable
from weightline.store.disk import Disk, failure

logger = logging.getLogger(__name__)

_DIGITS = 20
_NEVER_MADE = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
"""After one of these from a put, the entry is certainly not there."""


class Hint(msgspec.Struct, frozen=True):
    """head.json: the newest entry when it was written. Last writer wins; never trusted alone."""

    seq: int


class LocalLog:
    """`log/` and `head.json` below a store's root."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self.folder = root / "log"
        self._hint = root / "head.json"
        self._disk = disk

    def path(self, seq: int) -> Path:
        """Where entry `seq` lies."""
        return self.folder / f"{seq:0{_DIGITS}d}.json"

    def read(self, seq: int) -> Entry | None:
        """Entry `seq`, or None when there is none. Raises `FormatError` for a damaged one."""
        path = self.path(seq)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unavailable(
                f"cannot read log entry {path}: {error.strerror}",
                hint="check that the disk is mounted and healthy",
            ) from error
        return ledger.decode(data, where=str(path))

    def after(self, state: LedgerState) -> LedgerState | None:
        """`state` and the entry that follows it; None without one. Raises `FormatError` if it is damaged."""
        entry = self.read(state.seq + 1)
        return None if entry is None else state.apply(state.seq + 1, entry)

    def present(self) -> list[int]:
        """Numbers of the entries that are there, ascending."""
        names = (path.name for path in self.folder.glob("*.json"))
        return sorted(int(name[:-5]) for name in names if len(name) == _DIGITS + 5 and name[:-5].isdigit())

    def check_gap(self, state: LedgerState) -> None:
        """Raises `IntegrityError` if entries lie beyond one that is missing: writing there would rewrite
        history.
        """
        beyond = [seq for seq in self.present() if seq > state.seq]
        hint = self.hint()
        if beyond and self.read(state.seq + 1) is None:
            last = beyond[-1]
        elif hint > state.seq and self.read(state.seq + 1) is None:
            last = hint
        else:
            return
        raise IntegrityError(
            f"log entry {self.path(state.seq + 1)} is missing, but entry {last} was written",
            hint="restore the log from a copy; nothing is written before that",
        )

    def hint(self) -> int:
        """What head.json says; 0 when it says nothing that can be read."""
        try:
            return msgspec.json.decode(self._hint.read_bytes(), type=Hint).seq
        except (OSError, msgspec.DecodeError):
            return 0

    def probe(self) -> None:
        """Raises `InvalidInput` unless this place refuses a second put under one name."""
        path = self.folder / f".probe-{uuid.uuid4().hex}"
        try:
            first, second = self._disk.put_if_absent(path, b"1"), self._disk.put_if_absent(path, b"2")
            kept = path.read_bytes()
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV):
                raise InvalidInput(
                    f"{self.folder} has no hard links ({error.strerror}): two writers would not notice",
                    hint="put the store on a file system with hard links (ext4, xfs, btrfs, tmpfs, NFS)",
                ) from error
            raise failure(str(path), error) from error
        finally:
            path.unlink(missing_ok=True)
        if not first or second or kept != b"1":
            raise InvalidInput(
                f"{self.folder} does not refuse a second file of the same name",
                hint="put the store on a file system with POSIX hard links",
            )

    def drive(self, machine: machines.Machine) -> machines.Done:
        """Performs a machine's effects until it is through. Raises the error that it fails with.

        `machine.state` is the state of the log afterwards, whatever happened.
        """
        effects = machine.start()
        while True:
            event: machines.Event | None = None
            for effect in effects:
                match effect:
                    case machines.PutIfAbsent():
                        event = self._put(effect)
                    case machines.ReadEntry():
                        event = self._read_back(effect.seq)
                    case machines.WriteHeadHint():
                        self._write_hint(effect.seq)
                    case machines.Done():
                        return effect
                    case machines.Failed():
                        raise effect.error
            if event is None:
                raise RuntimeError("the machine asked for nothing and is not through")
            effects = machine.step(event)

    def _put(self, effect: machines.PutIfAbsent) -> machines.Event:
        path = self.path(effect.seq)
        try:
            if self._disk.put_if_absent(path, ledger.encode(effect.entry)):
                return machines.PutOk(effect.seq)
        except OSError as error:
            if error.errno in _NEVER_MADE:
                raise failure(str(path), error) from error
            logger.warning("no answer from writing log entry %s: %s", path, error)
            return machines.PutLost(effect.seq)
        entry = self.read(effect.seq)
        if entry is None:
            return machines.PutLost(effect.seq)
        return machines.PutExists(effect.seq, entry)

    def _read_back(self, seq: int) -> machines.Event:
        entry = self.read(seq)
        if entry is None:
            return machines.ReadMissing(seq)
        try:
            # Whoever linked it may not have lived to make the name durable.
            self._disk.fsync_folder(self.folder)
        except OSError as error:
            raise failure(str(self.path(seq)), error) from error
        return machines.ReadOk(seq, entry)

    def _write_hint(self, seq: int) -> None:
        try:
            self._disk.replace(self._hint, msgspec.json.encode(Hint(seq)), durable=False)
        except OSError as error:
            logger.warning("could not write %s (only a hint): %s", self._hint, error)
