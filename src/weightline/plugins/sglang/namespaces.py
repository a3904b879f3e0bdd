"""No request reads keys and values of other weights than those live at its admission, or later.

SGLang matches prefixes within one `extra_key`. A pause in place flushes nothing: what it leaves in the
cache was computed by older weights, partly even within one request. So every request is admitted under a
namespace of its own moment, and a new one begins whenever the label moves or the weights are changed behind
it; requests that still wait then move along. A label that comes back gets a new namespace. The user's own
`extra_key` stays in force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from weightline.plugins.sglang.hooks import Hook

USERS = "_weightline_users_key"
"""Where a request keeps the `extra_key` that it came with."""


class Namespaces:
    """The namespace of new requests of one scheduler."""

    def __init__(self, label: str) -> None:
        self.label, self.turn = label, 0

    def admit(self, request: Any) -> None:
        """Put `request` into the namespace of now. Idempotent."""
        if not hasattr(request, USERS):
            setattr(request, USERS, request.extra_key)
        request.extra_key = self.key(getattr(request, USERS))

    def key(self, users: str | None) -> str:
        """Another string for each pair of a namespace and a user's key: `turn` fixes `label`."""
        return f"weightline/{self.turn}/{self.label}/" + ("" if users is None else f"={users}")

    def renew(self, label: str, waiting: Iterable[Any]) -> None:
        """The weights are others from now on; `waiting` requests have computed nothing yet."""
        self.label, self.turn = label, self.turn + 1
        for request in waiting:
            self.admit(request)


def renew(scheduler: Any) -> None:
    """The weights of `scheduler` are others from now on."""
    from weightline.plugins.sglang.engine import front_of, serving_label

    front = front_of(scheduler)
    if front is not None and front.namespaces is not None:
        front.namespaces.renew(serving_label(), scheduler.waiting_queue)


def _admitted(original: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    from weightline.plugins.sglang.engine import front_of

    front = front_of(scheduler)
    if front is not None and front.namespaces is not None:
        front.namespaces.admit(request)
    return original(scheduler, request, *args, **kwargs)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = (Hook(f"{_SCHEDULER}._add_request_to_queue", _admitted),)
