"""Every kind of place, made anew for a test. `PLACES` is what the contract suites run over."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from s3_world import CONTAINER, FaultProxy, free_port, process
from weightline.store.mirror import MirrorPlace
from weightline.store.object import ObjectPlace
from weightline.store.object_cache import BlobCache
from weightline.store.object_url import ObjectUrl
from weightline.store.place import Place
from weightline.store.place_local import LocalPlace
from weightline.store.place_memory import MemoryPlace

PLACES = ("local", "memory", "s3", "mirror")


@pytest.fixture
def object_place(s3: FaultProxy, tmp_path: Path) -> Callable[..., ObjectPlace]:
    """`object_place(prefix, **options)`: a handle on the S3 server, through the proxy."""

    def make(prefix: str | None = None, host: str = "host", **options: object) -> ObjectPlace:
        url = ObjectUrl(CONTAINER, prefix or uuid.uuid4().hex, s3.endpoint)
        return ObjectPlace(url, BlobCache(tmp_path / host), pause=lambda _: None, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "local":
        yield LocalPlace(tmp_path / "root")
    elif request.param == "memory":
        yield MemoryPlace("test", tmp_path / "files")
    elif request.param == "mirror":
        yield MirrorPlace((tmp_path / "a", tmp_path / "b"), create=True)
    else:
        yield request.getfixturevalue("object_place")()


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server that ignores conditions: the negative control."""
    folder = tmp_path_factory.mktemp("rclone")
    (folder / "data" / CONTAINER).mkdir(parents=True)
    port = free_port()
    # The wheel puts the program beside the interpreter.
    program = str(Path(sys.executable).with_name("rclone"))
    command = [
        program,
        "serve",
        "s3",
        str(folder / "data"),
        "--addr",
        f"127.0.0.1:{port}",
        "--auth-key",
        "test,test",
    ]
    with process(command, port, folder / "log", {"RCLONE_CONFIG": "/dev/null"}) as endpoint:
        yield endpoint
