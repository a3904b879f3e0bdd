"""What a log adds up to, as records for callers."""

from __future__ import annotations

from collections.abc import Iterator

from weightline.core.ledger import LedgerState, VersionEntry
from weightline.types import Ack, VersionRecord


def recoverable(state: LedgerState) -> int | None:
    """The version that `Store.recover` gives while its bytes are whole."""
    return next(recoverables(state), None)


def recoverables(state: LedgerState) -> Iterator[int]:
    """The versions with attachments on the line of the newest, newest first."""
    if not len(state):
        return
    for version in state.ancestors(len(state)):
        entry = state.version(version)
        gone = version in state.retired or version in state.detached
        if entry.attachments and not gone and version not in state.yanked:
            yield version


def record_of(state: LedgerState, entry: VersionEntry, acks: tuple[Ack, ...]) -> VersionRecord:
    """What the log and the acknowledgements tell of one version."""
    return VersionRecord(
        version=entry.version,
        seq=state.seq_of(entry.version),
        parent=entry.parent,
        base=entry.base,
        epoch=entry.epoch,
        step=entry.step,
        label=entry.label,
        kind=entry.stored,
        nbytes=entry.nbytes,
        raw_nbytes=entry.raw_nbytes,
        changed=entry.changed,
        elements=entry.elements,
        digest=entry.digest,
        folder=entry.folder,
        committed_at=entry.at,
        commit_id=entry.commit_id,
        metadata=entry.metadata,
        attachments=entry.attachments,
        yanked=entry.version in state.yanked,
        abandoned=entry.version in state.abandoned,
        retired=entry.version in state.retired,
        acks=acks,
    )
