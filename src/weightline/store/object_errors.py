"""What an S3-compatible store means by its errors, in one readable line with a hint.

obstore passes on the server's XML, and below it a debug form of its own; both are looked into, and neither is
shown. Codes: the S3 API's list of error responses.
"""

from __future__ import annotations

import re
from typing import Any

from weightline.errors import InvalidInput, Unavailable, WeightlineError
from weightline.store.object_url import ObjectUrl

_CODE = re.compile(r"<Code>(\w+)</Code>")
_MESSAGE = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
_REGION = re.compile(r"<Region>([\w-]+)</Region>")
_METADATA = ("169.254.169.254", "169.254.170.2", "fd00:ec2::254")
_REFUSED = {
    "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY",
    "AccessDenied": "give this user or role s3:GetObject, PutObject, DeleteObject and ListBucket there",
    "ExpiredToken": "renew AWS_SESSION_TOKEN and its keys",
    "InvalidToken": "renew AWS_SESSION_TOKEN and its keys",
    "RequestTimeTooSkewed": "set the clock of this host",
}
_KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the role, for this store"


def no_container(what: str, url: ObjectUrl) -> InvalidInput:
    """There is no container of that name."""
    return InvalidInput(f"cannot {what}: there is no {url.container!r} at {url}", hint="create it first")


def is_no_container(error: BaseException) -> bool:
    """Does the store say that the whole container is missing, and not only the object?"""
    return code_of(error) == "NoSuchBucket"


def code_of(error: BaseException) -> str:
    """The S3 code in the answer; empty when there is none."""
    found = _CODE.search(str(error))
    return found.group(1) if found else ""


def explained(what: str, url: ObjectUrl, error: BaseException, exceptions: Any) -> WeightlineError:
    """The typed error for what obstore raised: `InvalidInput` for what does not go away by itself
    (credentials, region, https, names), else `Unavailable`.
    """
    text, code = str(error), code_of(error)
    denied = isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
    if any(address in text for address in _METADATA):
        return InvalidInput(f"cannot {what}: there are no credentials for {url}", hint=_KEYS)
    if denied or code in _REFUSED:
        said = f" ({code})" if code else ""
        return InvalidInput(
            f"cannot {what}: {url} refuses these credentials{said}", hint=_REFUSED.get(code, _KEYS)
        )
    if code in ("AuthorizationHeaderMalformed", "PermanentRedirect") or "without LOCATION" in text:
        found = _REGION.search(text)
        region = found.group(1) if found else "that of the container"
        return InvalidInput(
            f"cannot {what}: {url} is not in region {url.region}",
            hint=f"give region={region} in the URL, or AWS_REGION",
        )
    if code == "NoSuchBucket":
        return no_container(what, url)
    if "InvalidContentType" in text:
        return InvalidInput(f"cannot {what}: {url} speaks http, not https", hint="write endpoint=http://…")
    if "HTTP request to an HTTPS server" in text:
        return InvalidInput(f"cannot {what}: {url} speaks https, not http", hint="write endpoint=https://…")
    if isinstance(error, exceptions.InvalidPathError | exceptions.NotSupportedError):
        return InvalidInput(f"cannot {what} in {url}: {_short(text)}", hint="use another name")
    return Unavailable(
        f"cannot {what} in {url}: {_short(text)}",
        hint="check the endpoint and the network, then repeat the call",
    )


def _short(text: str) -> str:
    """What the server said, else the first line of what obstore says."""
    code, message = _CODE.search(text), _MESSAGE.search(text)
    if code is not None:
        said = " ".join(message.group(1).split()) if message else ""
        return f"{code.group(1)}: {said}"[:300]
    line = (text.splitlines() or [""])[0]
    return line if len(line) <= 300 else f"{line[:300]}…"
