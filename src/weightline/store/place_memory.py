"""A place in memory: what the contract of places means, in the fewest words. For tests and models."""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from weightline.errors import IntegrityError
from weightline.store.place import Listed, Outcome, below, check_key, files_of, hidden, missing, probe


class MemoryPlace:
    """See `Place`. Objects last as long as the instance; `files` is where copies to map are written."""

    poll_s = 0.02
    degraded = ""

    def __init__(self, name: str = "", files: Path | None = None) -> None:
        self._url = f"memory://{name}"
        self._objects: dict[str, bytes] = {}
        self._lock = threading.RLock()
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._files = files

    @property
    def url(self) -> str:
        return self._url

    def free(self) -> int | None:
        return None

    def skew(self) -> float:
        return 0.0

    def put_if_absent(self, key: str, data: bytes) -> Outcome:
        with self._lock:
            kept = self._objects.setdefault(check_key(key), created := bytes(bytearray(data)))
            return "created" if kept is created else "exists"

    def put(self, key: str, data: bytes) -> None:
        with self._lock:
            self._objects[check_key(key)] = bytes(data)

    def read(self, key: str) -> bytes:
        with self._lock:
            data = self._objects.get(check_key(key))
        if data is None:
            raise missing(self.url, key)
        return data

    def size(self, key: str) -> int | None:
        with self._lock:
            data = self._objects.get(check_key(key))
        return None if data is None else len(data)

    def list(self, prefix: str, *, after: str = "") -> Iterator[Listed]:
        start = below(prefix)
        with self._lock:
            found = [Listed(key, len(data)) for key, data in self._objects.items() if key.startswith(start)]
        return iter(sorted(item for item in found if item.key > after and not hidden(item.key)))

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(check_key(key), None)

    def delete_folder(self, prefix: str) -> None:
        start = below(prefix)
        with self._lock:
            for key in [key for key in self._objects if key.startswith(start)]:
                del self._objects[key]

    def upload(self, prefix: str, folder: Path, same: Mapping[str, str] = {}) -> None:
        for key, path in files_of(folder):
            data = path.read_bytes()
            with self._lock:
                known = self._objects.get(same.get(key, ""))
                self._objects[check_key(f"{prefix}/{key}")] = known if known == data else data

    def file(self, key: str, *, nbytes: int, sha256: str) -> Path:
        data = self.read(key)
        if len(data) != nbytes or hashlib.sha256(data).hexdigest() != sha256:
            raise IntegrityError(f"{key} in {self.url} is not what it should be", hint="take another version")
        with self._lock:
            if self._files is None:
                self._scratch = tempfile.TemporaryDirectory(prefix="weightline-")
                self._files = Path(self._scratch.name)
            path = self._files / sha256 / key.rsplit("/", 1)[-1]
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                draft = path.with_name(f".{path.name}")
                draft.write_bytes(data)
                draft.replace(path)
            return path

    def probe(self) -> None:
        probe(self)
