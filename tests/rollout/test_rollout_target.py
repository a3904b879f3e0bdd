"""Which version an engine should serve next."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightline.errors import InvalidInput, VersionGone, VersionNotFound
from weightline.rollout.engines.base import EngineDescription
from weightline.rollout.target import choose, live_version, servable
from weightline.types import VersionRecord


def record(version, **flags):
    return VersionRecord(
        version=version, seq=version, parent=None, base=None, epoch=1, step=None, label=f"{version}@aa",
        kind="delta", nbytes=1, raw_nbytes=1, changed=1, elements=1, digest="aa", folder="f",
        committed_at=0.0, commit_id=str(version), **flags,
    )  # fmt: skip


def described(version, /, **changes):
    engine = EngineDescription(
        kind="double", label=f"{version}@aa" if version else "default", version=version,
        run="r" if version else None,
        instance="i", paused=False, quarantined=False, tensors=(),
    )  # fmt: skip
    return msgspec.structs.replace(engine, **changes)


THREE = [record(1), record(2), record(3)]


def test_the_engines_own_answer_says_what_is_live():
    assert live_version(described(2), "r", THREE) == 2
    assert live_version(described(None), "r", THREE) is None


@pytest.mark.parametrize(
    "change", [{"run": "other"}, {"quarantined": True}, {"label": "mine"}, {"version": 9}]
)
def test_an_engine_in_a_state_that_the_store_does_not_know_has_no_live_version(change):
    assert live_version(described(2, **change), "r", THREE) is None


def test_the_newest_servable_version_is_the_target():
    assert choose(THREE, 1) == 3
    assert choose(THREE, None) == 3
    assert choose(THREE, 3) == 3
    assert choose([], None) is None


def test_a_yanked_version_is_never_a_target_and_is_left():
    versions = [record(1), record(2), record(3, yanked=True)]
    assert choose(versions, 1) == 2
    assert choose(versions, 3) == 2
    assert choose(versions, 3, held=True, hold=3) == 2
    assert choose([record(1, yanked=True)], 1) is None


def test_an_engine_ahead_of_a_rewind_stays_until_something_newer_comes():
    rewound = [record(1), record(2), record(3, abandoned=True)]
    assert choose(rewound, 3) == 3
    assert choose([*rewound, record(4)], 3) == 4
    assert choose(rewound, None) == 2


def test_a_retired_version_is_no_target():
    assert choose([record(1), record(2, retired=True)], 1) == 1


def test_a_held_engine_does_not_move_and_is_brought_back_after_a_restart():
    assert choose(THREE, 2, held=True) == 2
    assert choose(THREE, None, held=True, hold=2) == 2
    assert choose(THREE, None, held=True) is None


def test_a_pin_is_the_target_whatever_is_newer():
    assert choose(THREE, 3, at=1) == 1
    with pytest.raises(VersionNotFound, match="version 7 was never committed"):
        choose(THREE, 3, at=7)
    with pytest.raises(InvalidInput, match="version 1 is yanked"):
        choose([record(1, yanked=True)], None, at=1)
    with pytest.raises(VersionGone, match="version 1"):
        choose([record(1, retired=True)], None, at=1)


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=6),
    st.integers(0, 7),
    st.booleans(),
    st.integers(0, 7),
)
def test_a_target_is_servable_or_what_is_live_and_choosing_again_stays_there(flags, live, held, hold):
    versions = [
        record(k + 1, yanked=yanked, abandoned=abandoned, retired=retired)
        for k, (yanked, abandoned, retired) in enumerate(flags)
    ]
    now = live if 1 <= live <= len(versions) else None
    target = choose(versions, now, held=held, hold=hold or None)
    if target is None:
        return
    chosen = versions[target - 1]
    assert not chosen.yanked
    assert servable(chosen) or target == now
    assert choose(versions, target, held=held, hold=hold or None) == target
