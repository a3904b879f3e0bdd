"""The index of the log: blocks of consecutive entries, so that a cold start reads few objects.

A block holds the bytes of entries `first`..`last` as they lie in the log. Blocks are aligned and their
lengths are powers of two, so any length of log is covered by one block for each bit of it: at most 16 for
100,000 entries. They are derived: anybody may write, delete or rebuild them, a damaged one is passed over,
and one that covers a smaller one makes that superfluous. From a block a damaged log entry can be restored.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator

import msgspec
from msgspec import Struct

from weightline.core import ledger
from weightline.core.ledger import FORMAT, LedgerState
from weightline.core.seal import seal, unseal
from weightline.errors import FormatError, IntegrityError, Unavailable
from weightline.store.place import Missing, Place

logger = logging.getLogger(__name__)

INDEX = "index"
SMALLEST = 4
"""Entries of the smallest block: fewer are read one by one."""
_DIGITS = 20


class BlockHeader(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First line of a block, sealed."""

    format: int = FORMAT
    run: str
    first: int
    last: int
    sha256: str
    """Of all bytes after this line."""


def blocks(seq: int) -> list[tuple[int, int]]:
    """(first, last) of the blocks that cover a log of `seq` entries but for the last few, ascending."""
    out, first = [], 1
    size = 1 << max(seq.bit_length(), 2)
    while size >= SMALLEST:
        if first + size - 1 <= seq:
            out.append((first, first + size - 1))
            first += size
        size >>= 1
    return out


class Index:
    """`index/` of a place. `raw` reads the bytes of one log entry."""

    def __init__(self, place: Place, run: str, raw: Callable[[int], bytes]) -> None:
        self._place = place
        self._run = run
        self._raw = raw

    def on_from(self, state: LedgerState) -> Iterator[LedgerState]:
        """States after ever more blocks, as far as they reach. Damage ends it with a warning, never an
        error.
        """
        try:
            there = self.present()
        except Unavailable as error:
            logger.warning("the index of %s cannot be listed (only slower): %s", self._place.url, error)
            return
        while found := [last for first, last in there if first == state.seq + 1]:
            first, last = state.seq + 1, max(found)
            try:
                lines = self.lines(first, last)
                entries = [(first + at, ledger.decode(line)) for at, line in enumerate(lines)]
                state = state.extended(entries)
            except (Missing, FormatError, IntegrityError, Unavailable) as error:
                logger.warning("%s is passed over (only slower): %s", self.key(first, last), error)
                there.remove((first, last))
                continue
            yield state

    def key(self, first: int, last: int) -> str:
        """Where a block lies below the root."""
        return f"{INDEX}/{first:0{_DIGITS}d}-{last:0{_DIGITS}d}.jsonl"

    def present(self) -> list[tuple[int, int]]:
        """(first, last) of the blocks that are there, ascending."""
        out = []
        for item in self._place.list(INDEX):
            first, dash, last = item.key[len(INDEX) + 1 :].removesuffix(".jsonl").partition("-")
            if dash and first.isdigit() and last.isdigit():
                out.append((int(first), int(last)))
        return sorted(out)

    def lines(self, first: int, last: int) -> list[bytes]:
        """The entries of a block, as they lie in the log. Raises `FormatError`, `IntegrityError`."""
        where = f"{self._place.url}/{self.key(first, last)}"
        data = self._place.read(self.key(first, last))
        head, _, body = data.partition(b"\n")
        hint = "delete it: it is rebuilt"
        try:
            header = msgspec.json.decode(unseal(head, where=where, hint=hint), type=BlockHeader)
        except msgspec.DecodeError as error:
            raise FormatError(f"{where} is no block of format {FORMAT}: {error}", hint=hint) from None
        if header.run != self._run or (header.first, header.last) != (first, last):
            raise FormatError(f"{where} belongs to another log: {header.run}", hint=hint)
        if hashlib.sha256(body).hexdigest() != header.sha256:
            raise IntegrityError(f"{where} differs from its SHA-256", hint=hint)
        return body.splitlines(keepends=True)

    def write(self, seq: int) -> list[tuple[int, int]]:
        """Write the blocks that a log of `seq` entries lacks and delete those that they cover; gives the new
        ones. Raises `Unavailable`; `FormatError` or `Missing` for a log that is damaged.
        """
        wanted = blocks(seq)
        there = self.present()
        new = [block for block in wanted if block not in there]
        for first, last in new:
            body = b"".join(self._gather(first, last, there))
            header = BlockHeader(
                run=self._run, first=first, last=last, sha256=hashlib.sha256(body).hexdigest()
            )
            data = seal(msgspec.json.encode(header)) + b"\n" + body
            self._place.put(self.key(first, last), data)
        for first, last in there:
            if any(begin <= first and last <= end and (begin, end) != (first, last) for begin, end in wanted):
                self._place.delete(self.key(first, last))
        return new

    def _gather(self, first: int, last: int, there: list[tuple[int, int]]) -> Iterator[bytes]:
        """Entries `first`..`last` out of smaller blocks where there are any, else out of the log."""
        at = first
        while at <= last:
            ends = sorted((end for begin, end in there if begin == at and end <= last), reverse=True)
            for end in ends:
                try:
                    yield from self.lines(at, end)
                    at = end + 1
                    break
                except (FormatError, Missing, IntegrityError):
                    continue
            else:
                line = self._raw(at)
                ledger.decode(line, where=f"log entry {at}")
                yield line
                at += 1
