"""An S3 server that is slow, refuses, hangs up, and does what was asked without saying so."""

from __future__ import annotations

import hashlib
import os
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from s3_world import CONTAINER, FaultProxy, free_port
from weightline.errors import IntegrityError, InvalidInput, Unavailable
from weightline.store.object import PART_NBYTES, ObjectPlace
from weightline.store.object_cache import BlobCache
from weightline.store.object_url import ObjectUrl, parse_object_url
from weightline.store.place import Missing

Make = Callable[..., ObjectPlace]


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_of_16_threads_each_of_many_keys_has_one_winner(s3: FaultProxy, object_place: Make) -> None:
    """The server as these tests use it: behind a proxy that lets creates through one by one."""
    place = object_place()
    names = [f"log/{number}" for number in range(12)]
    won: list[tuple[str, str]] = []
    begin = threading.Barrier(16)

    def run(who: str) -> None:
        begin.wait()
        won.extend((name, who) for name in names if place.put_if_absent(name, who.encode()) == "created")

    threads = [threading.Thread(target=run, args=(str(number),)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(name for name, _ in won) == Counter(names)
    assert all(place.read(name).decode() == who for name, who in won)


def test_a_create_goes_out_once_and_a_lost_answer_is_lost(s3: FaultProxy, object_place: Make) -> None:
    place = object_place()
    s3.inject("lose", "PUT", "log/1")
    assert place.put_if_absent("log/1", b"mine") == "lost"
    assert [method for method, path in s3.seen if "log/1" in path] == ["PUT", "GET"]
    assert place.read("log/1") == b"mine"


def test_a_lost_answer_behind_which_somebody_elses_object_lies_is_an_exists(
    s3: FaultProxy, object_place: Make
) -> None:
    place = object_place()
    assert place.put_if_absent("log/1", b"theirs") == "created"
    s3.inject("lose", "PUT", "log/1")
    assert place.put_if_absent("log/1", b"mine") == "exists"
    assert place.read("log/1") == b"theirs"


@pytest.mark.parametrize("kind", ["503", "drop", "conflict"])
def test_a_create_that_did_not_arrive_is_sent_again(s3: FaultProxy, object_place: Make, kind: str) -> None:
    place = object_place()
    s3.inject(kind, "PUT", "log/1", times=2)  # type: ignore[arg-type]
    assert place.put_if_absent("log/1", b"mine") == "created"
    assert len(s3.struck) == 2


def test_a_conflict_with_a_writer_that_is_through_is_an_exists(s3: FaultProxy, object_place: Make) -> None:
    place = object_place()
    assert place.put_if_absent("log/1", b"theirs") == "created"
    s3.inject("conflict", "PUT", "log/1")
    assert place.put_if_absent("log/1", b"mine") == "exists"


def test_a_server_that_never_answers_a_create_leaves_it_open(s3: FaultProxy, object_place: Make) -> None:
    s3.inject("drop", "PUT", "log/1", times=99)
    assert object_place().put_if_absent("log/1", b"mine") == "lost"


@pytest.mark.parametrize("kind", ["503", "drop", "lose", "break"])
def test_everything_else_is_repeated_until_it_goes_through(
    s3: FaultProxy, object_place: Make, kind: str
) -> None:
    place = object_place()
    s3.latency = 0.005
    for method in ("PUT", "GET", "HEAD", "DELETE"):
        s3.inject(kind, method, times=2)  # type: ignore[arg-type]
    place.put("head.json", b'{"seq":1}')
    assert place.read("head.json") == b'{"seq":1}'
    assert place.size("head.json") == 9
    assert [item.key for item in place.list("")] == ["head.json"]
    place.delete("head.json")
    assert place.size("head.json") is None
    assert len(s3.struck) >= 4


def test_a_server_that_is_away_is_unavailable_and_named(
    object_place: Make, s3: FaultProxy, tmp_path: Path
) -> None:
    url = ObjectUrl(CONTAINER, "x", f"http://127.0.0.1:{free_port()}")
    place = ObjectPlace(url, BlobCache(tmp_path), retries=1, timeout=1.0, pause=lambda _: None)
    for act in (place.read, place.size, lambda key: place.put(key, b"")):
        with pytest.raises(Unavailable, match=r"s3://wl-test/x"):
            act("head.json")
    assert place.put_if_absent("log/1", b"") == "lost"


def test_a_container_that_is_not_there_is_named(s3: FaultProxy, tmp_path: Path) -> None:
    place = ObjectPlace(ObjectUrl("no-such", "x", s3.endpoint), BlobCache(tmp_path), pause=lambda _: None)
    with pytest.raises(InvalidInput, match="no-such"):
        place.probe()


def test_a_large_file_is_sent_in_parts_and_read_back_in_bounded_memory(
    s3: FaultProxy, object_place: Make, tmp_path: Path
) -> None:
    place = object_place()
    big = os.urandom(1 << 20) * (3 * PART_NBYTES // (1 << 20)) + b"tail"
    (tmp_path / "staged").mkdir()
    (tmp_path / "staged" / "model.safetensors").write_bytes(big)
    s3.inject("503", "PUT", "partNumber=2")
    s3.inject("lose", "POST", "uploadId")
    place.upload("versions/u", tmp_path / "staged")
    assert {kind for kind, _, _ in s3.struck} == {"503", "lose"}
    assert len({path for method, path in s3.seen if method == "PUT" and "partNumber" in path}) >= 4
    s3.inject("break", "GET", "model.safetensors")
    key, nbytes, digest = "versions/u/model.safetensors", len(big), sha(big)
    del big
    tracemalloc.start()
    path = place.file(key, nbytes=nbytes, sha256=digest)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sha(path.read_bytes()) == digest
    # Of the proxy's own copies too, which live in this process; four parts and the file would be more.
    assert peak < 6 * PART_NBYTES


def test_the_manifest_goes_up_last(s3: FaultProxy, object_place: Make, tmp_path: Path) -> None:
    for name in ("a", "manifest.json", "z"):
        (tmp_path / name).write_bytes(b"x")
    object_place().upload("versions/u", tmp_path)
    sent = [path.split("?")[0].rsplit("/", 1)[-1] for method, path in s3.seen if method == "PUT"]
    assert sent == ["a", "z", "manifest.json"]


def test_a_copy_is_fetched_once_and_again_when_it_rots(s3: FaultProxy, object_place: Make) -> None:
    place = object_place()
    place.put("versions/u/delta", b"bytes")
    path = place.file("versions/u/delta", nbytes=5, sha256=sha(b"bytes"))
    reads = len(s3.seen)
    assert place.file("versions/u/delta", nbytes=5, sha256=sha(b"bytes")) == path
    assert len(s3.seen) == reads
    path.write_bytes(b"bytez")
    assert place.file("versions/u/delta", nbytes=5, sha256=sha(b"bytes")).read_bytes() == b"bytes"


def test_an_object_that_is_not_what_it_should_be_never_gets_into_the_cache(
    s3: FaultProxy, object_place: Make, tmp_path: Path
) -> None:
    place = object_place()
    place.put("versions/u/delta", b"bytez")
    with pytest.raises(IntegrityError, match="versions/u/delta"):
        place.file("versions/u/delta", nbytes=5, sha256=sha(b"bytes"))
    assert [path for path in (tmp_path / "host").rglob("*") if path.is_file()] == []


def test_the_cache_keeps_its_limit_and_what_is_mapped_keeps_its_bytes(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, limit=250)
    blobs = [bytes([number]) * 100 for number in range(4)]
    first = cache.get("v/0", "here", 100, sha(blobs[0]), lambda: [blobs[0]])
    with first.open("rb") as mapped:
        for blob in blobs[1:]:
            cache.get("v/b", "here", 100, sha(blob), lambda blob=blob: [blob])  # type: ignore[misc]
        assert not first.exists()
        assert mapped.read() == blobs[0]
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) == 200


def test_a_slow_listing_comes_all_the_same(s3: FaultProxy, object_place: Make) -> None:
    place = object_place()
    for number in range(5):
        place.put(f"log/{number}", b"x")
    s3.list_latency = 0.3
    s3.inject("503", "GET", "list-type", times=1)
    assert [item.key for item in place.list("log", after="log/1")] == ["log/2", "log/3", "log/4"]


def test_the_probe_refuses_a_store_that_ignores_conditions(
    s3: FaultProxy, rclone: str, tmp_path: Path
) -> None:
    place = ObjectPlace(ObjectUrl(CONTAINER, "x", rclone), BlobCache(tmp_path))
    with pytest.raises(InvalidInput, match="does not refuse to create an object a second time"):
        place.probe()
    with pytest.raises(Missing):
        place.read("log/1")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://", "names no object store"),
        ("s3://key:secret@wl/x", "holds credentials"),
        ("s3://wl/x?endpoint=ftp://h", "endpoint"),
        ("s3://wl/x?colour=red", "colour"),
        ("s3://wl/x/../y", "prefix"),
        ("s3://wl/x?cache_nbytes=lots", "cache_nbytes"),
    ],
)
def test_a_url_that_cannot_be_is_refused_without_repeating_secrets(url: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as caught:
        parse_object_url(url)
    assert "secret" not in str(caught.value)


def test_a_url_says_where_and_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WEIGHTLINE_CACHE", str(tmp_path))
    url = parse_object_url("s3://wl/runs/a?endpoint=http://127.0.0.1:9000&region=eu-west-1&cache_nbytes=100")
    assert (url.container, url.prefix, url.endpoint) == ("wl", "runs/a", "http://127.0.0.1:9000")
    assert (url.region, url.cache_nbytes) == ("eu-west-1", 100)
    assert url.local.parent == tmp_path
    assert url.local != parse_object_url("s3://wl/runs/b?endpoint=http://127.0.0.1:9000").local
