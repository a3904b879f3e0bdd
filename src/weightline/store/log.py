"""The log in a place: one object an entry, and the loop that performs a machine's effects."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from weightline.core import commit as machines
from weightline.core import ledger
from weightline.core.ledger import Entry, LedgerState
from weightline.errors import FormatError, IntegrityError, Unavailable
from weightline.store.index import Index
from weightline.store.place import Missing, Place

logger = logging.getLogger(__name__)

LOG = "log"
HEAD = "head.json"
_DIGITS = 20
_READERS = 16
"""Entries that are read at once where the hint says that many are there."""


class Hint(msgspec.Struct, frozen=True):
    """head.json: the newest entry when it was written. Last writer wins; never trusted alone."""

    seq: int


class Log:
    """`log/`, `index/` and `head.json` of a place."""

    def __init__(self, place: Place, run: str) -> None:
        self._place = place
        self.index = Index(place, run, self._raw)

    def key(self, seq: int) -> str:
        """Where entry `seq` lies below the root."""
        return f"{LOG}/{seq:0{_DIGITS}d}.json"

    def path(self, seq: int) -> Path:
        """The same for messages; in a folder it is the file."""
        return Path(self._place.url) / self.key(seq)

    def read(self, seq: int) -> Entry | None:
        """Entry `seq`, or None when there is none. Raises `FormatError` for a damaged one, `Unavailable`."""
        try:
            return ledger.decode(self._raw(seq), where=str(self.path(seq)))
        except Missing:
            return None
        except FormatError:
            # A short read looks like damage, once.
            return ledger.decode(self._raw(seq), where=str(self.path(seq)))

    def after(self, state: LedgerState) -> LedgerState | None:
        """`state` and the entry that follows it; None without one. Raises `FormatError` if it is damaged."""
        entry = self.read(state.seq + 1)
        return None if entry is None else state.apply(state.seq + 1, entry)

    def on_from(self, state: LedgerState) -> Iterator[LedgerState]:
        """States that follow `state`, up to the end of the log: index blocks first, then what the hint
        promises, then whatever a probe finds. The last one is the newest; what comes before a damaged entry
        is given all the same.
        """
        if state.seq == 0:
            for indexed in self.index.on_from(state):
                yield (state := indexed)
            for promised in self._promised(state):
                yield (state := promised)
        while (following := self.after(state)) is not None:
            state = following
            yield state

    def _promised(self, state: LedgerState) -> Iterator[LedgerState]:
        last = self.hint()
        if last - state.seq < _READERS:
            return
        with ThreadPoolExecutor(_READERS, thread_name_prefix="weightline-log") as pool:
            for begin in range(state.seq + 1, last + 1, 16 * _READERS):
                numbers = range(begin, min(begin + 16 * _READERS, last + 1))
                entries = []
                try:
                    for seq, entry in zip(numbers, pool.map(self.read, numbers), strict=True):
                        if entry is None:
                            break
                        entries.append((seq, entry))
                finally:
                    if entries:
                        state = state.extended(entries)
                        yield state
                if len(entries) < len(numbers):
                    return

    def present(self, after: int = 0) -> list[int]:
        """Numbers of the entries above `after` that are there, ascending."""
        names = (item.key[len(LOG) + 1 :] for item in self._place.list(LOG, after=self.key(after)))
        return [int(name[:-5]) for name in names if len(name) == _DIGITS + 5 and name[:-5].isdigit()]

    def check_gap(self, state: LedgerState, *, thorough: bool = False) -> None:
        """Raises `IntegrityError` if entries lie beyond one that is missing: writing there would rewrite
        history. `thorough` lists the log; else the hint must do.
        """
        last = max([self.hint(), *(self.present(state.seq)[-1:] if thorough else [])])
        if last <= state.seq or self.read(state.seq + 1) is not None:
            return
        raise IntegrityError(
            f"log entry {self.path(state.seq + 1)} is missing, but entry {last} was written",
            hint="run `weightline verify --repair` or restore the log from a copy; nothing is written",
        )

    def hint(self) -> int:
        """What head.json says; 0 when it says nothing that can be read."""
        try:
            return msgspec.json.decode(self._place.read(HEAD), type=Hint).seq
        except (Missing, IntegrityError, Unavailable, msgspec.DecodeError):
            return 0

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
                        self.write_hint(effect.seq)
                    case machines.Done():
                        return effect
                    case machines.Failed():
                        raise effect.error
            if event is None:
                raise RuntimeError("the machine asked for nothing and is not through")
            effects = machine.step(event)

    def write_hint(self, seq: int) -> None:
        """Tell new readers how far the log goes. Never raises: nothing depends on it."""
        try:
            self._place.put(HEAD, msgspec.json.encode(Hint(seq)))
        except Unavailable as error:
            logger.warning("could not write %s (only a hint): %s", HEAD, error)

    def _raw(self, seq: int) -> bytes:
        return self._place.read(self.key(seq))

    def _put(self, effect: machines.PutIfAbsent) -> machines.Event:
        outcome = self._place.put_if_absent(self.key(effect.seq), ledger.encode(effect.entry))
        if outcome == "created":
            return machines.PutOk(effect.seq)
        entry = self.read(effect.seq) if outcome == "exists" else None
        return machines.PutLost(effect.seq) if entry is None else machines.PutExists(effect.seq, entry)

    def _read_back(self, seq: int) -> machines.Event:
        entry = self.read(seq)
        if entry is None:
            return machines.ReadMissing(seq)
        # Whoever wrote it may not have lived to make its name durable; a second put of the same bytes does.
        self._place.put_if_absent(self.key(seq), ledger.encode(entry))
        return machines.ReadOk(seq, entry)
