"""A check, what it finds, and how a command goes through a list of them.

    Check (name, needs, run) --examine--> Finding (layer, grade, what, fix)

Each command says what its checks may need: a start looks at what would otherwise fail after torch has loaded
or a token is spent, ``try`` likewise for its two roles, a dry run at all that asks nobody and writes nothing,
the doctor at everything. A check is written once, where the thing it looks at is known.
"""

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from node.errors import ConfigError, NotReadyError, StartupError


class Needs(enum.Flag):
    """The kind of thing that a check looks at."""

    CONFIGURATION = enum.auto()
    """The configuration, and what this process may do."""
    DISK = enum.auto()
    """State directory, run file, keys."""
    PACKAGES = enum.auto()
    """Which packages are installed; none is imported."""
    MODEL = enum.auto()
    """Files of model directories, without torch."""
    DATA = enum.auto()
    """Every row; minutes for a million."""
    CODE = enum.auto()
    """Tasks, graders and templates, run in processes of their own."""
    MACHINE = enum.auto()
    """Disk, device, sandbox and kernel, by trying them."""
    NETWORK = enum.auto()
    """The way to the coordinator, and its answers."""


START: Final = Needs.PACKAGES | Needs.MODEL
"""Checks whose faults would end a start after torch has loaded; others are found where it matters."""

DRY_RUN: Final = START | Needs.CONFIGURATION | Needs.DISK | Needs.DATA | Needs.CODE
"""Checks that change nothing and ask nobody."""

EVERYTHING: Final = DRY_RUN | Needs.MACHINE | Needs.NETWORK


class Grade(enum.StrEnum):
    """How well something does."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """A thing that a check found, good or bad."""

    layer: str
    """The thing that was looked at: the check's name, or a part of it."""
    grade: Grade
    what: str
    fix: str = ""
    """An action that mends it; empty where nothing needs mending."""
    fault: StartupError | ConfigError | None = None
    """The error that ends a start for it."""

    @classmethod
    def of_fault(cls, layer: str, fault: StartupError | ConfigError) -> Self:
        """Return what ends a start as a finding."""
        if isinstance(fault, StartupError):
            return cls(layer, Grade.FAIL, fault.what, fault.fix, fault)
        return cls(layer, Grade.FAIL, f"{fault.key} = {fault.value!r}: {fault.rule}", fault.fix, fault)


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """One thing that may be wrong. Of several things that go wrong apart, each is a check."""

    name: str
    needs: Needs
    run: Callable[[], Iterable[Finding]]
    """Returns what it finds, good or bad; a StartupError or ConfigError that it raises is a finding, too."""
    after: tuple["Check", ...] = ()
    """Checks without which this one says nothing new: it is left out where one of them failed."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Everything that a role's section may look at besides itself."""

    state_dir: Path
    """The role's state directory."""
    model_dir: Path | None
    """The first model of this process's roles, for its tokenizer; None: there is none."""
    told: Callable[[str], None]
    """Called now and then with how far a long check is."""


def examine(checks: Iterable[Check], *, needs: Needs) -> Iterator[Finding]:
    """Run the checks that need no more than ``needs``, in their order, and yield each fault once."""
    failed: set[Check] = set()
    faults: set[str] = set()
    for check in checks:
        if check.needs not in needs:
            continue
        if not failed.isdisjoint(check.after):
            failed.add(check)
            continue
        for finding in _found_by(check):
            if finding.grade is Grade.FAIL:
                failed.add(check)
            if finding.fault is not None:
                if str(finding.fault) in faults:  # two roles may share a directory
                    continue
                faults.add(str(finding.fault))
            yield finding


def require(checks: Iterable[Check], *, needs: Needs) -> None:
    """Run the checks that need no more than ``needs``. Raises NotReadyError: with every fault."""
    faults = tuple(finding.fault for finding in examine(checks, needs=needs) if finding.fault is not None)
    if faults:
        raise NotReadyError(faults)


def _found_by(check: Check) -> Iterator[Finding]:
    try:
        yield from check.run()
    except (StartupError, ConfigError) as fault:
        yield Finding.of_fault(check.name, fault)
