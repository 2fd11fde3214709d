"""When contributions are merged: by quorum, grace and lateness; and which are refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.merging.merge_settings import MergeSettings
from learner.merging.rounds import Added, Awaited, Rounds


def rounds(*added: Added, **values: object) -> Rounds:
    made = Rounds(MergeSettings.model_validate({"method": "diloco", **values}), now=0.0)
    for one in added:
        made.add(one)
    return made


def test_all_that_are_waited_for_are_merged_in_the_order_of_their_names() -> None:
    made = rounds(Added("b", 0, 1.0))
    assert made.due({"a", "b"}, now=1e9) == ()
    made.add(Added("a", 0, 1.0))
    assert made.due({"a", "b"}, now=1e9) == ("a", "b")
    made.merged(["a", "b"], now=5.0)
    assert made.due({"a"}, now=6.0) == ()
    assert made.age_s(now=6.0) == 1.0


def test_with_a_quorum_the_others_have_the_grace_time_and_no_more() -> None:
    made = rounds(Added("a", 0, 1.0), quorum=0.5, grace_s=5.0)
    assert made.due({"b"}, now=10.0) == ()
    assert made.next_event_s == 15.0
    assert made.due({"b"}, now=14.9) == ()
    assert made.due({"b"}, now=15.0) == ("a",)
    assert made.due({}, now=14.0) == ("a",)
    assert made.due({"b", "c"}, now=20.0) == ()


@pytest.mark.parametrize(
    ("late_rounds", "version", "is_refused"), [(0, 3, False), (0, 4, True), (2, 5, False), (2, 6, True)]
)
def test_a_contribution_is_merged_late_within_its_rounds(
    late_rounds: int, version: int, is_refused: bool
) -> None:
    made = rounds(Added("a", 3, 1.0), late_rounds=late_rounds)
    assert list(made.refusals(version=version)) == ["a"] * is_refused


def test_a_change_far_larger_than_the_others_is_refused_where_there_are_three() -> None:
    usual = [Added(name, 0, 1.0) for name in "ab"]
    assert rounds(Added("z", 0, 100.0), usual[0]).refusals(version=0) == {}
    refusals = rounds(Added("z", 0, 100.0), *usual).refusals(version=0)
    assert list(refusals) == ["z"]
    assert refusals["z"].outcome == "norm"
    assert "100" in refusals["z"].detail
    assert rounds(Added("z", 0, 10.0), *usual).refusals(version=0) == {}
    assert rounds(Added("none", 0, 0.0), Added("z", 0, 100.0), usual[0]).refusals(version=0) == {}


def test_a_contributor_has_one_contribution_here() -> None:
    made = rounds(Added("a", 0, 1.0))
    with pytest.raises(ValueError, match="a has"):
        made.add(Added("a", 0, 1.0))


NAMES = st.sets(st.sampled_from("abcdef"))


@settings(deadline=None)
@given(
    whole=NAMES,
    partial=NAMES,
    waited_for=NAMES,
    quorum=st.floats(0.01, 1.0),
    later_s=st.floats(0, 100),
)
def test_a_round_that_is_due_has_its_quorum_of_whole_contributions(
    whole: set[str], partial: set[str], waited_for: set[str], quorum: float, later_s: float
) -> None:
    here = whole | partial
    added = [Added(name, 0, 1.0, is_whole=name in whole) for name in sorted(here)]
    made = rounds(*added, quorum=quorum, grace_s=5.0)
    made.due(waited_for, now=0.0)
    due = made.due(waited_for, now=later_s)
    assert due in ((), tuple(sorted(here)))
    if due:
        assert waited_for <= here or (len(whole) >= quorum * len(here | waited_for) and later_s >= 5.0)
    elif here:
        assert waited_for - here
        assert len(whole) < quorum * len(here | waited_for) or later_s < 5.0


@pytest.mark.parametrize(
    ("waited_for", "here", "asking", "late", "text"),
    [
        ("", "", "", "", ""),
        ("a", "", "", "a", "a (0 of 1 in)"),
        ("ab", "b", "", "a", "a (1 of 2 in)"),
        ("ab", "c", "b", "a", "a (1 of 3 in)"),
        ("ab", "c", "ab", "", ""),
        ("dabc", "", "", "abcd", "a, b, ... (0 of 4 in)"),
    ],
)
def test_a_merge_waits_for_those_that_hold_groups_and_want_none(
    waited_for: str, here: str, asking: str, late: str, text: str
) -> None:
    awaited = Awaited.of(set(waited_for), here=set(here), asking=set(asking))
    assert awaited.late == tuple(late)
    assert awaited.text == text


def test_whom_a_merge_waits_for_fits_into_a_heartbeat() -> None:
    names = {f"{number}{'n' * 62}" for number in range(9)}
    text = Awaited.of(names, here=set(), asking=set()).text
    assert len(f"contributions: {text}") > 100
    assert f"contributions: {text}"[:100].count("n" * 62) == 1
