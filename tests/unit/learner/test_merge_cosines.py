"""The cosine of each contribution with the mean of its merge, beside a plain twin."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from bench.shared.fed_back_encoder import FedBackEncoder
from learner.merging.contribution import ContributionReport, LocalStep
from learner.merging.handed_in import HandedIn
from learner.merging.merge_settings import MergeSettings
from learner.merging.outer_optimizer import Merged, MergeInputs, OuterOptimizer
from learner.step_log import TrainedGroup
from node.values.contribution import Contribution
from support.changes import SHAPES, drawn, words_of
from support.step_lines import make_step_line

SETTINGS = MergeSettings(method="in_step")
TRAINED = ContributionReport((LocalStep(make_step_line(0).numbers, (TrainedGroup("1.1", "s", 0),), (0.0,)),))


def merged(*changes: Mapping[str, Tensor]) -> Merged:
    """Merge contributions of one group each, named c0, c1, ...; an empty change: it taught nothing."""
    masters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    handed_in = []
    for number, change in enumerate(changes):
        payload = FedBackEncoder(SETTINGS, SHAPES).encode(change) if change else b""
        report = TRAINED if change else ContributionReport(())
        handed_in.append(HandedIn(f"c{number}", Contribution.of(1, 0, b"", payload), report))
    return OuterOptimizer(masters).merge(MergeInputs(handed_in, SETTINGS), words_of(masters))


def flat(change: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([change[name].double().flatten() for name in sorted(change)])


def along(place: int, size: float) -> dict[str, Tensor]:
    return {"bias": torch.eye(7)[place] * size}


def test_cosines_are_those_of_whole_changes_with_their_mean() -> None:
    changes = [drawn(seed, scale=1.0 + seed) for seed in range(3)]
    mean = torch.stack([flat(one) for one in changes]).mean(0)
    found = merged(*changes)
    assert found.norm == pytest.approx(float(mean.norm()))
    for number, change in enumerate(changes):
        cosine = torch.nn.functional.cosine_similarity(flat(change), mean, dim=0)
        assert found.cosines[f"c{number}"] == pytest.approx(float(cosine))
    assert found.numbers["merged_cosine_min"] == min(found.cosines.values())


@pytest.mark.parametrize(
    ("changes", "cosines"),
    [
        ((along(0, 1.0), along(1, 1.0)), (0.5**0.5, 0.5**0.5)),
        ((along(0, 3.0), along(0, -1.0)), (1.0, -1.0)),
        ((along(0, 1.0), along(0, -1.0)), (0.0, 0.0)),
        ((along(0, 1.0), along(0, 0.0)), (1.0, 0.0)),
        ((along(0, 1.0), {"gain": torch.tensor(2.0)}), (1.0, 1.0)),
    ],
    ids=["right angles", "against", "none is left", "a zero", "two fragments"],
)
def test_cosines_worked_by_hand(
    changes: tuple[Mapping[str, Tensor], ...], cosines: tuple[float, ...]
) -> None:
    assert tuple(merged(*changes).cosines.values()) == pytest.approx(cosines)


def test_one_contribution_alone_has_no_cosine() -> None:
    one = drawn(1)
    assert merged(one).cosines == merged(one, {}).cosines == {}
    assert merged(one, {}).contributions == 1
    assert merged(one).numbers["merged_cosine_min"] is None
