"""One call after `optimizer.step()`: the training thread waits for a snapshot, everything else happens behind
it."""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from weightline.errors import InvalidInput, StorageFull, WeightlineError
from weightline.trainer.names import named_tensors
from weightline.trainer.snapshot import CastPolicy, Snapshot

if TYPE_CHECKING:
    from weightline.service.line import Line

Attachments = Mapping[str, Path | str | bytes]
_FIRST_RETRY, _LAST_RETRY = 0.1, 5.0


class CommitTiming(Struct, frozen=True, kw_only=True):
    """What one commit cost, in seconds."""

    step: int
    version: int
    blocked_s: float
    """How long the training thread stood still for it: `waited_s` + `snapshot_s`."""
    waited_s: float
    """Of that, waiting for an earlier commit to give its buffers back."""
    snapshot_s: float
    """Of that, casting the weights into the buffers."""
    commit_s: float
    """From the end of the snapshot until the version was durable and visible, in the background."""
    attempts: int
    """How often the commit was sent: more than once when the server or store was away."""


class Committer:
    """Commits versions of one model for one training process.

    Each `after_step` casts the live weights (fp32 masters, say) into pre-allocated buffers in the stored
    dtypes, one pass, rounding to nearest even. That is all the training thread waits for; what it writes
    afterwards reaches no version. Diffing, writing and publishing run in one background thread through
    `Line.commit`, in order. There are `max_in_flight` sets of buffers (each the size of the stored weights):
    with all of them in use, `after_step` waits.

    An error of the background surfaces at the next `after_step`, `flush` or `close`, once, and in the future
    of its step. While a server or store is away (a retryable error) the commit is repeated under the same
    `commit_id` for `retry_for` seconds, so it is never published twice. A full disk is not waited for.

    Not thread-safe: one training loop owns it.
    """

    def __init__(
        self,
        line: Line,
        source: Any,
        *,
        dtype: str | None = "BF16",
        dtype_exceptions: Mapping[str, str] | None = None,
        every: int = 1,
        attachments_every: int = 1,
        model_files: str | Path | None = None,
        max_in_flight: int = 1,
        check_finite: bool = False,
        retry_for: float = 300.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`source`: a `torch.nn.Module`, wrapped or not, a mapping of names to tensors, or a callable that
        returns one.

        `dtype` and `dtype_exceptions` are those of `CastPolicy`. `every`: commit at every n-th call of
        `after_step`. `attachments_every`: attachments ride on every n-th commit that offers some, beginning
        with the first. `model_files`: a folder with config and tokenizer, offered with every anchor. Raises
        `InvalidInput`.
        """
        if every < 1 or max_in_flight < 1 or attachments_every < 1:
            raise InvalidInput(
                f"Committer: every={every}, max_in_flight={max_in_flight}, "
                f"attachments_every={attachments_every}",
                hint="each must be at least 1",
            )
        self._line = line
        self._source = source
        self._every = every
        self._attachments_every = attachments_every
        self._offered = 0
        self._model_files = model_files
        self._check_finite = check_finite
        self._retry_for = retry_for
        self._clock = clock
        policy, tensors = CastPolicy(dtype, dtype_exceptions), self._tensors()
        self._free: deque[Snapshot] = deque(Snapshot(tensors, policy) for _ in range(max_in_flight))
        self._in_flight: deque[tuple[Future[int], Snapshot]] = deque()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weightline-commit")
        self._stopping = threading.Event()
        self._closed = False
        self._calls = 0
        self._timings: deque[CommitTiming] = deque(maxlen=1000)
        self._error: BaseException | None = None
        self.blocked_s = 0.0
        """How long the last `after_step` that committed held up the training thread, in seconds."""
        self.stored_nbytes = self._free[0].nbytes
        """Bytes of one snapshot: what a full version holds."""

    @property
    def timings(self) -> tuple[CommitTiming, ...]:
        """The newest commits that were published, oldest first (at most 1000)."""
        return tuple(self._timings)

    def after_step(
        self,
        step: int,
        *,
        attachments: Attachments | Callable[[], Attachments] | None = None,
        metadata: Mapping[str, Any] | None = None,
        anchor: bool = False,
        label: str | None = None,
        force: bool = False,
    ) -> Future[int] | None:
        """Commit the weights as they are now, and return the future version number; None when it is not this
        step's turn.

        `attachments` ride in the same atomic step (optimizer state, say; see `trainer.state`); files must
        stay until the future is done. A callable that gives them is asked only when it is their turn
        (`attachments_every`). `force`, `anchor` and attachments whose turn it is commit whatever the turn of
        the weights. Raises
        the error of an earlier commit, or `InvalidInput` for weights that cannot be stored; then nothing of
        this step was committed.
        """
        self._check_open()
        self._raise_pending()
        self._calls += 1
        carried = self._due(attachments)
        if self._calls % self._every and not (force or anchor or carried):
            return None
        began = self._clock()
        snapshot = self._buffers()
        waited = self._clock()
        try:
            weights = snapshot.take(self._tensors())
        except BaseException:
            self._free.append(snapshot)
            raise
        taken = self._clock()
        self.blocked_s = taken - began
        options: dict[str, Any] = {
            "step": step,
            "anchor": anchor,
            "attachments": carried,
            "label": label,
            "metadata": metadata,
            "model_files": self._model_files,
            "check_finite": self._check_finite,
            "commit_id": uuid.uuid4().hex,
        }
        spent = (began, waited, taken)
        future = self._worker.submit(self._commit, weights, options, spent)
        self._in_flight.append((future, snapshot))
        return future

    def _due(self, offered: Attachments | Callable[[], Attachments] | None) -> Attachments | None:
        """The attachments, if it is their turn."""
        if not offered:
            return None
        self._offered += 1
        if (self._offered - 1) % self._attachments_every:
            return None
        return offered() if callable(offered) else offered

    def flush(self) -> int | None:
        """Wait until everything is published; the newest version of this committer, or None. Raises a pending
        error."""
        while self._in_flight:
            self._collect()
        self._raise_pending()
        return self._timings[-1].version if self._timings else None

    def close(self) -> None:
        """`flush`, then end the background thread. Idempotent; leaves the line open, which belongs to the
        caller."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._closed = True
            self._worker.shutdown(wait=True)
            self._free.clear()

    def abort(self) -> None:
        """End without waiting for a server that is away: a commit that is being repeated gives up after this
        attempt."""
        self._stopping.set()
        self._closed = True
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._in_flight.clear()
        self._free.clear()

    def __enter__(self) -> Committer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _tensors(self) -> dict[str, Any]:
        return named_tensors(self._source() if self._is_factory() else self._source)

    def _is_factory(self) -> bool:
        return callable(self._source) and not hasattr(self._source, "state_dict")

    def _buffers(self) -> Snapshot:
        while self._in_flight and (self._in_flight[0][0].done() or not self._free):
            self._collect()
        # An error that came up while waiting: this step is not committed either, so that no error is passed
        # over.
        self._raise_pending()
        return self._free.popleft()

    def _collect(self) -> None:
        future, snapshot = self._in_flight[0]
        error = future.exception()  # waits
        self._in_flight.popleft()
        self._free.append(snapshot)
        if error is not None and self._error is None:
            self._error = error

    def _raise_pending(self) -> None:
        while self._in_flight and self._in_flight[0][0].done():
            self._collect()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInput("the committer is closed", hint="make a new one")

    def _commit(self, weights: Mapping[str, Any], options: dict[str, Any], spent: tuple[float, ...]) -> int:
        began, waited, taken = spent
        attempts, version = self._commit_until_answered(weights, options)
        self._timings.append(
            CommitTiming(
                step=options["step"],
                version=version,
                blocked_s=taken - began,
                waited_s=waited - began,
                snapshot_s=taken - waited,
                commit_s=self._clock() - taken,
                attempts=attempts,
            )
        )
        return version

    def _commit_until_answered(self, weights: Mapping[str, Any], options: dict[str, Any]) -> tuple[int, int]:
        deadline = self._clock() + self._retry_for
        pause = _FIRST_RETRY
        attempts = 0
        while True:
            attempts += 1
            try:
                return attempts, self._line.commit(weights, **options)
            except WeightlineError as error:
                if not error.retryable or isinstance(error, StorageFull):
                    raise
                if self._clock() + pause > deadline or self._stopping.wait(pause):
                    raise
                pause = min(2 * pause, _LAST_RETRY)
