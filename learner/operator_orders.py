"""Operators' orders to a learner, as the coordinator tells them: settings that hold, a rollback; pure.

The coordinator's ledger keeps the orders. Those that hold or have no answer come first on each stream of
groups, so a learner that starts again has its settings before its first step.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from learner.config import LearnerConfig
from learner.journal.progress import Progress
from learner.step_settings import StepSettings
from node.errors import StartupError
from node.system.sealed import unsealed
from node.values.limits import CHANGES_PER_HEARTBEAT
from node.values.operator_order import ROLLBACK, SET, Order

SETTABLE: Final = StepSettings.live_keys()
"""Keys of [learner] that may change while it runs."""

OPTIONS: Final = "objective_options"
"""The table whose keys, the clip bounds among them, may change too."""

UNUSUAL_S: Final = 86_400.0
"""How long the status shows a change."""


class VersionGoneError(Exception):
    """An earlier version cannot be had; says why."""


@dataclass(frozen=True, slots=True)
class RollbackOrder:
    """Go on with the weights of ``version``."""

    order: str
    """Names the order; the learner carries out each once."""
    version: int
    because: str = ""
    at_s: float = 0.0
    """Unix seconds on the coordinator's clock when it was given; 0: not known."""


def known_settings(orders: Iterable[Order]) -> dict[str, Any]:
    """Return the settings that hold already, by key of [learner]."""
    known = ((order, order.known_value) for order in orders if order.verb == SET)
    return {key_of(order): json.loads(value) for order, value in known if value}


def asked_settings(orders: Iterable[Order]) -> list[Order]:
    """Return the orders about settings that have no answer, in the order in which they were given."""
    return [order for order in orders if order.verb == SET and not order.answer]


def asked_rollback(orders: Iterable[Order]) -> Order | None:
    """Return the rollback that has no answer; None: there is none."""
    return next((order for order in orders if order.verb == ROLLBACK and not order.answer), None)


def key_of(order: Order) -> str:
    """Return the key of [learner] that an order is about."""
    return order.about.removeprefix("learner.")


def with_order(settings: Mapping[str, Any], order: Order) -> dict[str, Any]:
    """Return the settings that hold once an order is taken. Raises ValueError: its value cannot be read."""
    others = {key: value for key, value in settings.items() if key != key_of(order)}
    return others if order.is_undone else {**others, key_of(order): json.loads(order.value)}


def rollback_of(order: Order, progress: Progress) -> RollbackOrder:
    """Return the rollback that an order asks for. Raises ValueError: it cannot be carried out; says why."""
    done = progress.rollback
    if done is not None and order.at_s < done.ordered_at_s:
        raise ValueError(f"a rollback that was ordered later has made version {done.version}")
    version = int(order.value)
    if not 0 <= version < progress.version:
        raise ValueError(f"the newest version is {progress.version}: name an older one")
    return RollbackOrder(order.order_id, version, order.because, order.at_s)


def check_no_older_orders(directory: Path, progress: Progress) -> None:
    """Check that a learner's directory has no order of release 0.3 to lose. Raises StartupError: it has."""
    settings, ordered = (_older(directory / name) for name in ("settings.json", "rollback.json"))
    ended = _older(directory / "rollback-outcome.json").get("order")
    carried_out = None if progress.rollback is None else progress.rollback.order
    is_open = bool(ordered) and ordered["order"] not in (ended, carried_out)
    for name in (*["settings.json"] * bool(settings), *["rollback.json"] * is_open):
        raise StartupError(
            f"{directory / name} has an operator's orders, which the coordinator keeps since 0.4",
            fix="Give them again on the coordinator's host, with `heterorl-node set` or `rollback`, then "
            "remove the file.",
        )


def _older(path: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] | None = unsealed(path.read_bytes())
        return told or {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {error}", fix="Remove it.") from error


def with_settings(config: LearnerConfig, settings: Mapping[str, Any]) -> LearnerConfig:
    """Return the configuration with other values.

    Raises:
        ValueError: a key is not settable, or a value breaks its rule.
    """
    table = config.model_dump()
    for key, value in settings.items():
        check_settable(key)
        section, dot, option = key.partition(".")
        if dot:
            table[section][option] = value
        else:
            table[key] = value
    return LearnerConfig.model_validate(table)


def check_settable(key: str) -> None:
    """Check that a key may change while the learner runs. Raises ValueError: it may not."""
    section, dot, option = key.partition(".")
    if key not in SETTABLE and not (section == OPTIONS and dot and option):
        raise ValueError(
            f"learner.{key} cannot change in a run; these can: {', '.join(SETTABLE)}, and {OPTIONS}.KEY"
        )


def recent_changes(progress: Progress, *, now: float) -> tuple[str, ...]:
    """Return what was changed in the last day, a line each, the newest first."""
    lines = [
        (change.at_s, f"{change.key} {change.was} -> {change.is_now} since step {change.version}")
        for change in progress.changes
    ]
    if (rollback := progress.rollback) is not None:
        what = f"a rollback: version {rollback.version} has the weights of {rollback.restored_version}"
        lines.append((rollback.at_s, what))
    recent = sorted((line for line in lines if now - line[0] <= UNUSUAL_S), reverse=True)
    return tuple(text for _, text in recent[:CHANGES_PER_HEARTBEAT])
