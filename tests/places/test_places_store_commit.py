"""tests/store/test_store_commit.py in memory, on a mirror and on S3."""

from store_contract import changed, clock, load, same, store, suite_of, weights

__all__ = ["changed", "clock", "same", "store", "weights"]

OF_FOLDERS = {
    "test_other_formats_are_refused_by_name",
    "test_all_misfits_are_listed_and_nothing_happens",
    "test_an_anchor_with_a_base_carries_its_delta_too",
    "test_a_label_is_used_once",
    "test_opening_fences_nobody_and_the_first_commit_does",
    "test_a_place_without_hard_links_is_refused",
    "test_fsyncs_of_a_commit_are_those_that_the_docs_state",
}
globals().update(suite_of(load("test_store_commit"), "store", without=OF_FOLDERS))
