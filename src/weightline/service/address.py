"""Where a line is reached: URLs, listen addresses, runtime folders, and the limits of Unix sockets."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote, urlsplit

from msgspec import Struct

from weightline.errors import InvalidInput
from weightline.store.opening import check_store_url, is_store_url

SOCKET_NAME = "wl.sock"
MAX_SOCKET_BYTES = 107
"""`sockaddr_un.sun_path` is 108 bytes on Linux, the closing NUL included (unix(7))."""

FORMS = "unix:///path/wl.sock, grpc://host:port, file:///dir or a folder, s3://container/prefix, mirror:/a,/b"


class Address(Struct, frozen=True):
    """A parsed URL: `path` for unix and file, `host` and `port` for grpc, `url` for other stores."""

    scheme: Literal["unix", "grpc", "file", "store"]
    path: Path = Path()
    host: str = ""
    port: int = 0
    url: str = ""

    def __str__(self) -> str:
        if self.scheme == "store":
            return self.url
        if self.scheme == "grpc":
            return f"grpc://{_bracketed(self.host)}:{self.port}"
        return f"{self.scheme}://{self.path}"

    @property
    def target(self) -> str:
        """What gRPC calls it."""
        if self.scheme == "grpc":
            return f"{_bracketed(self.host)}:{self.port}"
        return "unix:" + quote(str(self.path))


def parse(url: str | Path) -> Address:
    """The address behind `url`. Raises `InvalidInput` for a form that is not known or not there yet."""
    if not isinstance(url, str | Path) or "\0" in str(url):
        raise InvalidInput(f"the store's address {url!r} is no path or URL", hint=f"give {FORMS}")
    text = str(url)
    if text == "":
        raise InvalidInput("the store's address is empty", hint=f"give {FORMS}")
    scheme, colon, rest = text.partition(":")
    if isinstance(url, Path) or not colon or "/" in scheme:
        return Address("file", Path(text).expanduser().absolute())
    if is_store_url(text):
        check_store_url(text)
        return Address("store", url=text)
    if scheme in ("unix", "file"):
        return Address(scheme, _url_path(text, rest))  # type: ignore[arg-type]
    if scheme == "grpc":
        host, port = split_host_port(rest.removeprefix("//"), what=text)
        return Address("grpc", host=host, port=port)
    raise InvalidInput(f"{text}: unknown address scheme {scheme!r}", hint=f"give {FORMS}")


def heard(address: Address) -> bool:
    """Does somebody listen there, whether or not it answers?"""
    kind = socket.AF_UNIX if address.scheme == "unix" else socket.AF_INET
    if ":" in address.host:
        kind = socket.AF_INET6
    where = str(address.path) if address.scheme == "unix" else (address.host, address.port)
    with socket.socket(kind, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.2)
        try:
            probe.connect(where)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # busy, or out of reach: not for this look to tell
    return True


def store_of(store: str | Path) -> Path | str:
    """What `Store.open` takes for a store that is served or embedded: its folder, or the URL of an S3 store
    or a mirror. Raises `InvalidInput` for the address of a server.
    """
    address = parse(store)
    if address.scheme == "store":
        return address.url
    if address.scheme != "file":
        raise InvalidInput(
            f"{store}: not a folder, nor the URL of a store",
            hint="give the store's folder, s3://container/prefix or mirror:/a,/b; connect() takes servers",
        )
    return address.path


def _url_path(text: str, rest: str) -> Path:
    if rest.startswith("//"):
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise InvalidInput(
                f"{text}: a path must follow three slashes",
                hint=f"did you mean {parts.scheme}:///{rest[2:]} ?",
            )
        rest = rest[2 + len(parts.netloc) :]
    path = Path(unquote(rest)).expanduser()
    if rest == "" or "\0" in str(path):
        raise InvalidInput(f"{text}: there is no path in it", hint=f"give {FORMS}")
    return path.absolute()


def split_host_port(text: str, *, what: str) -> tuple[str, int]:
    """`HOST:PORT`, IPv6 hosts in brackets. Raises `InvalidInput` naming `what`."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidInput(
            f"{what}: not of the form HOST:PORT", hint="for example 127.0.0.1:7070; port 0 takes a free one"
        )
    return host, int(port)


def loopback(text: str, *, what: str) -> tuple[str, int]:
    """`HOST:PORT` when only this machine can reach it, else `InvalidInput`: there is no TLS and no token in
    this version.
    """
    host, port = split_host_port(text, what=what)
    try:
        inside = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        inside = False
    if not inside:
        raise InvalidInput(
            f"{what} {text}: {host} is not a loopback address, and this version has neither TLS nor tokens",
            hint="listen on 127.0.0.1 or [::1]; reach it from another machine through an SSH tunnel",
        )
    return host, port


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def bracketed(host: str, port: int) -> str:
    """`HOST:PORT` as gRPC and URLs write it."""
    return f"{_bracketed(host)}:{port}"


def check_socket_path(path: Path) -> Path:
    """`path` when the kernel takes it as a Unix socket, else `InvalidInput` with the remedy."""
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_BYTES:
        raise InvalidInput(
            f"{path}: a Unix socket path of {size} bytes; the limit is {MAX_SOCKET_BYTES}",
            hint="give a shorter one with --listen unix:/tmp/wl.sock, or a shorter --runtime-dir",
        )
    return path


def listen_path(listen: str) -> Path:
    """The socket path of `--listen unix:PATH`. Raises `InvalidInput`."""
    address = parse(listen)
    if address.scheme != "unix":
        raise InvalidInput(f"--listen {listen}: only unix:PATH", hint="use --grpc HOST:PORT for TCP")
    return check_socket_path(address.path)


def default_runtime_dir(root: Path) -> Path:
    """A short folder for one user and one store: below `XDG_RUNTIME_DIR`, else below the temporary folder."""
    mark = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:12]
    xdg = os.environ.get("XDG_RUNTIME_DIR")
    if xdg and os.access(xdg, os.W_OK | os.X_OK):
        return Path(xdg) / "weightline" / mark
    return Path(tempfile.gettempdir()) / f"weightline-{os.getuid()}" / mark


def make_runtime_dir(path: Path) -> Path:
    """Create `path` for this user only. Raises `InvalidInput` when others own it or may write there."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise InvalidInput(
            f"runtime folder {path}: {error.strerror}",
            hint="name a folder that you may create with --runtime-dir",
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise InvalidInput(
            f"runtime folder {path} belongs to user {found.st_uid}", hint="name another with --runtime-dir"
        )
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise InvalidInput(f"runtime folder {path} can be written by everybody", hint=f"chmod go-w {path}")
    return path
