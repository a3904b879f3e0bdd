"""Seals: a check inside a small JSON object, so that a changed byte in it is noticed when it is read.

`{"a":1}` becomes `{"a":1,"check":"<16 hex>"}`: the first 64 bits of the SHA-256 of the object without it. It
detects accidents, not forgers.
"""

from __future__ import annotations

import hashlib

from weightline.errors import FormatError

_HEAD, _TAIL, _DIGITS = b',"check":"', b'"}', 16
_LENGTH = len(_HEAD) + _DIGITS + len(_TAIL)


def seal(body: bytes) -> bytes:
    """`body`, a JSON object with at least one field and without white space at its end, with its check."""
    return body[:-1] + _HEAD + _check(body) + _TAIL


def unseal(data: bytes, *, where: str, hint: str) -> bytes:
    """The inverse of `seal`; a line break at the end is fine. Raises `FormatError` that names `where`."""
    data = data.removesuffix(b"\n")
    body = data[:-_LENGTH] + b"}"
    if len(data) <= _LENGTH or data[-_LENGTH:] != _HEAD + _check(body) + _TAIL:
        raise FormatError(f"{where} is damaged: its check does not match its content", hint=hint)
    return body


def _check(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:_DIGITS].encode()
