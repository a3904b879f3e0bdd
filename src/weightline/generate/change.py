"""The two ways in which a plan's bits become live.

*In place*: the changed elements are written into the live tensors while nothing runs, and what they replace
is kept as the undo log. The pause grows with the number of changed elements. *Standby*: while the engine
serves, second tensors are filled for every storage that the plan touches, read back and compared with the
version's digests; between two steps the model is then pointed at them. The pause is that of one pointer a
tensor, the price is a copy of what is touched for as long as the session is open: until then the old tensors
are the undo log.

Measured on 135M parameters in fp32 on 2 CPU cores (`benchmarks/standby.py`, figures in note 0021): in
place, the engine stands still for some 40 ms a million elements, with a standby set for the same short time
whatever the number. `STANDBY_FROM` keeps the in-place pause at some 50 ms there.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from weightline import codec
from weightline.errors import RefitError, WeightlineError
from weightline.generate.plan import Plan, Write, refused
from weightline.generate.weights import LiveWeights, Memory, Storage, Undo, Window, full_digest
from weightline.generate.widen import Bits, narrow, widen

log = logging.getLogger(__name__)

Way = Literal["in_place", "standby"]
Region = tuple[str, int, int]
STANDBY_FROM = 1_000_000
"""Changed elements of one refit from which on it takes the standby way."""
SPARE = 0.1
"""Share of the free memory that a standby set leaves free."""


class Change(Protocol):
    """One plan on its way into the model. `apply`, `verify` and `restore` run on the engine thread, between
    two steps, under the weights' lock.
    """

    plan: Plan
    way: Way
    digests: dict[Region, str]
    """Of every write, proved on the bits that are live after `apply`; whole after `verify`."""

    @property
    def standby_bytes(self) -> int:
        """Memory that the change holds besides the live tensors."""
        ...

    def apply(self) -> None:
        """Make the new bits live. When it raises, some may be: `restore`."""
        ...

    def verify(self) -> list[str]:
        """What is live and should not be; empty when every tensor is the version's."""
        ...

    def restore(self) -> None:
        """Make the old bits live again; what `apply` did not reach stays untouched. Raises when they do not
        come back.
        """
        ...


class InPlace:
    """Writes into the live tensors, with an undo log as small as the delta."""

    way: Way = "in_place"
    standby_bytes = 0

    def __init__(self, weights: LiveWeights, plan: Plan) -> None:
        self.weights = weights
        self.plan = plan
        self.digests: dict[Region, str] = {}
        self.undo: list[Undo] = []
        self._carried = dict(weights.carried)

    def apply(self) -> None:
        self.weights.forget_digests(w.window for w in self.plan.writes)
        for write in self.plan.writes:
            undo = self.weights.write(write.window, write.index, write.bits, write.stored, write.live_bits)
            self.undo.append(undo)

    def verify(self) -> list[str]:
        misses = []
        for write, undo in zip(self.plan.writes, self.undo, strict=True):
            before = self._carried.get(write.window.region)
            digest = proved(write, write.window.bits, before, undo)
            if digest == write.digest:
                self.digests[write.window.region] = digest
            else:
                misses.append(_miss(write, digest))
        return misses

    def restore(self) -> None:
        for undo in reversed(self.undo):
            self.weights.restore(undo)
        self.undo.clear()


class Standby:
    """A second set of the tensors that the plan touches, filled and proved before the engine stands still."""

    way: Way = "standby"

    def __init__(self, weights: LiveWeights, plan: Plan) -> None:
        """Build the set while the engine serves; on any thread. The caller sees to it that nothing is
        written to the live tensors meanwhile.

        Raises `MemoryError` or `RuntimeError` when there is no room, and `RefitError("old")` when the set
        does not hold what was written to it or is not the version.
        """
        self.weights = weights
        self.plan = plan
        self.digests: dict[Region, str] = {}
        self._writes = weights.writes
        self._new: dict[Storage, Memory] = {}
        self._old: dict[Storage, Memory] = {}
        for storage in dict.fromkeys(w.window.storage for w in plan.writes):
            self._new[storage] = self._start(storage)
        misses = []
        for write in plan.writes:
            digest = self._fill(write)
            if digest == write.digest:
                self.digests[write.window.region] = digest
            else:
                misses.append(_miss(write, digest))
        if misses:
            raise refused(misses[:8], "fetch the version again; nothing live was touched")

    @property
    def standby_bytes(self) -> int:
        return sum(storage.nbytes for storage in self._new)

    def _start(self, storage: Storage) -> Memory:
        memory = storage.fresh()
        whole = [w.window for w in self.plan.writes if w.window.storage is storage and w.index is None]
        if sum(w.size for w in whole) < memory.bits.size:  # the plan's windows do not overlap
            memory.bits[:] = storage.memory.bits
        return memory

    def _fill(self, write: Write) -> str | None:
        window = write.window
        undo = None if write.index is None else self.weights.read(window, write.index, self._before(window))
        put(self._target(window), write)
        return proved(write, self._target(window), self.weights.carried.get(window.region), undo)

    def _before(self, window: Window) -> str:
        return self.weights.stored[window.owner]

    def _target(self, window: Window) -> Bits:
        return window.within(self._new[window.storage])

    def apply(self) -> None:
        if self.weights.writes != self._writes:
            raise RefitError(
                "the live weights changed while the standby set was built",
                engine_state="old",
                hint="prepare the refit again",
            )
        self.weights.forget_digests(w.window for w in self.plan.writes)
        for storage, memory in self._new.items():
            self._old[storage] = storage.memory
            self.weights.exchange(storage, memory)

    def verify(self) -> list[str]:
        return [
            f"{storage.owner} is not computed with from the standby set"
            for storage, memory in self._new.items()
            if not storage.uses(memory)
        ]

    def restore(self) -> None:
        for storage, memory in reversed(self._old.items()):
            self.weights.exchange(storage, memory)
            if not storage.uses(memory):
                raise RefitError(f"{storage.owner}: the old tensor did not come back", engine_state="unknown")
        self._old.clear()


def put(target: Bits, write: Write) -> None:
    """Write one tensor's new bits into `target`, its part of some memory."""
    wide = write.live_bits
    if wide is None:
        wide = widen(write.bits, write.stored, write.window.dtype)
    if write.index is None:
        target[:] = wide
    else:
        target[write.index] = wide


def proved(write: Write, found: Bits, before: str | None, undo: Undo | None) -> str | None:
    """The digest of the tensor whose live bits are `found`, after they were compared with what was written;
    None when they differ from it.

    `before` is the digest it is known to have had before the write and `undo` what was there then: with
    both, only the changed elements are read.
    """
    window, index = write.window, write.index
    small = narrow(found if index is None else found[index], window.dtype, write.stored)
    if small is None or not np.array_equal(small, write.bits):
        return None
    if index is not None and before is not None and undo is not None and undo.dtype == write.stored:
        return codec.digest_update(before, index, undo.bits, small)
    return full_digest(found, window.dtype, write.stored)


def _miss(write: Write, digest: str | None) -> str:
    if digest is None:
        return f"{write.window.name} does not hold what was written"
    return f"{write.window.name} has digest {digest}, the version says {write.digest}"


def choose(weights: LiveWeights, plan: Plan, *, standby_from: int) -> tuple[Change, str]:
    """The way for `plan`, and why. Fills the standby set, if that is the way: while serving, on any thread.

    Raises `RefitError("old")` as `Standby`. No room for a standby set is no error: the refit goes in place.
    """
    if plan.elements < standby_from:
        return InPlace(weights, plan), f"{plan.elements} changed elements are fewer than {standby_from}"
    storages = dict.fromkeys(w.window.storage for w in plan.writes)
    shared = next((s.owner for s in storages if not s.alone), None)
    if shared is not None:
        return InPlace(weights, plan), f"{shared} lies in one allocation with something else"
    need = sum(s.nbytes for s in storages)
    free = free_memory()
    if free is not None and need > free * (1 - SPARE):
        why = f"a standby set of {need} bytes does not fit into {free} free bytes"
    else:
        try:
            return Standby(weights, plan), f"{plan.elements} changed elements"
        except (MemoryError, RuntimeError) as error:  # torch reports a failed allocation as RuntimeError
            why = f"no room for a standby set of {need} bytes: {error}"
        except WeightlineError:
            raise
        except Exception as error:  # whatever went wrong, nothing live was touched
            raise refused([f"building the standby set failed: {error}"], "see the engine's log") from error
    log.warning("refit of %d elements goes in place, with a longer pause: %s", plan.elements, why)
    return InPlace(weights, plan), why


def free_memory() -> int | None:
    """Bytes that this process can still take on this host; None where that is not known. A container's limit
    counts if it is a cgroup of version 2.
    """
    found = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii").strip()
        found += [] if limit == "max" else [int(limit) - int(used)]
    except OSError:
        pass  # another system, or no such cgroup: what is known so far counts
    return min(found, default=None)
