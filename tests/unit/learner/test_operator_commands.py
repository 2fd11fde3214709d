"""``heterorl-node rollback`` and ``set``: what they write, and what they refuse."""

import json
from pathlib import Path

import pytest

from learner.config import LearnerConfig
from learner.journal.progress import Progress, Rollback, SettingChange
from learner.operator_orders import UNUSUAL_S, OperatorOrders, SetValue, recent_changes, with_settings
from node.commands.cli import main
from node.exit_code import ExitCode
from node.process.last_start import note_settings
from node.run import Role


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Return the state directory of a learner that was started once, with grpo."""
    learner = tmp_path / Role.LEARNER
    (learner / "checkpoints" / "000000000007").mkdir(parents=True)
    config = LearnerConfig(
        model_dir=Path("/m"), learning_rate=1e-3, objective="grpo", objective_options={"clip_low": 0.3}
    )
    note_settings(learner, role=Role.LEARNER, settings=config.model_dump(mode="json"))
    return tmp_path


def roll_back(state: Path, *words: str) -> int:
    return main(["rollback", "7", "--state-dir", str(state), "--because", "fell", *words])


def test_a_rollback_is_written_down_as_an_order_once_however_often_it_is_given(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    orders = OperatorOrders(state / Role.LEARNER)
    assert roll_back(state) == ExitCode.DRAINED
    assert "ordered: the next version gets the weights of version 7" in capsys.readouterr().out
    order = orders.rollback(Progress(9))
    assert order is not None
    assert (order.version, order.because) == (7, "fell")
    assert roll_back(state) == ExitCode.DRAINED
    assert "ordered before at " in capsys.readouterr().out
    assert orders.rollback(Progress(9)) == order
    done = Progress(10, rollback=Rollback(order.order, 10, 7, 0.0))
    assert orders.rollback(done) is None
    assert roll_back(state, "--json") == ExitCode.DRAINED
    said = json.loads(capsys.readouterr().out)
    assert (said["order"], said["state"], said["made_version"]) == (order.order, "done before", 10)
    assert OperatorOrders(state / Role.LEARNER).rollback(done) is None
    assert roll_back(state, "--again") == ExitCode.DRAINED
    again = orders.rollback(done)
    assert again is not None
    assert again.order != order.order


def test_a_rollback_that_the_learner_refused_is_not_tried_at_its_next_start_and_may_be_ordered_anew(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert roll_back(state) == ExitCode.DRAINED
    orders = OperatorOrders(state / Role.LEARNER)
    refused = orders.rollback(Progress(9))
    assert refused is not None
    orders.refuse(refused, "the disk is full")
    assert orders.rollback(Progress(9)) is None
    assert OperatorOrders(state / Role.LEARNER).rollback(Progress(9)) is None
    capsys.readouterr()
    assert roll_back(state) == ExitCode.DRAINED
    said = capsys.readouterr().out
    assert said.startswith("ordered: ")
    order = OperatorOrders(state / Role.LEARNER).rollback(Progress(9))
    assert order is not None
    assert order.order != refused.order


@pytest.mark.parametrize("version", ["6", "-1"])
def test_a_rollback_to_a_version_that_is_not_there_is_refused_with_all_that_are(
    state: Path, version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for there in (*range(100, 131), 200):
        (state / Role.LEARNER / "checkpoints" / f"{there:012d}").mkdir()
    assert main(["rollback", "--state-dir", str(state), "--", version]) == ExitCode.COULD_NOT_START
    said = capsys.readouterr().err
    assert f"version {version} is not there; there are 0, the base model, and 7, 100-130, 200" in said
    assert not (state / Role.LEARNER / "rollback.json").exists()


@pytest.mark.parametrize("command", [["rollback", "7"], ["set", "learner.learning_rate=5e-4"]])
def test_orders_that_cannot_be_read_are_not_replaced(
    state: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = state / Role.LEARNER / "settings.json"
    path.write_text("{")
    assert main([*command, "--state-dir", str(state)]) == ExitCode.COULD_NOT_START
    assert f"{path} cannot be read" in capsys.readouterr().err
    assert path.read_text() == "{"


def test_settings_are_written_down_listed_and_undone(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--state-dir", str(state)]
    assert main(["set", "learner.learning_rate=5e-4", "--because", "KL", *where]) == ExitCode.DRAINED
    assert main(["set", "learner.objective_options.clip_high=0.1", *where]) == ExitCode.DRAINED
    assert main(["set", "learner.staleness_half_life_versions=inf", *where]) == ExitCode.DRAINED
    settings = OperatorOrders(state / Role.LEARNER).settings()
    assert {key: one.value for key, one in settings.items()} == {
        "learning_rate": 5e-4,
        "objective_options.clip_high": 0.1,
        "staleness_half_life_versions": float("inf"),
    }
    capsys.readouterr()
    assert main(["set", "--list", "--json", *where]) == ExitCode.DRAINED
    assert json.loads(capsys.readouterr().out)["learner.learning_rate"]["because"] == "KL"
    for key in settings:
        assert main(["set", "--undo", f"learner.{key}", *where]) == ExitCode.DRAINED
    assert OperatorOrders(state / Role.LEARNER).settings() == {}
    assert "no setting differs from the configuration" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("assignment", "rule"),
    [
        ("learner.learning_rate=7", "less than or equal to 1"),
        ("learner.learning_rate=fast", "valid number"),
        ("learner.model_dir=/x", "learner.model_dir cannot change in a run; these can: learning_rate"),
        ("coordinator.batch_groups=4", "only keys of [learner] can be set"),
        ("learner.objective_options.clip_higher=0.1", "the options of grpo are clip_low, clip_high"),
        ("learner.objective_options.clip_high=[1]", "must be a number"),
    ],
)
def test_a_setting_that_cannot_hold_is_refused_by_key_and_rule(
    state: Path, assignment: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["set", assignment, "--state-dir", str(state)]) == ExitCode.CONFIGURATION
    said = capsys.readouterr().err
    assert assignment.partition("=")[0] in said
    assert rule in said
    assert OperatorOrders(state / Role.LEARNER).settings() == {}


def test_options_that_are_set_join_those_of_the_configuration() -> None:
    config = LearnerConfig(
        model_dir=Path("/m"), learning_rate=1e-3, objective="grpo", objective_options={"clip_low": 0.3}
    )
    changed = with_settings(config, {"objective_options.clip_high": SetValue(0.1, 0.0)})
    assert changed.objective_options == {"clip_low": 0.3, "clip_high": 0.1}
    assert config.objective_options == {"clip_low": 0.3}


def test_changes_are_told_for_a_day_the_newest_first() -> None:
    changes = tuple(SettingChange(n, "learning_rate", f"{n}", f"{n + 1}", at_s=float(n)) for n in (3, 5))
    progress = Progress(9, rollback=Rollback("x", 4, 2, 4.0), changes=changes)
    assert recent_changes(progress, now=5.0) == (
        "learning_rate 5 -> 6 since step 5",
        "a rollback: version 4 has the weights of 2",
        "learning_rate 3 -> 4 since step 3",
    )
    assert recent_changes(progress, now=UNUSUAL_S + 4.5) == ("learning_rate 5 -> 6 since step 5",)
