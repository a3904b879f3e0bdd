"""The contracts of a place and of a whole store on S3 while every fourth request goes wrong: refused, hung up
on before or after it was done, answered by half; each answer late, each listing slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_contract import load, suite_of

from s3_world import FaultProxy
from weightline.store.object import ObjectPlace

HERE = Path(__file__).parent
pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

_contract, _stores = load("test_places_contract", HERE), load("test_places_stores", HERE)
opened = _stores.opened
# A create that is sent again may meet itself, and says so: the log compares write ids then.
EXACT = {
    "test_a_key_that_cannot_be_is_refused",
    "test_the_first_to_create_an_object_wins_and_it_keeps_its_bytes",
}
# The pauses below us make seconds of every request, and what is raced for is the same.
RACES = {
    "test_of_writers_that_race_each_version_has_one",
    "test_retention_deletes_and_a_leased_version_stays",
}
globals().update(suite_of(_contract, "place", without=EXACT))
globals().update(suite_of(_stores, "opened", without=RACES))


@pytest.fixture
def place(s3: FaultProxy, object_place: Callable[..., Any]) -> Iterator[ObjectPlace]:
    s3.latency, s3.list_latency, s3.storm = 0.002, 0.05, 4
    yield object_place()
    struck = len(s3.struck)
    s3.calm()
    assert struck, "the storm did not come"
