"""tests/faults/test_faults_crash.py on places that are not folders: a process that dies after any write of a
commit, a commit by several ranks, a rewind, retention, a repair, pins and leases leaves the old or the new.

In memory and on a mirror a crash falls before every verb that writes (on a mirror: in each half); on S3 after
every request that writes, whose answer is lost.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import obstore
import pytest
from store_contract import load

from s3_world import FaultProxy
from weightline.errors import WeightlineError
from weightline.store import Store, mirror_repair
from weightline.store.mirror import MirrorPlace
from weightline.store.object import ObjectPlace
from weightline.store.place import Place
from weightline.store.place_memory import MemoryPlace

FAULTS = Path(__file__).parents[1] / "faults"
sys.path.insert(0, str(FAULTS))
crash = load("test_faults_crash", FAULTS)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
WRITES = ("put_if_absent", "put", "delete", "delete_folder", "upload")
OF_FOLDERS = ("catalogue", "damaged_head")
"""Act on files of the store's own folder."""
ACTS = {name: act for name, (act, _) in crash.ACTS.items() if name not in OF_FOLDERS}


IN_CI = ("commit",)


class Crash(BaseException):
    """The process is gone."""


class Life:
    """Lets so many writes through; then the process is dead, whatever it still tries."""

    def __init__(self, writes: int) -> None:
        self._left = writes
        self.over = False

    def through(self, verb: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            if self._left == 0:
                self.over = True
                raise Crash
            self._left -= 1
            return verb(*arguments, **options)

        return wrapped


class World:
    """Places of one kind that hold the same store, each made anew from what was prepared."""

    def __init__(self, kind: str, tmp_path: Path, make: Callable[..., Any], s3: FaultProxy | None) -> None:
        self._kind = kind
        self._path = tmp_path
        self._make = make
        self._s3 = s3
        self.base = self._empty("base")
        self._prepared: Any = None

    def clone(self, name: str) -> Place:
        place = self._empty(name)
        match place, self.base:
            case MemoryPlace(), MemoryPlace():
                place._objects.update(self.base._objects)
            case ObjectPlace(), ObjectPlace():
                for item in self.base.list(""):
                    obstore.put(place._store, item.key, self.base.read(item.key))
            case MirrorPlace(), MirrorPlace():
                for old, new in zip(self.base.halves, place.halves, strict=True):
                    shutil.rmtree(new.root)
                    shutil.copytree(old.root, new.root)
                place = self._empty(name)
        return place

    def again(self, place: Place, name: str) -> Place:
        """The same place, as another process opens it."""
        return place if isinstance(place, MemoryPlace) else self._empty(name)

    def dies_after(self, place: Place, writes: int, patch: pytest.MonkeyPatch) -> Callable[[], bool]:
        """Begin to count; the answer tells whether the process has died."""
        if (s3 := self._s3) is not None:
            s3.calm()
            s3.dies_after = writes + 1
            return lambda: s3.dies_after == 0
        life = Life(writes)
        for part in place.halves if isinstance(place, MirrorPlace) else (place,):
            for verb in WRITES:
                patch.setattr(part, verb, life.through(getattr(part, verb)))
        patch.setattr(mirror_repair, "_copy", life.through(mirror_repair._copy))
        return lambda: life.over

    def _empty(self, name: str) -> Any:
        match self._kind:
            case "memory":
                return MemoryPlace(name, self._path / "files" / name)
            case "mirror":
                halves = self._path / name / "a", self._path / name / "b"
                return MirrorPlace(halves, create=True)
            case _:
                return self._make(f"{self._path.name}-{name}", name, retries=0)


@pytest.fixture
def world(kind: str, s3: FaultProxy, object_place: Callable[..., Any], tmp_path: Path) -> World:
    return World(kind, tmp_path, object_place, s3 if kind == "s3" else None)


def damage(store: Store) -> None:
    """Before a repair: an anchor that has a delta beside it, the entry of version 2, the hint."""
    key = f"{store.record(3).folder}/model.safetensors"
    store.place.put(key, store.place.read(key)[:-1] + b"?")
    store.place.delete(store.log.key(3))
    store.place.put("head.json", b"")


CASES = [
    # On S3 each takes as long as all in memory: the rest of them is for `make soak`.
    pytest.param(kind, name, marks=[pytest.mark.soak] if kind == "s3" and name not in IN_CI else [])
    for kind in ("memory", "mirror", "s3")
    for name in ACTS
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_process_that_dies_after_any_write_leaves_old_or_new(
    world: World, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: FaultProxy
) -> None:
    places: dict[Path, Place] = {tmp_path / "hosts" / "base": world.base}
    real = Store.open

    def open_(root: Path, **options: Any) -> Store:
        options["create"] = True
        return real(root, place=places[root], **options)

    monkeypatch.setattr(Store, "open", staticmethod(open_))
    expected = crash.Expected()
    crash._prepare(tmp_path / "hosts" / "base", expected)
    if name == "repair":
        damage(Store.open(tmp_path / "hosts" / "base"))
    number, crashed = -1, True
    while crashed:
        number += 1
        root = tmp_path / "hosts" / f"at-{number}"
        places[root] = world.clone(f"at-{number}")
        Store.open(root).adopt_copy()
        store = Store.open(root, clock=crash._clock)
        with monkeypatch.context() as patch:
            dead = world.dies_after(store.place, number, patch)
            with suppress(Crash, WeightlineError):
                ACTS[name](store)
            crashed = dead()
        store.close()
        s3.calm()
        after = tmp_path / "hosts" / f"after-{number}"
        places[after] = world.again(places[root], f"at-{number}")
        mirrored = isinstance(places[after], MirrorPlace)
        _readable(after, expected)
        crash._check(after, expected, repaired=name != "repair" and not mirrored, lost=False)
    assert number >= (6 if name in ("commit", "ranks") else 3), (
        "there are fewer writes to die after than there should be"
    )


def _readable(root: Path, expected: Any) -> None:
    """Before anything is repaired: the newest version is the old or the new one, and whole."""
    store = Store.open(root)
    if store.damage is None:
        newest = store.latest() or 0
        assert newest in (5, 6)
        assert crash.same(store.load(newest), crash.weights(newest))
    store.close()
