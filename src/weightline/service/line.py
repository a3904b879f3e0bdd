"""The one interface over every door to a store: embedded, `file:`, a server on a Unix socket.

`CheckpointEngine` (embedded), the server's client and the serverless reader all implement `Line`; code that
takes a `Line` works with any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from weightline.types import VersionRecord

if TYPE_CHECKING:
    from weightline.codec import Delta
    from weightline.store import Manifest, Recovered

Weights = Mapping[str, Any]
"""Name -> `numpy.ndarray` or `torch.Tensor`, under Hugging Face names."""


class Line(Protocol):
    """The verbs of a weight line. Every method is safe to call from any thread."""

    @property
    def run(self) -> str:
        """Id of the run that the store belongs to."""
        ...

    @property
    def root(self) -> Path:
        """The store's folder on this host; blobs are mapped from it, never copied through a socket."""
        ...

    @property
    def address(self) -> str:
        """Folder or URL of the store itself, whichever door this is."""
        ...

    def commit(
        self,
        weights: Weights | str | Path | Delta,
        *,
        step: int | None = None,
        partial: bool = False,
        anchor: bool = False,
        attachments: Mapping[str, Path | str | bytes] | None = None,
        label: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        model_files: str | Path | None = None,
        commit_id: str | None = None,
        check_finite: bool = False,
    ) -> int:
        """Make `weights` durable and visible as the next version, and return its number.

        Raises `InvalidInput` (unknown, missing or reshaped tensor without `anchor=True`; a label that is not
        new in the run), `WriterFenced`, `StorageFull`, `Unavailable`. After any error the newest version is
        what it was.
        """
        ...

    def commit_async(self, weights: Weights, **options: Any) -> Future[int]:
        """`commit` in the background: the caller waits for the snapshot (one copy of the weights) only."""
        ...

    def wait_for_update(self, timeout: float | None = None, after: int | None = None) -> int | None:
        """Newest version > `after` (default: what this handle last returned); None when `timeout` seconds
        passed.
        """
        ...

    def fetch_delta(self, version: int, have: int | None = None) -> Delta:
        """What turns the bytes of `have` (default: the version's base) into those of `version`."""
        ...

    def ack(
        self,
        version: int,
        subscriber: str,
        *,
        verified: Literal["live", "loader_input", "none"] = "none",
        pause_ms: float | None = None,
        detail: str = "",
        trace: Mapping[str, float] | None = None,
    ) -> None:
        """Say that `subscriber`'s engine serves `version`.

        `trace`: when it took the steps there ("notified", "fetched", "verified", "applied" -> seconds since
        the Unix epoch); what this handle saw itself need not be said.
        """
        ...

    def latest(self) -> int | None:
        """Newest version, or None in an empty store. Yanked and abandoned versions count: a number is never
        free again.
        """
        ...

    def record(self, version: int) -> VersionRecord:
        """One version. Raises `VersionNotFound`."""
        ...

    def versions(self) -> list[VersionRecord]:
        """All versions, oldest first, retired ones included."""
        ...

    def manifest(self, version: int) -> Manifest:
        """Tensors of the version with their digests, inherited ones included."""
        ...

    def load(
        self, version: int, *, like: Literal["numpy", "torch"] = "numpy", held: bool = False
    ) -> dict[str, Any]:
        """Name -> array, bit-exact and verified (bf16 and fp8 through `ml_dtypes`).

        Arrays are mapped from the store: cheap, but a file that somebody cuts short, or a disk that fails,
        then kills the process (SIGBUS); `held` reads them into memory. Raises `VersionGone`,
        `IntegrityError`.
        """
        ...

    def recover(self) -> Recovered:
        """The newest version that has attachments: `.version .step .weights() .attachments`. Raises
        `VersionNotFound` if none.
        """
        ...

    def close(self) -> None:
        """Release threads, sockets and mappings. Idempotent."""
        ...
