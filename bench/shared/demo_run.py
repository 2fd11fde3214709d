"""A run on this machine with the demo's task and model, which benchmarks change as they need.

    demo_model() --> DemoRun.make(): authority, configurations, coordinator, tokens --> start_others()

Real processes over mutual TLS. What a benchmark does not say is as in the demo.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeVar

from deploy.demo.plan import (
    BASE_ACCURACY,
    BATCH_GROUPS,
    GROUP_SIZE,
    LEARNING_RATE,
    MAX_STALENESS_VERSIONS,
    MODEL_WIDTH,
)
from deploy.runs.processes import ChildError, Children, children_below
from deploy.runs.run_directory import COORDINATOR, LEARNER, RunDirectory, Section
from deploy.runs.run_session import RunSession
from node.coordinator.ledger.ledger_check import facts_in, reading
from node.coordinator.work.samplers.sampler_standing import Standing

C = TypeVar("C")
M = TypeVar("M", bound=Any)
"""A dataclass."""

READY_TIMEOUT_S: Final = 240.0
"""Several processes that import torch on cores that others use too."""

DEMO: Final[Mapping[str, Section]] = {
    "coordinator": {
        "task": "addition",
        "group_size": GROUP_SIZE,
        "batch_groups": BATCH_GROUPS,
        "max_staleness_versions": MAX_STALENESS_VERSIONS,
        "max_new_tokens": 4,
    },
    "learner": {"threads": 1, "learning_rate": LEARNING_RATE},
    "sampler": {"threads": 1, "concurrency_groups": 8},
    "verifier": {},
    "contributor": {"threads": 1},
}


class DemoRun(RunSession):
    """One run below ``root``. The caller ends the children that are left."""

    def __init__(
        self,
        root: Path,
        *,
        children: Children,
        samplers: Sequence[str],
        verifiers: Sequence[str] = (),
        contributors: Sequence[str] = (),
    ) -> None:
        """Prepare a run of a coordinator, a learner and these peers; nothing is written yet."""
        self.directory = RunDirectory(root)
        self.samplers, self.verifiers = tuple(samplers), tuple(verifiers)
        super().__init__(
            self.directory,
            enrolled=(*samplers, *verifiers, *contributors),
            children=children,
            ready_timeout_s=READY_TIMEOUT_S,
        )

    async def make(self, model: Path, changes: Mapping[str, Mapping[str, Section]]) -> None:
        """Make the run on ``model``, start its coordinator and let everybody in.

        Args:
            changes: process -> section -> what is other than in ``DEMO``.
        Raises:
            ChildError: the coordinator did not come up.
        """
        self.directory.make_folders()
        self.directory.model.symlink_to(model)
        await self.make_run(
            {
                name: self._document(name, changes.get(name, {}))
                for name in (COORDINATOR, LEARNER, *self._enrolled)
            }
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.start(COORDINATOR, environ={}))
            for name in self._enrolled:
                tasks.create_task(self.let_in(name))

    def shut_out(self) -> dict[str, Standing]:
        """Return who is quarantined."""
        with reading(self.directory.ledger) as connection:
            return {one.sampler_id: one for one in facts_in(connection, Standing) if one.quarantine}

    def _document(self, name: str, changes: Mapping[str, Section]) -> dict[str, Section]:
        role, ports = name.partition("-")[0], self.ports
        if name == COORDINATOR:
            own: Section = {
                "listen": f"127.0.0.1:{ports.members}",
                "enrolment_listen": f"127.0.0.1:{ports.enrolment}",
            }
        else:
            own = {"model_dir": str(self.directory.model)}
        dials = None if name == COORDINATOR else ports.members
        document = {**self.directory.place(name, ports, dials=dials), role: {**own, **DEMO[role]}}
        return document | {key: {**document.get(key, {}), **section} for key, section in changes.items()}


async def demo_model(
    root: Path, *, accuracy: float = BASE_ACCURACY, seed: int = 0, width: int = MODEL_WIDTH
) -> Path:
    """Make a model that adds two digits as often right as told; return its directory below ``root``."""
    (root / "logs").mkdir(parents=True, exist_ok=True)
    model = root / "model"
    async with children_below(root) as children:
        options = ("--accuracy", str(accuracy), "--seed", str(seed), "--width", str(width))
        await children.run("model", "deploy.demo.warm_start", str(model), *options)
    return model


async def in_turn(
    root: Path, cases: Sequence[C], measure: Callable[[C, Path, Children], Coroutine[Any, Any, M]]
) -> AsyncIterator[tuple[C, M]]:
    """Measure each case in a run of its own below ``root``, where what was measured is kept too.

    Raises:
        ChildError: a process ended.
    """
    for number, case in enumerate(cases):
        place = root / f"run-{number}"
        async with children_below(place) as children:
            one = await children.guard(measure(case, place, children))
        (place / "measured.json").write_text(json.dumps({"case": str(case), **asdict(one)}))
        yield case, one


def run_parser(name: str, doc: str, cases: Sequence[str]) -> argparse.ArgumentParser:
    """Return the options of a command that measures each of ``cases``, or some, in a run of its own."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=doc.partition("\n")[0])
    parser.add_argument("cases", nargs="*", choices=[*cases, []], default=[], help="default: all of them")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--directory", help="where the runs are kept; default: a temporary one")
    return parser


def kept_below(
    directory: str | None, name: str, measure_all: Callable[[Path], Coroutine[Any, Any, bool]]
) -> int:
    """Measure below a directory, a temporary one unless it is given; return the exit code."""
    root = Path(directory or tempfile.mkdtemp(prefix=f"heterorl-{name}-"))
    try:
        return 0 if asyncio.run(measure_all(root)) else 1
    except asyncio.CancelledError:
        say(f"stopped by a signal; every process has ended, logs are below {root}")
        return 1
    except (ChildError, TimeoutError) as error:
        say(f"a run failed: {error or 'too slow'}; logs are below {root}")
        return 1


def say(text: str) -> None:
    """Tell the person at the terminal."""
    print(text, file=sys.stderr, flush=True)
