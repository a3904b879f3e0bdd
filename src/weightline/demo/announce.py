"""What the trainer tells: events on stdout, versions as soon as they are visible, and how stale its rollouts
were."""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from weightline.core import staleness

if TYPE_CHECKING:
    from weightline.demo.rollouts import Sample
    from weightline.service.line import Line
    from weightline.trainer import Committer

_printing = threading.Lock()


def emit(event: str, **fields: Any) -> None:
    """One event as one line of JSON on stdout."""
    text = json.dumps({"event": event, **fields}, separators=(",", ":"))
    with _printing:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


class Announcer:
    """Waits for commits in a thread of its own and emits a `version` event for each; knows labels and lineage
    of the run."""

    def __init__(self, line: Line, committer: Committer) -> None:
        self._line = line
        self._committer = committer
        self._lock = threading.Lock()
        self._labels: dict[str, int] = {}
        self._lineage: dict[int, int | None] = {}
        self._current: int | None = None
        self._newest = 0
        self._queue: queue.SimpleQueue[tuple[int, Future[int]] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._announce, name="announce", daemon=True)
        self._thread.start()

    def begin(self, version: int, *, newest: int | None = None) -> None:
        """Training goes on from `version`; the next commit follows `newest` (default: `version`)."""
        self._refresh()
        with self._lock:
            self._current, self._newest = version, newest or version

    def announce(self, step: int, future: Future[int]) -> None:
        """Emit a `version` event when `future` is done. Its number is known beforehand: this is the run's
        only writer."""
        with self._lock:
            self._newest += 1
            self._lineage[self._newest], self._current = self._current, self._newest
        self._queue.put((step, future))

    def close(self) -> None:
        """Wait until everything is announced. Raises what kept an event from being made (errors of commits
        are the committer's)."""
        self._queue.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def knows(self, label: str) -> bool:
        """Whether `label` is a version of this run."""
        return self._version_of(label) is not None

    def staleness(self, samples: Sequence[Sample]) -> float:
        """Mean distance along the lineage, over all tokens, from the weights that sampled a token to the
        current ones."""
        total = count = 0
        for sample in samples:
            for span in sample.weight_versions:
                version = self._version_of(span.version)
                if version is None or self._current is None:
                    continue  # no version of this run carries the label: nothing can be said of these
                with self._lock:
                    steps = staleness.distance(self._lineage, version, self._current)
                total += steps * (span.end - span.start)
                count += span.end - span.start
        return total / count if count else 0.0

    def _version_of(self, label: str) -> int | None:
        if label not in self._labels:
            self._refresh()
        return self._labels.get(label)

    def _refresh(self) -> None:
        records = self._line.versions()
        with self._lock:
            for record in records:
                self._labels[record.label] = record.version
                self._lineage[record.version] = record.parent

    def _announce(self) -> None:
        while (item := self._queue.get()) is not None:
            step, future = item
            if future.exception() is not None:
                continue  # the committer raises it in the training loop
            try:
                self._tell(step, future.result())
            except Exception as error:  # noqa: BLE001 - raised by `close`
                self._error = self._error or error

    def _tell(self, step: int, version: int) -> None:
        record = self._line.record(version)
        with self._lock:
            self._labels[record.label] = version
        timing = next(t for t in reversed(self._committer.timings) if t.version == version)
        emit(
            "version",
            step=step,
            version=version,
            label=record.label,
            changed_fraction=record.changed / record.elements if record.elements else 0.0,
            nbytes=record.nbytes,
            raw_nbytes=record.raw_nbytes,
            blocked_ms=timing.blocked_s * 1e3,
            commit_ms=timing.commit_s * 1e3,
        )
