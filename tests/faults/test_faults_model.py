"""Random verbs on a real store, held against a model in memory that is nothing but a list."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

sys.path.insert(0, str(Path(__file__).parent))
from test_faults_crash import same, weights

from weightline.core.plan import chain
from weightline.errors import ConflictError, VersionGone, WriterFenced
from weightline.store import Store, Writer

pytestmark = pytest.mark.faults


class Machine(RuleBasedStateMachine):
    """The model: what each version holds, its parent, and which have attachments."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.now = 1_000_000.0
        self.store = self._open(create=True)
        self.writers: list[Writer] = []
        self.content: list[int] = []
        self.parents: list[int | None] = []
        self.attached: set[int] = set()
        self.yanked: set[int] = set()
        self.pinned: set[int] = set()
        self.leased: set[int] = set()
        self.owner: Writer | None = None
        self.told: int | None = None
        """Where the owner was told to go on from; other writers of the handle do not change that."""
        self.last: dict[str, int] = {}

    def _open(self, *, create: bool = False) -> Store:
        return Store.open(self.folder / "s", create=create, clock=lambda: self.now)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)

    @property
    def head(self) -> int:
        return len(self.content)

    def _noted(self, k: int, parent: int | None, attach: bool) -> None:
        self.content.append(k)
        self.parents.append(parent)
        if attach:
            self.attached.add(self.head)

    @rule(k=st.integers(1, 1000), anchor=st.booleans(), attach=st.booleans())
    def commit(self, k: int, anchor: bool, attach: bool) -> None:
        if self.owner is None:
            self.owner = self.store.writer()
            self.writers.append(self.owner)
        extra: dict[str, Any] = {"attachments": {"opt": b"%d" % k}} if attach else {}
        ident = f"c{self.head + 1}"
        parent = self.told or self.store.resumed or self.head or None
        record = self.owner.commit(weights(k), anchor=anchor, commit_id=ident, step=k, **extra)
        assert (record.version, record.parent) == (self.head + 1, parent)
        self.last, self.told = {ident: record.version}, None
        self._noted(k, parent, attach)

    @precondition(lambda self: self.last and self.owner is not None)
    @rule()
    def repeat_the_last_commit(self) -> None:
        ((ident, version),) = self.last.items()
        if version in self.store.state.retired:
            return
        writer = self.store.writer()
        assert writer.commit(weights(self.content[version - 1]), commit_id=ident).version == version

    @precondition(lambda self: self.head)
    @rule(k=st.integers(1, 1000))
    def take_over(self, k: int) -> None:
        self.store.resumed = self.told = None
        old, self.owner = self.owner, self._open().writer()
        self.owner.commit(weights(k), commit_id=f"c{self.head + 1}", step=k)
        self._noted(k, self.head or None, False)
        if old is not None and old.epoch is not None:
            with pytest.raises((WriterFenced, ConflictError)):
                old.commit(weights(1), step=1)

    @precondition(lambda self: self.attached - self.yanked)
    @rule()
    def recover(self) -> None:
        found = self.store.recover()
        at: int | None = self.head
        while at is not None and (at not in self.attached - self.yanked or self._detached(at)):
            at = self.parents[at - 1]
        assert found.version == at
        assert same(found.weights(), weights(self.content[found.version - 1]))
        assert found.attachments["opt"].read_bytes() == b"%d" % self.content[found.version - 1]
        if self.owner is not None:
            self.owner.resume_from(found.version)
            self.told = found.version

    def _detached(self, version: int) -> bool:
        return version in self.store.state.detached or version in self.store.state.retired

    @precondition(lambda self: self.head)
    @rule(data=st.data())
    def yank(self, data: Any) -> None:
        version = data.draw(st.integers(1, self.head))
        self.store.yank(version, "bad")
        self.yanked.add(version)

    @precondition(lambda self: self.head)
    @rule(data=st.data())
    def keep(self, data: Any) -> None:
        version = data.draw(st.integers(1, self.head))
        gone = version in self.store.state.retired
        try:
            if data.draw(st.booleans()):
                self.store.pin(version)
                self.pinned.add(version)
            else:
                self.store.lease([version], "engine", ttl=100)
                self.leased.add(version)
        except VersionGone:
            assert gone
        else:
            assert not gone

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: Any) -> None:
        version = data.draw(st.sampled_from(sorted(self.pinned)))
        self.store.unpin(version)
        self.pinned.discard(version)

    @precondition(lambda self: self.head > 1)
    @rule(data=st.data())
    def retire(self, data: Any) -> None:
        """By hand, and never what the newest rests on."""
        version = data.draw(st.integers(1, self.head - 1))
        needed = chain(self.store.state, self.head)
        free = version not in self.pinned | self.leased and not self._carries(version)
        if free:
            self.store.retire([version], "by hand")
            assert (version in self.store.state.retired) == (version not in needed)

    def _carries(self, version: int) -> bool:
        """Does something that must stay rest on it?"""
        kept = (self.pinned | self.leased) - set(self.store.state.retired)
        return any(version in chain(self.store.state, other) for other in kept)

    @rule()
    def sweep(self) -> None:
        assert self.store.sweep() == []

    @precondition(lambda self: self.head)
    @rule()
    def verify(self) -> None:
        bad = [p for p in self.store.verify().problems if p.kind != "chain"]
        assert bad == []

    @rule()
    def time_passes(self) -> None:
        self.now += 101
        self.leased.clear()

    @rule()
    def the_clock_jumps_back(self) -> None:
        self.now -= 1000

    @rule(anchors=st.integers(1, 3))
    def collect(self, anchors: int) -> None:
        before = set(self.store.state.retired)
        report = self.store.collect(max_versions=anchors, grace=0, hold_after_rebuild=0)
        kept = (self.pinned | self.leased | ({self.head} if self.head else set())) - before
        assert not kept & set(report.retired)
        assert report.failed == ()

    @rule(everything=st.booleans())
    def reopen(self, everything: bool) -> None:
        self.store.close()
        if everything:
            for name in ("catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm", "head.json"):
                (self.folder / "s" / name).unlink(missing_ok=True)
        self.store, self.owner, self.told = self._open(), None, None

    @invariant()
    def every_version_is_what_was_committed_or_says_that_it_is_gone(self) -> None:
        if not hasattr(self, "store"):
            return
        state = self.store.read_log()
        assert len(state) == self.head
        assert [e.step for e in state.versions()] == self.content
        assert set(state.yanked) == self.yanked
        line = set(state.ancestors(self.head)) if self.head else set()
        assert set(state.abandoned) == set(range(1, self.head + 1)) - line
        assert [state.parent(v) for v in range(1, self.head + 1)] == self.parents
        for version in range(max(1, self.head - 4), self.head + 1):
            if version in state.retired or any(v in state.retired for v in chain(state, version)):
                with pytest.raises(VersionGone):
                    self.store.load(version)
            else:
                assert same(self.store.load(version), weights(self.content[version - 1]))


Machine.TestCase.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)


class TestModel(Machine.TestCase):  # type: ignore[name-defined,misc]
    """Random verbs."""
