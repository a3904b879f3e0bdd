"""Which sequences run, in which cache row, and which wait.

Rows 0 to n-1 are in use. The first `ready` of them need one position each to sample the next token: they
decode together. Behind them are rows whose keys and values are still to be computed (a new prompt, or all
of them after a cleared cache); they are computed in row order. New requests come in one at a time, when no
such row is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from weightline.generate.requests import Request, Sequence


class RowStore(Protocol):
    """What the scheduler needs of the cache."""

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one row to another."""
        ...

    def clear_row(self, row: int) -> None:
        """Zero one row."""
        ...


class Scheduler:
    """Rows and queue. Only the engine thread touches it."""

    def __init__(self, store: RowStore, max_num_seqs: int, kv_tokens: int) -> None:
        self.store = store
        self.max_num_seqs = max_num_seqs
        self.kv_tokens = kv_tokens
        """Context positions that all running sequences may have together."""
        self.preempted = 0
        """Times a request was sent back to wait because they did not suffice."""
        self._admitted = 0
        self.queue: deque[Request] = deque()
        self.rows: list[Sequence] = []
        self.ready = 0

    @property
    def unforked(self) -> int:
        """Rows promised to further sequences of a request whose prompt is being computed."""
        return sum(len(s.request.sequences) - 1 for s in self.rows[self.ready :] if not s.output)

    @property
    def used(self) -> int:
        """Context positions of running sequences, and of those that wait for a prompt half-computed."""
        forks = sum(
            (len(s.request.sequences) - 1) * s.length for s in self.rows[self.ready :] if not s.output
        )
        return sum(s.length for s in self.rows) + forks

    @property
    def resuming(self) -> bool:
        """The first request in the queue ran before and was preempted."""
        return bool(self.queue) and self.queue[0].admitted > 0

    @property
    def requests(self) -> list[Request]:
        """Every live request: running ones in row order, then waiting ones in order of arrival."""
        running = dict.fromkeys(s.request for s in self.rows)
        return [*running, *self.queue]

    def find(self, wanted: Callable[[Request], bool]) -> list[Request]:
        """Live requests for which `wanted` holds."""
        return [r for r in self.requests if wanted(r)]

    def admit(self) -> list[Sequence]:
        """Move the first waiting request into rows when there is room for all its sequences, and return those
        that now have one. First come, first served.
        """
        if not self.queue:
            return []
        request = self.queue[0]
        live = request.live
        room = len(self.rows) + self.unforked + len(live) <= self.max_num_seqs
        if not room or self.used + sum(s.length for s in live) > self.kv_tokens:
            return []
        self.queue.popleft()
        self._admitted += 1
        request.admitted = self._admitted
        # Sequences of one prompt compute it once; those that have gone on alone have a context of their own.
        rows = list(live) if any(s.output for s in live) else [request.sequences[0]]
        self.rows += rows
        return rows

    def make_room(self) -> None:
        """Before a step: while running sequences have more positions than there are, the request that was
        admitted last goes back to the head of the queue, with what it has sampled.
        """
        while self.used > self.kv_tokens:
            running = list(dict.fromkeys(s.request for s in self.rows))
            if len(running) < 2:
                return
            request = max(running, key=lambda r: r.admitted)
            for sequence in request.live:
                self.leave(sequence)
                sequence.forget_kv()
            self.queue.appendleft(request)
            self.preempted += 1

    def computed_prompt(self, sequence: Sequence) -> list[Sequence]:
        """Row `ready` is done and can decode. Its request's other sequences get copies of the row; returns
        all that sample now.
        """
        self.ready += 1
        source = self.ready - 1
        siblings = [sequence]
        if not sequence.output:
            for sibling in sequence.request.sequences[1:]:
                if not sibling.finished:
                    self._insert_copy(source, sibling)
                    siblings.append(sibling)
        return siblings

    def _insert_copy(self, source: int, sibling: Sequence) -> None:
        origin = self.rows[source]
        self.rows.append(sibling)
        last = len(self.rows) - 1
        if last != self.ready:
            self.store.copy_row(self.ready, last, self.rows[self.ready].computed)
            self.rows[last], self.rows[self.ready] = self.rows[self.ready], sibling
        self.store.copy_row(source, self.ready, origin.computed)
        sibling.take_kv_of(origin)
        self.ready += 1

    def leave(self, sequence: Sequence) -> None:
        """Take a running sequence out of its row and close the gap."""
        gap = next((i for i, s in enumerate(self.rows) if s is sequence), None)
        if gap is None:
            return
        if sequence.poisoned:
            self.store.clear_row(gap)
        if gap < self.ready:
            gap = self._move(self.ready - 1, gap)
            self.ready -= 1
        self._move(len(self.rows) - 1, gap)
        self.rows.pop()

    def _move(self, source: int, target: int) -> int:
        if source != target:
            mover = self.rows[source]
            self.store.copy_row(source, target, mover.computed)
            if mover.poisoned:
                self.store.clear_row(source)
            self.rows[target] = mover
        return source

    def forget_kv(self) -> None:
        """All running sequences compute their keys and values anew, under the weights of the next step."""
        for sequence in self.rows:
            sequence.forget_kv()
        self.ready = 0

    def restart_partial(self) -> None:
        """A pass that was partly done starts over: the weights or the label changed, and one pass has one
        label.
        """
        for sequence in self.rows[self.ready :]:
            if sequence.computed:
                sequence.forget_kv()
