"""What `weightline doctor` says about stores that are not folders: S3 and mirrors."""

from __future__ import annotations

import os
import time

from weightline.cli.diagnosis import Finding, version_of

_SOURCES = {
    "AWS_ACCESS_KEY_ID": "keys",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "a web identity",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "a container's role",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI": "a container's role",
}
_SLOW_S = 0.5


def object_store() -> list[Finding]:
    """Can s3:// be used, with which credentials and where? From the environment; nothing is asked."""
    from weightline.store.object_url import ENDPOINT_VARIABLES, endpoint_of_environment

    found = version_of("obstore")
    if found is None:
        return [
            Finding("S3: obstore", "absent", "needed for s3:// stores", "pip install 'weightline[s3]'"),
        ]
    sources = [f"{kind} ({name})" for name, kind in _SOURCES.items() if os.environ.get(name)]
    if "AWS_ACCESS_KEY_ID" in os.environ and not os.environ.get("AWS_SECRET_ACCESS_KEY"):
        credentials = Finding(
            "S3: credentials", "warn", "AWS_ACCESS_KEY_ID without AWS_SECRET_ACCESS_KEY", "set both"
        )
    elif sources:
        credentials = Finding("S3: credentials", "ok", f"from the environment: {', '.join(sources)}")
    else:
        credentials = Finding(
            "S3: credentials",
            "absent",
            "none in the environment: the role of the instance would be asked",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (profiles in ~/.aws are not read)",
        )
    endpoint = endpoint_of_environment()
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1 (default)"
    named = next((name for name in ENDPOINT_VARIABLES if os.environ.get(name)), "")
    said = f"{endpoint} ({named})" if endpoint else "Amazon's, for URLs that name none with endpoint="
    return [
        Finding("S3: obstore", "ok", found),
        credentials,
        Finding("S3: endpoint", "ok", f"{said}; region {region}"),
    ]


def tried(url: str) -> Finding:
    """The place behind a URL, tried out: does it answer, does it refuse a second create, how far is it?"""
    from weightline.errors import WeightlineError
    from weightline.store.opening import place_of

    try:
        _, place = place_of(url)
        place.probe()
        begin = time.perf_counter()
        place.size("run.json")
        took = time.perf_counter() - begin
        skew = place.skew()
    except WeightlineError as error:
        return Finding("store place", "broken", error.message, error.hint)
    said = f"{place.url}: put-if-absent works, {took * 1e3:.0f} ms a request"
    if place.degraded:
        return Finding("store place", "warn", f"{said}; {place.degraded}", "run `weightline verify --repair`")
    if skew:
        ahead = "behind" if skew > 0 else "ahead of"
        hint = "set this host's clock; leases go by the store's all the same"
        return Finding("store place", "warn", f"{said}; this host is {abs(skew):.0f} s {ahead} it", hint)
    if took > _SLOW_S:
        hint = "a commit takes about ten requests: use a store that is nearer"
        return Finding("store place", "warn", said, hint)
    return Finding("store place", "ok", said)
