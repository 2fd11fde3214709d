"""Whose word is enough to consume groups that taught nothing, by that word."""

from learner.merging.doubts import Doubts

THREE = ("a", "b", "c")


def test_what_one_says_of_a_group_counts_once_a_second_says_it() -> None:
    doubts = Doubts(most_groups=8)
    assert doubts.doubted("a", ["1.1", "2.1"], present=THREE) == {"1.1", "2.1"}
    assert doubts.doubted("a", ["1.1"], present=THREE) == {"1.1"}, "again by the same one"
    assert doubts.doubted("b", ["1.1", "3.1"], present=THREE) == {"3.1"}


def test_a_contributor_that_is_alone_is_believed_and_has_its_groups_again() -> None:
    doubts = Doubts(most_groups=8)
    assert not doubts.doubted("a", ["1.1"], present=["a"])
    doubts.doubted("a", ["2.1"], present=THREE)
    assert doubts.may_have("a", "2.1", present=["a"])


def test_a_doubted_group_goes_to_others_until_it_is_consumed() -> None:
    doubts = Doubts(most_groups=8)
    doubts.doubted("a", ["1.1"], present=THREE)
    assert [doubts.may_have(name, "1.1", present=THREE) for name in THREE] == [False, True, True]
    doubts.consumed(["1.1"])
    assert doubts.may_have("a", "1.1", present=THREE)


def test_no_more_groups_are_remembered_than_there_may_be() -> None:
    doubts = Doubts(most_groups=2)
    doubts.doubted("a", ["1.1"], present=THREE)
    doubts.doubted("a", ["2.1", "3.1"], present=THREE)
    assert [doubts.may_have("a", f"{slot}.1", present=THREE) for slot in (1, 2, 3)] == [True, False, False]
