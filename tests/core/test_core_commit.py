"""The commit machine under crashes, lost answers and rivals: what the log then holds."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from ledger_world import World, request

from weightline.core import commit as machines
from weightline.core.ledger import AbandonEntry, FenceEntry, LedgerState, VersionEntry, decode, encode
from weightline.core.request import check_label
from weightline.errors import FormatError, InvalidInput, VersionNotFound

BEFORE = ["open t", "commit t", "commit t", "commit t"]
COMMITS = ["begin t id=x", "begin t id=x parent=1", "begin t id=x base=none", "begin t id=x label=best"]


def _prepared(first: bool) -> World:
    world = World()
    for line in BEFORE[:1] if first else BEFORE:
        world.run(line)
    return world


def _versions(world: World) -> list[VersionEntry]:
    return world.state().versions()


def _check(world: World) -> None:
    """What must hold of every log, whatever happened."""
    state = world.state()
    assert sorted(world.log) == list(range(1, state.seq + 1))
    assert [entry.version for entry in state.versions()] == list(range(1, len(state) + 1))
    assert len({entry.label for entry in state.versions()}) == len(state)
    assert len({entry.commit_id for entry in state.versions()}) == len(state)
    epochs = [entry.epoch for entry in world.log.values() if isinstance(entry, VersionEntry | FenceEntry)]
    assert epochs == sorted(epochs)
    for entry in state.versions():
        assert entry.base is None or entry.base == entry.version - 1


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("begin", COMMITS)
@pytest.mark.parametrize("outcome", ["answer", "lose", "drop", "retried"])
def test_a_crash_at_every_effect_leaves_the_old_or_the_new_version(
    begin: str, outcome: str, first: bool
) -> None:
    if first and "parent" in begin:
        begin = begin.replace(" parent=1", "")
    crash_at, crashed = 0, True
    while crashed:
        world = _prepared(first)
        before = _versions(world)
        world.run(begin)
        writer = world.writers["t"]
        steps = 0
        while writer.todo and steps < crash_at:
            # Only the last step before the crash goes wrong; one that always does has its own scenario.
            world.run(f"step t {outcome if steps == crash_at - 1 else 'answer'}")
            steps += 1
        crashed = bool(writer.todo)
        world.run("crash t")
        _check(world)
        after = _versions(world)
        assert after[: len(before)] == before
        assert [entry.commit_id for entry in after[len(before) :]] in ([], ["x"])
        # Whoever comes next repeats the commit: there is exactly one version of it, and nothing is left half
        # done.
        world.run("open u")
        world.run(begin.replace("begin t", "commit u"))
        _check(world)
        assert [entry.commit_id for entry in _versions(world)[len(before) :]] == ["x"]
        world.run("open v")
        world.run("commit v")
        if "parent=1" in begin:
            assert sorted(world.state().abandoned) == [2, 3]
        _check(world)
        crash_at += 1
    assert crash_at > 1


class _Rivals:
    """Several writers over one log, stepped in any order, with any answers lost, crashing at will."""

    def __init__(self, rng: random.Random) -> None:
        self.world = World()
        self.rng = rng
        self.acknowledged: dict[str, str] = {}

    def act(self, name: str, what: str) -> None:
        world = self.world
        if name not in world.writers:
            world.run(f"open {name}")
            return
        writer = world.writers[name]
        if what == "crash":
            world.run(f"crash {name}")
        elif writer.todo:
            for line in world.run(f"step {name} {what}"):
                if line.startswith("done: version"):
                    label = line.split(" at ")[0].removeprefix("done: version ")
                    self.acknowledged[f"{name}:{len(self.acknowledged)}"] = label
        else:
            world.run(f"refresh {name}")
            parent = f" parent={self.rng.randint(1, len(writer.state))}" if len(writer.state) else ""
            base = self.rng.choice(["head", "none"])
            world.run(f"begin {name} id={name}{self.rng.random()} base={base}{parent}")


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.sampled_from(["answer", "answer", "lose", "drop", "retried", "crash"])
        ),
        max_size=60,
    ),
    st.integers(0, 1000),
)
def test_rivals_never_break_the_log_and_nothing_acknowledged_is_lost(
    acts: list[tuple[str, str]], seed: int
) -> None:
    rivals = _Rivals(random.Random(seed))
    for name, what in acts:
        rivals.act(name, what)
    _check(rivals.world)
    for version in rivals.acknowledged.values():
        assert rivals.world.state().has(int(version))


# Records and state ------------------------------------------------------------------------------------------


def _entry(version: int = 1, **fields: object) -> VersionEntry:
    machine = machines.commit(LedgerState("run"), request(**fields))  # type: ignore[arg-type]
    machine.start()
    (put,) = machine.step(machines.PutOk(1))
    assert isinstance(put, machines.PutIfAbsent)
    assert isinstance(put.entry, VersionEntry)
    return put.entry


def test_entries_survive_their_encoding() -> None:
    entry = _entry(metadata={"lr": 1e-6, "tags": ["a"]}, attachments=("opt",), step=7)
    assert decode(encode(entry)) == entry
    abandon = AbandonEntry(write_id="w", epoch=1, at=0.5, versions=(2, 3))
    assert decode(encode(abandon)) == abandon


GOLDEN = (
    b'{"kind":"fence","write_id":"w.fence","epoch":1,"at":2.5,"writer":"pid 1 on host",'
    b'"check":"c66ababaeeed71e0"}\n',
    b'{"kind":"retire","write_id":"w","epoch":1,"at":2.5,"versions":[1,2],"reason":"room",'
    b'"check":"5663ef84852e781b"}\n',
    b'{"kind":"thin","write_id":"w","epoch":1,"at":2.5,"versions":[3],"form":"anchor","reason":"room",'
    b'"check":"299672b94dc63ec5"}\n',
    b'{"kind":"yank","write_id":"w","epoch":1,"at":2.5,"version":2,"reason":"bad",'
    b'"check":"119fefdfa62eccfc"}\n',
    b'{"kind":"abandon","write_id":"w.abandon","epoch":1,"at":2.5,"versions":[3],'
    b'"check":"72d0378167950825"}\n',
    b'{"kind":"version","write_id":"w","epoch":1,"at":2.5,"version":2,"parent":1,"base":1,"step":10,'
    b'"label":"2@00000000",'
    b'"stored":"delta","digest":"00000000","folder":"versions/u","commit_id":"c","nbytes":5,"delta_nbytes":5,'
    b'"raw_nbytes":100,"changed":1,"elements":50,"weights_digest":"11","attachments":["opt"],"attachment_nbytes":7,'
    b'"metadata":{"a":1},"check":"f8926a83be334299"}\n',
)


@pytest.mark.parametrize("line", GOLDEN, ids=lambda line: line.split(b'"')[3].decode())
def test_the_bytes_of_format_1_stay_as_they_are(line: bytes) -> None:
    assert encode(decode(line)) == line


@pytest.mark.parametrize("line", GOLDEN, ids=lambda line: line.split(b'"')[3].decode())
def test_a_torn_entry_is_never_taken_for_a_whole_one(line: bytes) -> None:
    for length in range(len(line) - 1):
        with pytest.raises(FormatError, match="log/7"):
            decode(line[:length], where="log/7")


@pytest.mark.parametrize(
    "line", [b"{}", b"[]", b'{"kind":"other"}', b"\xff\xfe", GOLDEN[0][:-2] + b',"more":1}']
)
def test_what_is_no_entry_is_refused(line: bytes) -> None:
    with pytest.raises(FormatError):
        decode(line)


def _fenced() -> LedgerState:
    return LedgerState("run").apply(1, FenceEntry(write_id="f", epoch=1, at=0, writer="t"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": 2}, "version 2 after version 0"),
        ({"epoch": 2}, "epoch 2 in epoch 1"),
        ({"parent": 5}, "names version 5"),
        ({"base": 1}, "names version 1"),
        ({"stored": "delta"}, "without a base"),
    ],
)
def test_an_entry_that_no_correct_writer_could_have_written_is_refused(
    change: dict[str, object], why: str
) -> None:
    import msgspec

    with pytest.raises(FormatError, match=why):
        _fenced().apply(2, msgspec.structs.replace(_entry(), **change))


def test_a_jump_in_the_log_is_refused() -> None:
    with pytest.raises(FormatError, match="does not follow entry 1"):
        _fenced().apply(3, _entry())


def test_a_state_never_changes_under_its_holder() -> None:
    old = _fenced()
    one = old.apply(2, _entry("x"))  # type: ignore[arg-type]
    other = old.apply(2, _entry(label="other", commit_id="other"))
    assert len(old) == 0
    assert one.by_label("other") is None
    assert other.by_commit("a") is None
    assert one.versions() != other.versions()
    assert other.head is not None
    assert other.head.label == "other"
    with pytest.raises(VersionNotFound, match="the run has no version yet"):
        old.version(1)


@pytest.mark.parametrize("label", ["", "default", "7@0123abcd", "x" * 129, "a\nb"])
def test_labels_that_could_mean_two_things_are_refused(label: str) -> None:
    with pytest.raises(InvalidInput, match="label"):
        check_label(label)


@pytest.mark.parametrize("label", ["best", "7", "7@xyz", "policy-7@0123abcd"])
def test_other_labels_are_taken(label: str) -> None:
    check_label(label)


def test_an_answer_to_another_question_is_refused() -> None:
    machine = machines.commit(LedgerState("run"), request())
    machine.start()
    with pytest.raises(InvalidInput, match="answers no effect"):
        machine.step(machines.PutOk(9))
