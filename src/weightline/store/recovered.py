"""Where training can go on from: weights, step and attachments of one and the same version, all whole."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from weightline.errors import FormatError, IntegrityError, VersionNotFound
from weightline.store.reading import Reading
from weightline.store.records import recoverables
from weightline.types import VersionRecord

if TYPE_CHECKING:
    from weightline.store.store import Store

logger = logging.getLogger(__name__)

_NO_WEIGHTS_YET = "commit with attachments={...} on the steps that training should be able to go on from"


class Recovered(Struct, frozen=True, eq=False):
    """Where training can go on from."""

    record: VersionRecord
    attachments: dict[str, Path]
    _reading: Reading
    passed_over: tuple[int, ...] = ()
    """Newer versions with attachments, newest first, of which files are damaged: `verify` names them."""

    @property
    def version(self) -> int:
        return self.record.version

    @property
    def step(self) -> int | None:
        return self.record.step

    def weights(self, *, like: Literal["numpy", "torch"] = "numpy") -> dict[str, Any]:
        """The weights of that version, bit-exact and verified."""
        return self._reading.load(self.version, like=like)


def recover(store: Store) -> Recovered:
    """See `Store.recover`. A disk that does not answer is no damage: `Unavailable` is raised and nothing is
    passed over, for going back costs training steps.
    """
    damage: IntegrityError | FormatError | None = None
    passed_over: list[int] = []
    for version in recoverables(store.read_log()):
        try:
            store.reading.check_whole(version)
            attachments = store.attachments(version)
        except (IntegrityError, FormatError) as error:
            logger.warning("version %d cannot be recovered, an older one is looked for: %s", version, error)
            damage = damage or error
            passed_over.append(version)
            continue
        return Recovered(store.record(version), attachments, store.reading, tuple(passed_over))
    if damage is not None:
        raise damage
    raise VersionNotFound(f"no version of run {store.run} has attachments", hint=_NO_WEIGHTS_YET)
