"""Tuning is the same for all methods, ties go to the published setting, and nothing unfrozen is reported."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.staleness_lab.cells import Cell, Outcome
from bench.staleness_lab.frozen import Frozen, RefusedError, checked
from bench.staleness_lab.methods import RECIPES, Method
from bench.staleness_lab.plan import QUICK, TaskPlan
from bench.staleness_lab.results import Results
from bench.staleness_lab.trials import TRIALS, Setting, trials
from bench.staleness_lab.tuning import Tuned, UnfinishedError, chosen, screened

PLAN = replace(
    QUICK,
    methods=("reinforce", "grpo", "gepo", "tis"),
    named=("reinforce", "grpo"),
    screened=1,
    trials=TRIALS,
    lengths=(),
    design={"digits": TaskPlan(versions=10, learning_rate=1e-3)},
)
ENDS = {"reinforce": 0.5, "grpo": 0.6, "gepo": 0.7, "tis": 0.8}


def tuning(folder: Path, *, best_rate: float = 1.0) -> Results:
    """Every tuning cell of ``PLAN``; a method ends 0.1 higher at the best rate."""
    results = Results(folder / "staleness_tuning.jsonl")
    for cell in PLAN.tuning_cells():
        end = ENDS[cell.method] + 0.1 * (cell.setting.rate == best_rate)
        scores = tuple((0.0, end, end, end) for _ in cell.seeds)
        results.add(Outcome(cell, scores, {}, skipped=0.0, seconds=1.0))
    return results


@pytest.mark.parametrize("method", RECIPES)
def test_every_method_is_tried_with_as_many_settings_the_published_one_first(method: str) -> None:
    found = trials(method)
    assert len(found) == TRIALS
    assert found[0] == Setting()
    assert all(found.count(setting) == 1 for setting in found)
    assert found == trials(method)
    recipes = {str(RECIPES[method].changed(setting.changes)) for setting in found}
    for setting in found:
        Method.named(method, setting.changes)
    has_own = any(setting.changes for setting in found)
    assert (len(recipes) > 1) == has_own


def test_ties_go_to_the_published_setting_and_clear_gains_do_not() -> None:
    published, other = Setting(), Setting(3.0)
    level = np.array([0.8, 0.8, 0.8, 0.8])

    def choice(gain: float) -> Setting:
        return chosen([(published, level), (other, level + gain)])[0]

    assert choice(0.009) == published
    assert choice(0.011) == other
    assert choice(-0.1) == published


def test_a_gain_within_its_standard_error_is_a_tie() -> None:
    # Gains of 0 and 0.08: mean 0.04, standard error 0.023; of -0.08 and 0.12: mean 0.02, error 0.058.
    published = np.array([0.5, 0.5, 0.5, 0.5])
    steady, wild = (published + np.array(gain) for gain in ((0, 0.08, 0, 0.08), (-0.08, 0.12, -0.08, 0.12)))
    assert chosen([(Setting(), published), (Setting(3.0), steady)])[0] == Setting(3.0)
    assert chosen([(Setting(), published), (Setting(3.0), wild)])[0] == Setting()


def test_the_named_methods_are_reported_and_the_best_of_the_others() -> None:
    found = {name: Tuned(Setting(), score, score) for name, score in ENDS.items()}
    assert screened(PLAN, found) == ["reinforce", "grpo", "tis"]


def test_what_is_frozen_follows_from_the_tuning_and_is_read_back_as_it_was(tmp_path: Path) -> None:
    frozen = Frozen.of(PLAN, tuning(tmp_path, best_rate=3.0))
    assert frozen.settings == {name: Setting(3.0) for name in ("reinforce", "grpo", "tis")}
    frozen.write(tmp_path / "frozen.json")
    assert Frozen.read(tmp_path / "frozen.json") == frozen


def test_the_report_refuses_a_missing_file_and_one_of_other_outcomes_or_settings(tmp_path: Path) -> None:
    results, path = tuning(tmp_path), tmp_path / "frozen.json"
    with pytest.raises(RefusedError, match="does not exist"):
        checked(path, PLAN, results, is_committed=False)
    frozen = Frozen.of(PLAN, results)
    frozen.write(path)
    assert checked(path, PLAN, results, is_committed=False) == frozen
    replace(frozen, settings={**frozen.settings, "grpo": Setting(3.0)}).write(path)
    with pytest.raises(RefusedError, match="do not choose, of grpo"):
        checked(path, PLAN, results, is_committed=False)
    replace(frozen, digest="0" * 64).write(path)
    with pytest.raises(RefusedError, match="other tuning outcomes"):
        checked(path, PLAN, results, is_committed=False)
    path.write_text(json.dumps({"digest": frozen.digest}))
    with pytest.raises(RefusedError, match="cannot be read"):
        checked(path, PLAN, results, is_committed=False)


def test_a_method_that_changed_has_to_be_tuned_anew(tmp_path: Path) -> None:
    results = tuning(tmp_path)
    with pytest.raises(UnfinishedError, match="of gspo"):
        Frozen.of(replace(PLAN, methods=(*PLAN.methods, "gspo")), results)


def test_the_report_refuses_a_file_until_it_is_committed_as_it_is(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    results, path = tuning(tmp_path), tmp_path / "frozen.json"
    frozen = Frozen.of(PLAN, results)
    frozen.write(path)
    git("init")
    with pytest.raises(RefusedError, match="not committed"):
        checked(path, PLAN, results, is_committed=True)
    git("add", "frozen.json")
    git("commit", "-m", "freeze")
    assert checked(path, PLAN, results, is_committed=True) == frozen
    path.write_text(path.read_text() + "\n")
    with pytest.raises(RefusedError, match="not committed"):
        checked(path, PLAN, results, is_committed=True)


def test_a_report_cell_depends_on_its_own_methods_setting_alone() -> None:
    def of_grpo(settings: dict[str, Setting]) -> list[Cell]:
        return [cell for cell in PLAN.report_cells(settings) if cell.method == "grpo"]

    alone = of_grpo({"grpo": Setting()})
    assert of_grpo({"grpo": Setting(), "tis": Setting(3.0)}) == alone
    assert not {c.key for c in of_grpo({"grpo": Setting(3.0)})} & {c.key for c in alone}
