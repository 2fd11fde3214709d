"""How steps are merged: a method's values, and what does not fit together."""

from typing import Any, get_args

import pytest
from pydantic import ValidationError

import learner.merging.merge_settings as module
from learner.merging.merge_config import MergeConfig
from learner.merging.merge_settings import MergeSettings, Method
from node.system.backoff import CONTRIBUTOR_BACKOFF_CAP_S


def test_the_table_of_the_docstring_is_what_methods_set() -> None:
    rows = [line.split(maxsplit=1) for line in (module.__doc__ or "").split("\n\n")[1].splitlines()[1:]]
    assert [name for name, _ in rows] == list(get_args(Method))
    for name, rest in rows:
        of = MergeSettings.model_validate({"method": name})
        rates = f"{of.outer_rate:g}, {of.outer_momentum:g}".replace("0.", ".")
        quorum = "all" if of.quorum == 1 else f"{of.quorum:g}".replace("0.", ".")
        columns = [of.local_steps, rates, of.overlap, of.compression, of.fragments, quorum, of.weighting]
        assert rest.split() == " ".join(map(str, columns)).split()


def test_what_is_set_goes_before_the_methods_values() -> None:
    settings = MergeSettings(method="dilocox", local_steps=9, outer_rate=0.5, overlap="wait")
    assert (settings.local_steps, settings.outer_rate, settings.overlap) == (9, 0.5, "wait")
    assert settings.compression == "low_rank"


@pytest.mark.parametrize("method", get_args(Method))
@pytest.mark.parametrize("overlap", ["eager", "delayed"])
def test_where_changes_come_late_they_are_averaged_unless_it_is_told_otherwise(
    method: str, overlap: str
) -> None:
    settings = MergeSettings.model_validate({"method": method, "overlap": overlap})
    assert (settings.outer_rate, settings.outer_momentum) == (1, 0)
    told = MergeSettings.model_validate({"method": method, "overlap": overlap, "outer_momentum": 0.2})
    assert (told.outer_rate, told.outer_momentum) == (1, 0.2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"trains_a_fragment": True}, ["trains_a_fragment", "fragments"]),
        (
            {"overlap": "delayed", "outer_rate": 0.7, "outer_momentum": 0.9},
            ["outer_rate", "outer_momentum", "0.50"],
        ),
        ({"method": "dilocox", "overlap": "delayed", "outer_momentum": 0.95}, ["outer_rate", "delayed"]),
        ({"method": "word_changes", "late_rounds": 1}, ["late_rounds", "word_changes"]),
        ({"combine": "median", "compression": "largest"}, ["combine", "median", "largest"]),
        ({"method": "word_changes", "combine": "trimmed_mean"}, ["combine", "word_changes"]),
        ({"method": "none"}, ["method"]),
        ({"method": []}, ["method"]),
        ({"outer_rate": 0}, ["outer_rate"]),
        ({"outer_momentum": 1}, ["outer_momentum"]),
        ({"local_step": 1}, ["local_step"]),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValidationError) as refused:
        MergeSettings.model_validate(values)
    assert all(word in str(refused.value) for word in words)


@pytest.mark.parametrize("method", get_args(Method))
def test_settings_survive_the_journal(method: str) -> None:
    settings = MergeSettings.model_validate({"method": method})
    assert MergeSettings.model_validate_json(settings.model_dump_json()) == settings


def test_a_contributor_is_back_before_a_learner_that_has_started_deals_its_groups_to_others() -> None:
    """The channel connects again, then the stream is tried again; both wait up to the cap."""
    assert MergeConfig.model_fields["restart_wait_s"].default > 2 * CONTRIBUTOR_BACKOFF_CAP_S
