"""The steps of several contributors as one: how old a group was to who trained on it."""

import pytest

from learner.merging.contribution import ContributionReport, LocalStep
from learner.merging.handed_in import HandedIn
from learner.merging.merge_settings import MergeSettings
from learner.step_log import TrainedGroup
from learner.training.step_taken import merged_outcome
from node.values.contribution import Contribution
from support.groups import make_group
from support.step_lines import make_step_line


@pytest.mark.parametrize(("method", "ages"), [("diloco", [2.0, 2.25]), ("eager", [3.0, 3.25])])
def test_a_group_is_older_to_who_has_gone_on_by_itself(method: str, ages: list[float]) -> None:
    groups = {f"{number}.1": make_group(f"{number}.1", version=4) for number in range(2)}
    numbers = make_step_line(0, tokens=4).numbers
    steps = tuple(LocalStep(numbers, (TrainedGroup(name, "s", 2),), (0.1,)) for name in groups)
    contribution = Contribution.of(1, 6, b"", b"change")
    handed_in = [HandedIn("a", contribution, ContributionReport(steps))]
    settings = MergeSettings.model_validate({"method": method})
    batch, _, observed = merged_outcome(handed_in, groups, version=7, settings=settings)
    assert batch == list(groups.values())
    assert [age for one in observed for age, _ in one.ages] == ages
    assert {one.said_by for one in observed} == {"a"}
