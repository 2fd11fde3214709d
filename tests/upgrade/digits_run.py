"""A run of real processes that rewards digits: coordinator, learner, relays and samplers of a tiny model."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from deploy.runs.processes import ONE_THREAD_EACH
from deploy.runs.promises import promises_of_any_run
from deploy.runs.records import StepTail, read_ledger
from deploy.runs.run_directory import COORDINATOR, LEARNER, Ports, RunDirectory, Section, role_of
from support.tiny_model import make_tiny_model

RELAY: Final = "relay-1"
TESTS: Final = Path(__file__).parents[1]
ROOT: Final = TESTS.parent
ENVIRON: Final = {
    **os.environ,
    **ONE_THREAD_EACH,
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "proto", TESTS))),
}


def make_directory(root: Path) -> RunDirectory:
    """Make a run's folders and its model."""
    directory = RunDirectory(root)
    directory.make_folders()
    make_tiny_model(directory.model, hidden=32, layers=1)
    return directory


def configuration(
    name: str, directory: RunDirectory, ports: Ports, *, own: Mapping[str, Section]
) -> dict[str, Section]:
    """Return the configuration of a process.

    Args:
        own: keys that this run sets besides, by role. Samplers with ``relays`` do not know the coordinator.
    """
    model = {"model_dir": str(directory.model), "threads": 1}
    sections: dict[str, Section] = {
        COORDINATOR: {
            "listen": f"127.0.0.1:{ports.members}",
            "enrolment_listen": f"127.0.0.1:{ports.enrolment}",
            "task": "digits",
            "prompts": 100,
            "group_size": 4,
            "batch_groups": 4,
            "max_staleness_versions": 64,
            "max_new_tokens": 6,
            "heartbeat_interval_s": 0.25,
            "concurrency_groups": 8,
        },
        LEARNER: {**model, "learning_rate": 1e-4},
        "relay": {"listen": f"127.0.0.1:{ports.others[RELAY]}"},
        "sampler": {**model, "concurrency_groups": 4},
    }
    role = role_of(name)
    section = {**sections[role], **own.get(role, {})}
    dials = None if name == COORDINATOR or "relays" in section else ports.members
    document = {**directory.place(name, ports, dials=dials), role: section}
    if role == "sampler":
        document["sampler.custom_tasks"] = {"digits": "upgrade.digits_task:DigitsTask"}
    return document


def broken_promises(directory: RunDirectory, steps: StepTail, exit_codes: Mapping[str, int]) -> list[str]:
    """Return what a run that has ended did not keep of what is promised of any."""
    checks = promises_of_any_run(
        versions=len(steps.read()),
        steps=steps.steps,
        ledger=read_ledger(directory.ledger, run_id=directory.run_id),
        exit_codes=exit_codes,
    )
    return [f"{check.promise}: {check.figures}" for check in checks if not check.is_kept]
