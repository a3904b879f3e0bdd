"""What a writer asks for when it commits, and what makes two requests the same one."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from msgspec import Struct

from weightline.core.ledger import VersionEntry
from weightline.errors import ConflictError, InvalidInput
from weightline.types import VersionKind

RESERVED_LABEL = re.compile(r"default|\d+@[0-9a-f]{8}")
MAX_LABEL = 128


class CommitRequest(Struct, frozen=True, kw_only=True):
    """A staged version that wants to become visible. Crosses the wire to a server as it is."""

    commit_id: str
    """The caller's idempotency key."""
    write_id: str
    """Unique to this attempt."""
    writer: str
    """Who commits, for people."""
    epoch: int | None
    """The writer's epoch; None at its first commit, which takes a new one."""
    at: float
    base: int | None
    """Version whose bytes the delta is against: must be the head. None: an anchor that stands on its own."""
    parent: int | None = None
    """Version that training went on from; None: the head."""
    step: int | None = None
    label: str | None = None
    """None: "<version>@<first 8 hex of the manifest digest>"."""
    stored: VersionKind
    digest: str
    folder: str
    nbytes: int
    delta_nbytes: int
    raw_nbytes: int
    changed: int
    elements: int
    weights_digest: str
    attachments: tuple[str, ...] = ()
    attachment_nbytes: int = 0
    metadata: dict[str, Any] = {}
    began: float = 0.0
    """When the trainer asked for the commit; 0 when nobody said. For the trace only."""
    staged: float = 0.0
    """When all of it was durable."""


def check_label(label: str) -> None:
    """Raises `InvalidInput` unless `label` may be given by a user."""
    if not label or len(label) > MAX_LABEL or not label.isprintable():
        raise InvalidInput(
            f"label {label[: MAX_LABEL + 1]!r} is empty, not printable or longer than {MAX_LABEL} characters",
            hint="give a short printable string, or none",
        )
    if RESERVED_LABEL.fullmatch(label):
        raise InvalidInput(
            f"label {label!r} has a reserved form",
            hint='"default" and "<version>@<8 hex digits>" are given by Weightline; choose another',
        )


def check_repeated(
    done: VersionEntry, step: int | None, label: str | None, attachments: Collection[str]
) -> None:
    """Raises `ConflictError` unless a commit under the commit_id of `done` may be the same one once more.

    What the repeated call leaves out is taken to be what it was.
    """
    if step is not None and step != done.step:
        raise other_commit(done, f"step {done.step}, not {step}")
    if label is not None and label != done.label:
        raise other_commit(done, f"label {done.label!r}, not {label!r}")
    if attachments and set(attachments) != set(done.attachments):
        raise other_commit(done, f"attachments {', '.join(done.attachments) or 'none'}")


def other_commit(done: VersionEntry, what: str) -> ConflictError:
    """The error for a commit_id that was given to two commits; `what` the first one has."""
    return ConflictError(
        f"commit_id {done.commit_id!r} names another commit already: version {done.version} has {what}",
        hint="a commit_id names one commit: give each its own, or none",
    )
