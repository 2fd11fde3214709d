"""Orders to a learner: values that hold and that are asked for, and files of release 0.3."""

import json
from pathlib import Path

import pytest

from learner.config import LearnerConfig
from learner.journal.progress import Progress, Rollback, SettingChange
from learner.operator_orders import (
    UNUSUAL_S,
    asked_settings,
    check_no_older_orders,
    known_settings,
    recent_changes,
    with_order,
    with_settings,
)
from node.errors import StartupError
from node.system.sealed import sealed
from node.values.operator_order import SET, Order

RATE = Order(SET, "learner.learning_rate", "0.0005", order_id="1")


def test_what_holds_and_what_is_asked_for_are_told_apart() -> None:
    taken = Order(SET, "learner.kl_coefficient", "0.1", answer="from version 3 on")
    refused = Order(SET, "learner.weight_decay", "7", held="0.1", answer="at most 1", is_refused=True)
    undone = Order(SET, "learner.half_life", is_undone=True, held="Infinity", order_id="2")
    orders = (taken, refused, RATE, undone)
    known = known_settings(orders)
    assert known == {"kl_coefficient": 0.1, "weight_decay": 0.1, "half_life": float("inf")}
    assert asked_settings(orders) == [RATE, undone]
    assert with_order(with_order(known, RATE), undone) == {
        "kl_coefficient": 0.1,
        "weight_decay": 0.1,
        "learning_rate": 5e-4,
    }


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, None),
        ({"settings.json": {}}, None),
        ({"settings.json": {"learning_rate": {"value": 1e-4, "at_s": 1.0}}}, "settings.json"),
        ({"rollback.json": {"order": "x", "version": 3}}, "rollback.json"),
        ({"rollback.json": {"order": "done", "version": 3}}, None),
        ({"rollback.json": {"order": "x"}, "rollback-outcome.json": {"order": "x"}}, None),
    ],
)
def test_orders_of_release_0_3_that_would_be_lost_stop_the_start(
    tmp_path: Path, files: dict[str, object], named: str | None
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(sealed(json.dumps(content)))
    progress = Progress(9, rollback=Rollback("done", 5, 3, 0.0))
    if named is None:
        check_no_older_orders(tmp_path, progress)
        return
    with pytest.raises(StartupError) as error:
        check_no_older_orders(tmp_path, progress)
    assert str(tmp_path / named) in error.value.what


def test_options_that_are_set_join_those_of_the_configuration() -> None:
    config = LearnerConfig(
        model_dir=Path("/m"), learning_rate=1e-3, objective="grpo", objective_options={"clip_low": 0.3}
    )
    changed = with_settings(config, {"objective_options.clip_high": 0.1})
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
