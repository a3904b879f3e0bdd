"""What every place promises: one suite over all of them."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from pathlib import Path

import pytest

from weightline.errors import IntegrityError, InvalidInput
from weightline.store.place import Listed, Missing, Place

BAD_KEYS = ("", "/a", "a/", "a//b", "../a", "a/../b", "./a", "a\\b", "a\0b")


def keys(place: Place, prefix: str = "", after: str = "") -> list[str]:
    return [item.key for item in place.list(prefix, after=after)]


def folder_of(path: Path, **files: bytes) -> Path:
    for name, data in files.items():
        file = path / name.replace("__", "/").replace("_json", ".json")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return path


def test_the_first_to_create_an_object_wins_and_it_keeps_its_bytes(place: Place) -> None:
    assert place.put_if_absent("log/1.json", b"mine") == "created"
    assert place.put_if_absent("log/1.json", b"yours") == "exists"
    assert place.put_if_absent("log/1.json", b"mine") == "exists"
    assert place.read("log/1.json") == b"mine"


def test_of_threads_that_create_the_same_objects_each_object_has_one_winner(place: Place) -> None:
    names = [f"log/{number}" for number in range(20)]
    won: list[tuple[str, str]] = []
    begin = threading.Barrier(8)

    def run(who: str) -> None:
        begin.wait()
        won.extend((name, who) for name in names if place.put_if_absent(name, who.encode()) == "created")

    threads = [threading.Thread(target=run, args=(str(number),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(name for name, _ in won) == Counter(names)
    assert all(place.read(name).decode() == who for name, who in won)


def test_put_replaces_and_creates(place: Place) -> None:
    place.put("head.json", b"1")
    place.put("head.json", b"22")
    assert place.read("head.json") == b"22"
    assert place.size("head.json") == 2
    assert place.put_if_absent("head.json", b"3") == "exists"


def test_what_is_not_there_is_missing(place: Place) -> None:
    with pytest.raises(Missing, match=r"log/7\.json"):
        place.read("log/7.json")
    with pytest.raises(Missing):
        place.file("log/7.json", nbytes=1, sha256="0" * 64)
    assert place.size("log/7.json") is None
    assert keys(place, "log") == []


def test_an_empty_object_is_there(place: Place) -> None:
    assert place.put_if_absent("pins/1", b"") == "created"
    assert (place.read("pins/1"), place.size("pins/1")) == (b"", 0)


def test_a_listing_is_of_a_folder_and_in_the_order_of_its_keys(place: Place) -> None:
    for key in ("a/b", "a-b", "a/c/d", "a.b", "a/b0", "ab/c", "a/a"):
        place.put(key, key.encode())
    assert keys(place, "a") == ["a/a", "a/b", "a/b0", "a/c/d"]
    assert keys(place) == sorted(["a/b", "a-b", "a/c/d", "a.b", "a/b0", "ab/c", "a/a"])
    assert keys(place, "a", after="a/b") == ["a/b0", "a/c/d"]
    assert list(place.list("ab")) == [Listed("ab/c", 4)]
    assert keys(place, "a/b") == []


def test_names_with_a_dot_before_them_are_not_listed(place: Place) -> None:
    place.put("log/.draft", b"x")
    place.put("log/1", b"x")
    assert keys(place, "log") == ["log/1"]


def test_delete_may_be_repeated_and_makes_room_for_another(place: Place) -> None:
    place.put("leases/x.json", b"1")
    place.delete("leases/x.json")
    place.delete("leases/x.json")
    assert place.size("leases/x.json") is None
    assert place.put_if_absent("leases/x.json", b"2") == "created"


def test_a_folder_goes_as_a_whole_and_its_neighbour_stays(place: Place) -> None:
    for key in ("versions/a/manifest.json", "versions/a/attachments/opt", "versions/ab/manifest.json"):
        place.put(key, b"x")
    place.delete_folder("versions/a")
    place.delete_folder("versions/a")
    assert keys(place) == ["versions/ab/manifest.json"]


def test_an_uploaded_folder_can_be_mapped(place: Place, tmp_path: Path) -> None:
    big = bytes(range(256)) * 4096
    folder = folder_of(
        tmp_path / "staged", delta=big, manifest_json=b"{}", attachments__opt=b"adam", empty=b""
    )
    (folder / ".draft-1").write_bytes(b"left over")
    place.upload("versions/u1", folder)
    place.upload("versions/u1", folder)
    assert {item.key: item.nbytes for item in place.list("versions")} == {
        "versions/u1/attachments/opt": 4,
        "versions/u1/delta": len(big),
        "versions/u1/empty": 0,
        "versions/u1/manifest.json": 2,
    }
    path = place.file("versions/u1/delta", nbytes=len(big), sha256=hashlib.sha256(big).hexdigest())
    assert path.read_bytes() == big
    empty = place.file("versions/u1/empty", nbytes=0, sha256=hashlib.sha256(b"").hexdigest())
    assert empty.read_bytes() == b""


def test_a_file_of_another_size_is_refused(place: Place) -> None:
    place.put("versions/u/delta", b"short")
    with pytest.raises(IntegrityError, match="versions/u/delta"):
        place.file("versions/u/delta", nbytes=9, sha256=hashlib.sha256(b"short").hexdigest())


def test_a_mapped_file_outlives_the_object(place: Place) -> None:
    place.put("versions/u/delta", b"bytes")
    path = place.file("versions/u/delta", nbytes=5, sha256=hashlib.sha256(b"bytes").hexdigest())
    with path.open("rb") as file:
        place.delete_folder("versions/u")
        assert file.read() == b"bytes"


@pytest.mark.parametrize("key", BAD_KEYS)
def test_a_key_that_cannot_be_is_refused(place: Place, key: str) -> None:
    for act in (place.read, place.size, place.delete):
        with pytest.raises(InvalidInput, match="key"):
            act(key)
    with pytest.raises(InvalidInput):
        place.put(key, b"")
    with pytest.raises(InvalidInput):
        place.put_if_absent(key, b"")


def test_the_probe_passes_and_leaves_nothing(place: Place) -> None:
    place.probe()
    assert keys(place) == []
    assert not list(place.list("log"))
