"""The error tree: every kind at every door, and across processes."""

import pickle

import pytest

from weightline import errors


def _tree(cls=errors.WeightlineError):
    return [cls, *(c for child in cls.__subclasses__() for c in _tree(child))]


def _example(cls):
    if cls is errors.RefitError:
        return cls("engine-0: q_proj.weight differs", engine_state="old", hint="see the follower's log")
    return cls("model.norm.weight: shape [3] is not [4]", hint="pass anchor=True")


def test_every_kind_has_one_row_in_the_table_and_every_row_a_kind():
    kinds = [c.kind for c in _tree()]
    assert len(kinds) == len(set(kinds))
    assert set(kinds) == set(errors.STATUS)


def test_exit_codes_are_distinct_and_never_success():
    codes = [s.exit_code for s in errors.STATUS.values()]
    assert len(codes) == len(set(codes))
    assert 0 not in codes


@pytest.mark.parametrize("cls", _tree(), ids=lambda c: c.__name__)
def test_an_error_survives_pickling_and_the_wire(cls):
    error = _example(cls)
    for copy in (pickle.loads(pickle.dumps(error)), errors.from_dict(error.to_dict())):
        assert type(copy) is cls
        assert str(copy) == str(error)
        assert copy.hint == error.hint
        assert copy.status == error.status
        assert getattr(copy, "engine_state", None) == getattr(error, "engine_state", None)


def test_an_unknown_kind_from_a_newer_peer_is_still_an_error_with_its_message():
    error = errors.from_dict({"kind": "from_the_future", "message": "no", "hint": "upgrade"})
    assert type(error) is errors.WeightlineError
    assert (str(error), error.hint) == ("no", "upgrade")


def test_only_what_may_succeed_when_repeated_is_retryable():
    assert {c.kind for c in _tree() if c.retryable} == {"unavailable", "storage_full"}
