"""From names, options and import paths to objectives."""

import math
import subprocess
import sys

import pytest
import torch

from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome
from learner.objective.menu import MENU, check_name, check_options
from learner.objective.options import Options
from learner.objective.registry import load_objective
from support.objective_batches import batch_of, made_up
from support.refusals import naming


class ScaledOptions(Options):
    scale: float = 2.0


def scaled(batch: ObjectiveBatch, options: ScaledOptions) -> ObjectiveOutcome:
    weight = torch.ones(len(batch.mask))
    return ObjectiveOutcome(options.scale * batch.learner_mean.sum(), weight, weight > 1)


def separable(batch: ObjectiveBatch, options: Options) -> ObjectiveOutcome:
    return scaled(batch, ScaledOptions())


separable.is_separable = True  # type: ignore[attr-defined]


def unannotated(batch, options):  # type: ignore[no-untyped-def]
    raise AssertionError


def test_every_name_of_the_menu_loads_with_its_defaults() -> None:
    for name, entry in MENU.items():
        objective = load_objective(name)
        assert objective.is_separable == entry.is_separable
        assert objective.options == entry.options()


def test_options_are_read_and_checked() -> None:
    read = load_objective("grpo", {"clip_high": 0.28}).options.model_dump()
    assert read == {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": math.inf}
    for name, value in (("clip_hihg", 0.28), ("clip_low", -1)):
        with naming(ValueError, name):
            load_objective("grpo", {name: value})


def test_an_unknown_name_is_answered_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match=r"no objective 'gepp'.*gepo, .*package.module:function"):
        load_objective("gepp")


def test_an_objective_of_ones_own_is_an_import_path_away() -> None:
    objective = load_objective(f"{__name__}:scaled", {"scale": 3.0})
    assert not objective.is_separable
    p, sample = made_up(0)
    batch = batch_of(p, sample)
    assert objective(batch).loss.item() == pytest.approx(3 * batch.learner_mean.sum().item())
    assert load_objective(f"{__name__}:separable").is_separable


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("no_such_package.x:y", "cannot be imported"),
        (f"{__name__}:absent", "cannot be imported"),
        (f"{__name__}:sys", "is not a function"),
        (f"{__name__}:unannotated", "must be annotated"),
    ],
)
def test_a_path_that_leads_nowhere_says_why(path: str, why: str) -> None:
    check_options(check_name(path), {"anything": 1})
    with pytest.raises(ValueError, match=why):
        load_objective(path)


def test_names_and_options_are_checked_without_torch() -> None:
    code = (
        "import sys; from learner.objective.menu import MENU, check_options; "
        "[check_options(name, {}) for name in MENU]; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("behaviour_logprob", torch.zeros(9, 2)),
        ("mask", torch.ones(9, 1, dtype=torch.bool)),
        ("reward", torch.zeros(8)),
        ("group_index", torch.zeros(9, 1)),
        ("discount", torch.zeros(1)),
        ("mask", torch.zeros(9, 5, dtype=torch.bool)),
    ],
)
def test_a_batch_whose_shapes_do_not_fit_is_refused(field: str, value: torch.Tensor) -> None:
    p, sample = made_up(0)
    batch = batch_of(p, sample)
    fields = {name: getattr(batch, name) for name in ObjectiveBatch.__dataclass_fields__}
    with pytest.raises(ValueError, match=r"shape|without tokens"):
        ObjectiveBatch(**{**fields, field: value})
