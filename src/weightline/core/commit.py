"""How entries get into the log: pure machines, events in, effects out.

The caller performs each effect and reports back with an event; it may stop anywhere (that is a crash), lose
an answer, or find the log changed under it. A machine keeps no progress of its own beside the state of the
log: it asks `decide(state)` what to write next, tries to put that at the next free seq, and whatever it
learns there is folded into the state before it decides again. So every path (lost race, lost answer, repeated
commit, restart after a crash) goes through the same few lines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from weightline.core.ledger import (
    AbandonEntry,
    Entry,
    FenceEntry,
    LedgerState,
    RetireEntry,
    ThinEntry,
    VersionEntry,
    YankEntry,
)
from weightline.core.plan import chain
from weightline.core.request import CommitRequest, check_repeated, other_commit
from weightline.errors import ConflictError, InvalidInput, Unavailable, WeightlineError, WriterFenced

MAX_LOST_ANSWERS = 5
"""Answers to one put that may be lost, with nothing found at its seq, before the machine gives up."""


# Effects ----------------------------------------------------------------------------------------------------


class PutIfAbsent(Struct, frozen=True):
    """Create entry `seq` unless it exists. Answer: `PutOk`, `PutExists` or, if nobody can tell, `PutLost`."""

    seq: int
    entry: Entry


class ReadEntry(Struct, frozen=True):
    """Read entry `seq`. Answer: `ReadOk` or `ReadMissing`."""

    seq: int


class WriteHeadHint(Struct, frozen=True):
    """Tell new readers where to begin probing. May fail or be skipped: nothing depends on it. No answer."""

    seq: int


class Done(Struct, frozen=True):
    """The machine is through. `entry` is what it was for, as it stands in the log at `seq`."""

    seq: int
    entry: Entry
    epoch: int
    repeated: bool
    """The entry was already there: an earlier call with the same commit_id (or an identical wish) wrote it.
    """


class Failed(Struct, frozen=True):
    """The machine gives up; nothing was published (`Unavailable`: nobody can tell; repeat with the
    commit_id).
    """

    error: WeightlineError


Effect = PutIfAbsent | ReadEntry | WriteHeadHint | Done | Failed


# Events -----------------------------------------------------------------------------------------------------


class PutOk(Struct, frozen=True):
    seq: int


class PutExists(Struct, frozen=True):
    """Entry `seq` was there already, and this is it."""

    seq: int
    entry: Entry


class PutLost(Struct, frozen=True):
    """The put may or may not have happened."""

    seq: int


class ReadOk(Struct, frozen=True):
    seq: int
    entry: Entry


class ReadMissing(Struct, frozen=True):
    seq: int


Event = PutOk | PutExists | PutLost | ReadOk | ReadMissing

Decision = Entry | Done | Failed
Decide = Callable[[LedgerState], Decision]


class Machine:
    """Puts the entries that `decide` asks for, one after another, until it says `Done` or `Failed`.

    `start()` and then `step(event)` for each answer; both return the effects to perform, in order. The last
    effect ever returned is `Done` or `Failed`. `state` is what the log was found to be.
    """

    def __init__(self, state: LedgerState, decide: Decide) -> None:
        self.state = state
        self._decide = decide
        self._flying: PutIfAbsent | None = None
        self._lost = 0

    def start(self) -> list[Effect]:
        """The first effects."""
        return self._next()

    def step(self, event: Event) -> list[Effect]:
        """What to do after `event`. Raises `InvalidInput` for an answer to a question that was not asked."""
        flying = self._flying
        if flying is None or event.seq != flying.seq:
            raise InvalidInput(f"{type(event).__name__}({event.seq}) answers no effect of this machine")
        match event:
            case PutOk():
                return self._learnt(flying.entry)
            case PutExists() | ReadOk():
                # A put that was retried below us may fail against our own write: then the entry carries our
                # write id, and folding it in is all there is to do, as for anybody else's.
                return self._learnt(event.entry)
            case PutLost():
                return [ReadEntry(flying.seq)]
            case ReadMissing():
                self._lost += 1
                if self._lost >= MAX_LOST_ANSWERS:
                    return self._give_up(flying.seq)
                return [flying]

    def _learnt(self, entry: Entry) -> list[Effect]:
        self.state = self.state.apply(self.state.seq + 1, entry)
        self._lost = 0
        return self._next()

    def _next(self) -> list[Effect]:
        decision = self._decide(self.state)
        if isinstance(decision, Failed):
            self._flying = None
            return [decision]
        if isinstance(decision, Done):
            self._flying = None
            return [WriteHeadHint(self.state.seq), decision]
        self._flying = PutIfAbsent(self.state.seq + 1, decision)
        return [self._flying]

    def _give_up(self, seq: int) -> list[Effect]:
        self._flying = None
        error = Unavailable(
            f"the store did not answer {self._lost} times while entry {seq} was written",
            hint="repeat the call with the same commit_id: what did go through is not published twice",
        )
        return [Failed(error)]


# Commit -----------------------------------------------------------------------------------------------------


class _Commit:
    """`decide` for one commit."""

    def __init__(self, request: CommitRequest) -> None:
        self.request = request
        self.epoch = request.epoch

    def __call__(self, state: LedgerState) -> Decision:
        request = self.request
        done = state.by_commit(request.commit_id)
        mine = done is not None and done.write_id == request.write_id
        if done is not None and not mine:
            return self._repeated(state, done)
        if self.epoch is None and state.fence_write_id == f"{request.write_id}.fence":
            self.epoch = state.epoch
        if done is None:
            if self.epoch is None:
                return self._fence(state)
            if (refusal := self._refusal(state)) is not None:
                return Failed(refusal)
        if self.epoch == state.epoch and (abandon := self._abandon(state)) is not None:
            return abandon
        if done is not None:
            return Done(state.seq_of(done.version), done, done.epoch, repeated=False)
        return self._version(state)

    def _repeated(self, state: LedgerState, done: VersionEntry) -> Decision:
        request = self.request
        if done.weights_digest != request.weights_digest:
            return Failed(other_commit(done, "other weights"))
        try:
            check_repeated(done, request.step, request.label, request.attachments)
        except ConflictError as error:
            return Failed(error)
        return Done(state.seq_of(done.version), done, done.epoch, repeated=True)

    def _refusal(self, state: LedgerState) -> WeightlineError | None:
        request, head = self.request, len(state) or None
        if self.epoch != state.epoch:
            return WriterFenced(
                f"epoch {self.epoch} of this writer is over: epoch {state.epoch} owns run {state.run}",
                hint="another trainer took over; stop this one, or restart it to take over again",
            )
        if request.base is not None and request.base != head:
            return ConflictError(
                f"the delta is against version {request.base}, but version {head} is the newest",
                hint="somebody else committed in between; commit again, it is then compared with the newest",
            )
        if request.parent is not None and not state.has(request.parent):
            return InvalidInput(f"parent {request.parent} was never committed", hint="take it from recover()")
        if request.label is not None and (other := state.by_label(request.label)) is not None:
            return InvalidInput(
                f"label {request.label!r} is already that of version {other.version}",
                hint="a label is used once in a run; give another, or none",
            )
        return None

    def _fence(self, state: LedgerState) -> FenceEntry:
        request = self.request
        return FenceEntry(
            write_id=f"{request.write_id}.fence", epoch=state.epoch + 1, at=request.at, writer=request.writer
        )

    def _abandon(self, state: LedgerState) -> AbandonEntry | None:
        # Looks at the newest version, whoever wrote it: so a writer that died between its version entry and
        # this one leaves nothing undone.
        newest = len(state)
        overtaken = tuple(v for v in state.overtaken(newest) if v not in state.abandoned) if newest else ()
        if not overtaken:
            return None
        request = self.request
        return AbandonEntry(
            write_id=f"{request.write_id}.abandon", epoch=state.epoch, at=request.at, versions=overtaken
        )

    def _version(self, state: LedgerState) -> VersionEntry:
        request, version = self.request, len(state) + 1
        return VersionEntry(
            write_id=request.write_id,
            epoch=state.epoch,
            at=request.at,
            version=version,
            parent=request.parent if request.parent is not None else (len(state) or None),
            base=request.base,
            step=request.step,
            label=request.label if request.label is not None else f"{version}@{request.digest[:8]}",
            stored=request.stored,
            digest=request.digest,
            folder=request.folder,
            commit_id=request.commit_id,
            nbytes=request.nbytes,
            delta_nbytes=request.delta_nbytes,
            raw_nbytes=request.raw_nbytes,
            changed=request.changed,
            elements=request.elements,
            weights_digest=request.weights_digest,
            attachments=request.attachments,
            attachment_nbytes=request.attachment_nbytes,
            metadata=request.metadata,
        )


def commit(state: LedgerState, request: CommitRequest) -> Machine:
    """The machine that makes a staged version visible.

    Takes a new epoch first when `request.epoch` is None. Fails with `WriterFenced` (a newer epoch began),
    `ConflictError` (the base is not the head; the commit_id names other weights), `InvalidInput` (label or
    parent).
    """
    return Machine(state, _Commit(request))


# Entries that any process may write -------------------------------------------------------------------------


def retire(
    state: LedgerState, versions: tuple[int, ...], *, write_id: str, at: float, reason: str
) -> Machine:
    """The machine that announces the deletion of the blobs of `versions`, but for those already retired and
    for what the newest rests on (it may be so only since the caller decided).
    """

    announced: list[RetireEntry] = []

    def decide(state: LedgerState) -> Decision:
        needed = chain(state, len(state)) if len(state) else []
        left = tuple(v for v in versions if v not in state.retired and v not in needed)
        entry = RetireEntry(write_id=write_id, epoch=state.epoch, at=at, versions=left, reason=reason)
        if left:
            announced[:] = [entry]
            return entry
        return Done(state.seq, announced[0] if announced else entry, state.epoch, repeated=not announced)

    return Machine(state, decide)


def thin(
    state: LedgerState,
    versions: tuple[int, ...],
    *,
    form: Literal["anchor", "attachments"],
    write_id: str,
    at: float,
    reason: str,
) -> Machine:
    """The machine that announces the deletion of the anchors, or attachments, of versions that stay.

    Left out: what is retired meanwhile, and anchors without a base to rebuild their version from.
    """
    announced: list[ThinEntry] = []

    def decide(state: LedgerState) -> Decision:
        done = state.thinned if form == "anchor" else state.detached
        left = tuple(v for v in versions if v not in done and v not in state.retired)
        if form == "anchor":
            bases = {v: state.version(v).base for v in left}
            left = tuple(v for v, base in bases.items() if base is not None and base not in state.retired)
        entry = ThinEntry(
            write_id=write_id, epoch=state.epoch, at=at, versions=left, form=form, reason=reason
        )
        if left:
            announced[:] = [entry]
            return entry
        return Done(state.seq, announced[0] if announced else entry, state.epoch, repeated=not announced)

    return Machine(state, decide)


def yank(state: LedgerState, version: int, *, write_id: str, at: float, reason: str) -> Machine:
    """The machine that tells engines not to serve `version`. Raises `VersionNotFound`."""
    state.version(version)

    def decide(state: LedgerState) -> Decision:
        entry = YankEntry(write_id=write_id, epoch=state.epoch, at=at, version=version, reason=reason)
        return entry if version not in state.yanked else Done(state.seq, entry, state.epoch, repeated=False)

    return Machine(state, decide)
