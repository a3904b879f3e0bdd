"""tests/store/test_store_retention.py in memory, on a mirror and on S3."""

from store_contract import changed, clock, load, same, store, suite_of

__all__ = ["changed", "clock", "same", "store"]

OF_FOLDERS = {
    "test_a_reader_whose_anchor_goes_meanwhile_takes_the_way_that_is_left",
    "test_an_unchanged_attachment_takes_no_room_and_outlives_the_older_version",
    "test_a_deletion_that_fails_is_tried_again",
    "test_checkout_is_whole_or_not_there",
}
_module = load("test_store_retention")
# Asks the place instead of the folder.
_module._there = lambda store: [r.version for r in store.versions() if any(store.place.list(r.folder))]  # type: ignore[attr-defined]
weights, six, ten = _module.weights, _module.six, _module.ten
globals().update(suite_of(_module, "store", "six", "ten", without=OF_FOLDERS))
