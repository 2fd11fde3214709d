"""Orders of operators to a learner, in files of its state directory.

    rollback.json           go on with the weights of an earlier version; carried out once, by its name
    rollback-outcome.json   what became of that order; the learner writes it
    settings.json           settings that hold in place of the configuration's, until they are undone

`heterorl-node rollback` and `set` write orders, also while the learner is down. A running learner looks
between two steps, and each second while it waits for groups.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from pydantic import ConfigDict, TypeAdapter

from learner.config import LearnerConfig
from learner.journal.progress import Progress
from learner.step_settings import StepSettings
from node.errors import StartupError
from node.identity.files import write_public
from node.limits import CHANGES_PER_HEARTBEAT
from node.sealed import sealed, unsealed

logger = logging.getLogger(__name__)

ROLLBACK, OUTCOME, SETTINGS = "rollback.json", "rollback-outcome.json", "settings.json"

LOOK_EVERY_S: Final = 1.0
"""How soon an order is noticed while no group arrives."""

SETTABLE: Final = StepSettings.live_keys()
"""Keys of [learner] that may change while it runs."""

OPTIONS: Final = "objective_options"
"""The table whose keys, the clip bounds among them, may change too."""

UNUSUAL_S: Final = 86_400.0
"""How long the status shows a change."""

Content = TypeVar("Content")


class VersionGoneError(Exception):
    """An earlier version cannot be had; says why."""


@dataclass(frozen=True, slots=True)
class RollbackOrder:
    """Go on with the weights of ``version``."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    order: str
    """Random; the learner carries out each once."""
    version: int
    because: str = ""
    at_s: float = 0.0
    """Unix seconds on the clock of the operator's machine; 0: not known."""


@dataclass(frozen=True, slots=True)
class RollbackOutcome:
    """The end of an order."""

    order: str
    made_version: int | None = None
    """The version that it made. None: it was refused."""
    why_refused: str = ""


@dataclass(frozen=True, slots=True)
class SetValue:
    """A setting's value."""

    value: float | bool | str
    at_s: float
    """Unix seconds on the clock of the operator's machine."""
    because: str = ""


Settings = Mapping[str, SetValue]
"""By key of [learner], or ``objective_options.KEY``."""


@dataclass(slots=True)
class _JsonFile(Generic[Content]):
    """A file that is read again whenever it changes. No file: the content it began with."""

    path: Path
    kind: TypeAdapter[Content]
    absent: Content
    _content: Content | None = None
    _read_at: tuple[int, int, int] | None = None

    def content(self) -> Content:
        """Return what the file has now; where it cannot be read, what it had before."""
        try:
            status = self.path.stat()
            state = (status.st_mtime_ns, status.st_size, status.st_ino)
            if state != self._read_at:
                self._read_at = state
                self._content = self._read()
        except FileNotFoundError:
            self._content, self._read_at = None, None
        except (OSError, ValueError) as error:
            logger.error("orders unreadable", extra={"path": str(self.path), "detail": str(error)})
        return self.absent if self._content is None else self._content

    def check(self) -> None:
        """Raise StartupError where there is a file that cannot be read: what it says must not be replaced."""
        try:
            self._read()
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            fix = "Correct the file by hand, or remove it: the learner goes on with what it read last."
            raise StartupError(f"{self.path} cannot be read: {error}", fix=fix) from error

    def _read(self) -> Content:
        # json's own reader: pydantic's takes no infinity.
        return self.kind.validate_python(unsealed(self.path.read_bytes()))

    def write(self, content: Content) -> None:
        """Replace the content. Raises OSError."""
        write_public(self.path, sealed(json.dumps(self.kind.dump_python(content), indent=1)))


class OperatorOrders:
    """The orders in a learner's state directory."""

    def __init__(self, directory: Path) -> None:
        self._rollback: _JsonFile[RollbackOrder | None] = _JsonFile(
            directory / ROLLBACK, TypeAdapter(RollbackOrder | None), None
        )
        self._outcome: _JsonFile[RollbackOutcome | None] = _JsonFile(
            directory / OUTCOME, TypeAdapter(RollbackOutcome | None), None
        )
        self._settings: _JsonFile[dict[str, SetValue]] = _JsonFile(
            directory / SETTINGS, TypeAdapter(dict[str, SetValue]), {}
        )
        self._over = ""
        """The order that this process has carried out or refused."""

    def check_readable(self) -> None:
        """Check that every file which is there can be read. Raises StartupError."""
        for file in (self._rollback, self._outcome, self._settings):
            file.check()

    def rollback(self, progress: Progress) -> RollbackOrder | None:
        """Return the order that is to be carried out; None: there is none, or it was refused or is done."""
        order = self._rollback.content()
        if order is None or order.order == self._over:
            return None
        if progress.rollback is not None and progress.rollback.order == order.order:
            self._end(RollbackOutcome(order.order, progress.rollback.version))
            return None
        outcome = self._outcome.content()
        return None if outcome is not None and outcome.order == order.order else order

    def refuse(self, order: RollbackOrder, why: str) -> None:
        """Log why an order cannot be carried out, and let it be, also after a restart."""
        logger.error("rollback refused", extra={"restored_version": order.version, "detail": why})
        self._end(RollbackOutcome(order.order, why_refused=why))

    def _end(self, outcome: RollbackOutcome) -> None:
        """Write down what became of an order, for the command."""
        self._over = outcome.order
        if self._outcome.content() == outcome:
            return
        try:
            self._outcome.write(outcome)
        except OSError as error:
            logger.error("outcome of a rollback not written", extra={"detail": str(error)})

    def last_rollback(self) -> tuple[RollbackOrder, RollbackOutcome | None] | None:
        """Return the order that was given last, and what became of it, None: nothing yet."""
        order, outcome = self._rollback.content(), self._outcome.content()
        if order is None:
            return None
        return order, outcome if outcome is not None and outcome.order == order.order else None

    def settings(self) -> Settings:
        """Return the settings that hold in place of the configuration's."""
        return self._settings.content()

    def order_rollback(self, order: RollbackOrder) -> None:
        """Write an order down. Raises OSError."""
        self._rollback.write(order)

    def set(self, settings: Settings) -> None:
        """Write settings down. Raises OSError."""
        self._settings.write(dict(settings))


def with_settings(config: LearnerConfig, settings: Settings) -> LearnerConfig:
    """Return the configuration with other values.

    Raises:
        ValueError: a key is not settable, or a value breaks its rule.
    """
    table = config.model_dump()
    for key, setting in settings.items():
        check_settable(key)
        section, dot, option = key.partition(".")
        if dot:
            table[section][option] = setting.value
        else:
            table[key] = setting.value
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
