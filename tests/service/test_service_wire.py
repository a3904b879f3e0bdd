"""The wire: errors cross as themselves, junk is refused by name, and protocol 1 is pinned byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightline import errors
from weightline.core.request import CommitRequest
from weightline.errors import FormatError, InvalidInput, RefitError, WeightlineError
from weightline.service import wire
from weightline.service.feed import Feed
from weightline.service.subscribers import Roll
from weightline.types import Ack, VersionRecord

GOLDEN = Path(__file__).with_name("golden") / "wire-1.json"

RECORD = VersionRecord(
    version=2,
    seq=3,
    parent=1,
    base=1,
    epoch=1,
    step=7,
    label="2@0123abcd",
    kind="delta",
    nbytes=10,
    raw_nbytes=100,
    changed=1,
    elements=50,
    digest="0123abcd",
    folder="versions/f",
    committed_at=1.5,
    commit_id="c",
)
REQUEST = CommitRequest(
    commit_id="c",
    write_id="w",
    writer="host/1",
    epoch=None,
    at=1.5,
    base=1,
    step=7,
    stored="delta",
    digest="0123abcd",
    folder="versions/f",
    nbytes=10,
    delta_nbytes=10,
    raw_nbytes=100,
    changed=1,
    elements=50,
    weights_digest="ff",
    metadata={"lr": 1e-6},
)
ACK = Ack(subscriber="engine-0", version=2, verified="live", at=1.5, pause_ms=0.5)
ACKED = wire.Acked(subscriber="engine-0", version=2, at=1.5, way={"fetched": 1.25})
MESSAGES = [
    wire.Hello(protocol=1, client="c"),
    wire.Welcome(
        protocol=1, run="r", root="/s", runtime_dir="/r", pid=7, release="0.1.0", newest=None, heartbeat=2.0
    ),
    wire.Publish(run="r", request=REQUEST, client="c"),
    wire.Published(record=RECORD, repeated=False),
    wire.Watch(client="c", subscriber="engine-0"),
    wire.Event(newest=2),
    wire.Fetch(version=2, have=1, subscriber="engine-0"),
    wire.FetchPlan(versions=(2,), folders=("versions/f",), nbytes=10, lease="l", ttl=120.0),
    wire.Release(lease="l"),
    wire.One(version=2),
    wire.Empty(),
    wire.Records(records=(RECORD,)),
    wire.Subscribers(
        newest=2,
        subscribers=(
            wire.Subscriber(
                name="e", state="behind", version=1, lag=1, connected=True, last_seen=1.5, ack=ACK
            ),
        ),
    ),
    ACK,
    ACKED,
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_survive_the_wire_and_match_the_golden_file(message):
    golden = json.loads(GOLDEN.read_text())
    data = wire.pack(message)
    assert data.hex() == golden[type(message).__name__]
    assert wire.unpack(data, type(message), what="test") == message
    assert wire.unpack_reply(wire.pack_reply(message), type(message), what="test") == message


def test_the_protocol_is_this_table():
    table = {name: [kind.__name__, reply.__name__] for name, (kind, reply) in wire.METHODS.items()}
    assert {"protocol": wire.PROTOCOL, "methods": table} == json.loads(GOLDEN.read_text())["table"]


@pytest.mark.parametrize("kind", [c for c in vars(errors).values() if isinstance(c, type)], ids=str)
def test_every_error_crosses_as_itself(kind):
    if not issubclass(kind, WeightlineError):
        return
    error = kind("m", hint="h", engine_state="old") if kind is RefitError else kind("m", hint="h")
    with pytest.raises(kind) as caught:
        wire.unpack_reply(wire.pack_error(error), wire.Empty, what="test")
    assert type(caught.value) is kind
    assert caught.value.to_dict() == error.to_dict()


@given(st.binary(max_size=200))
def test_junk_is_refused_by_name_or_is_a_message(data):
    for kind in (wire.Hello, wire.Publish, Ack, wire.Fetch):
        try:
            message = wire.unpack(data, kind, what="request Junk")
        except FormatError as error:
            refused = error
        else:
            assert isinstance(message, kind)
            continue
        assert refused.message.startswith("request Junk")
        assert refused.hint


def test_a_field_of_the_wrong_type_is_named():
    data = msgspec.msgpack.encode({"version": "two"})
    with pytest.raises(FormatError, match=r"\$\.version"):
        wire.unpack(data, wire.One, what="request Record")


def test_a_newer_peer_may_send_fields_that_are_not_known():
    data = msgspec.msgpack.encode({"version": 2, "from_the_future": True})
    assert wire.unpack(data, wire.One, what="request Record") == wire.One(version=2)


def committed_at(version: int) -> float:
    return 100.0 * version


def test_a_subscriber_lags_once_the_oldest_version_it_lacks_is_too_old():
    roll = Roll(sync_timeout=30.0)
    roll.acked(Ack(subscriber="e", version=1, at=101.0), now=101.0)

    def state(newest, now):
        (one,) = roll.states(newest, committed_at, now=now)
        return one.state, one.lag

    assert state(1, 500.0) == ("current", 0)
    assert state(2, 229.0) == ("behind", 1)
    assert state(2, 231.0) == ("lagging", 1)
    # A newer version does not reset the clock of one that is missed already.
    assert state(3, 301.0) == ("lagging", 2)
    roll.acked(Ack(subscriber="e", version=3, at=302.0), now=302.0)
    assert state(3, 900.0) == ("current", 0)


def test_a_subscriber_that_just_came_has_its_time_too():
    roll = Roll(sync_timeout=30.0)
    roll.joined("e", now=1000.0)
    assert [s.state for s in roll.states(2, committed_at, now=1029.0)] == ["behind"]
    assert [s.state for s in roll.states(2, committed_at, now=1031.0)] == ["lagging"]
    assert [s.state for s in roll.states(None, committed_at, now=1031.0)] == ["current"]


def test_an_engine_that_is_rolled_back_counts_as_what_it_serves_now():
    roll = Roll(sync_timeout=30.0)
    roll.acked(Ack(subscriber="e", version=2, at=1.0), now=1.0)
    roll.acked(Ack(subscriber="e", version=1, at=2.0), now=2.0)
    roll.acked(Ack(subscriber="e", version=2, at=1.5), now=3.0)
    (one,) = roll.states(2, committed_at, now=3.0)
    assert (one.version, one.lag) == (1, 1)


def test_live_subscribers_are_those_that_watch_or_were_seen_lately():
    roll = Roll(sync_timeout=30.0)
    roll.restore([Ack(subscriber=name, version=3, at=0.0) for name in ("gone", "watching", "lately")])
    roll.joined("watching", now=1.0)
    roll.seen("lately", now=950.0)
    roll.joined("never-acked", now=999.0)
    assert roll.live(now=1000.0, within=100.0) == {"watching": 3, "lately": 3}


def test_the_feed_does_not_go_back():
    answers = [3, None, 2, 5]
    feed = Feed(lambda: answers.pop(0), 0.02)
    assert feed.wait(0, None) == 3
    feed.announce(2)
    assert feed.wait(0, None) is None
    assert feed.wait(0, 2) == 3
    assert feed.wait(0, None) == 5
    for bad in (float("nan"), -0.5):
        with pytest.raises(InvalidInput, match="timeout"):
            feed.wait(bad, None)
