"""One run through the real daemon: processes, TLS, and a second sampler behind a long line.

learner, sampler-1 --> coordinator <--2.5 s each way-- sampler-2
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

from bench.ranking_lab.baselines import OBJECTIVES
from bench.ranking_lab.ranker import Ranker, read_rows
from deploy.real.real_plan import RANKING, TASK_FILES
from deploy.runs.observation import Observation
from deploy.runs.processes import Children, children_below
from deploy.runs.promises import promises_of_any_run, reward_at_first, reward_at_last, staleness_of
from deploy.runs.records import read_ledger
from deploy.runs.run_directory import COORDINATOR, LEARNER, Ports, RunDirectory, Section
from deploy.runs.run_session import RunSession

NEAR: Final = "sampler-1"
FAR: Final = "sampler-2"
LINK: Final = "link"
LINK_FLAGS: Final = ("--delay-ms", "2500")
"""One way."""

MAX_STALENESS_VERSIONS: Final = 128
"""Some times what the far sampler is behind: about three round trips, at two to four versions a second."""

BUFFER_GROUPS: Final = 16
"""Two batches: what is sampled faster than it is trained on would wait, and grow old, in a longer queue."""

FAR_GROUPS: Final = 32
"""At work at the far sampler: most of their time they are under way."""

ENOUGH: Final = 0.97
"""Mean nDCG of drawn rankings, over the learner's default window of batches, at which a run ends early.
Beyond it ever more batches are of best rankings alone, teach nothing and make no version, so that the last
of many versions would not come."""

READY_TIMEOUT_S: Final = 300.0
STALL_S: Final = 300.0
"""Several runs share the machine's cores."""

_POLL_S: Final = 0.5
_TENTHS: Final = 10


@dataclass(frozen=True, slots=True)
class Plan:
    """A run."""

    baseline: str
    seed: int
    versions: int
    model: Path
    data: Path
    held_out: int
    """Rows at the end of the data that are never trained on."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The records of a run; nDCG everywhere."""

    baseline: str
    seed: int
    elapsed_s: float
    versions: int
    """Made, until there were as many as planned or nDCG was ENOUGH."""
    first: float
    """The first batches, as drawn."""
    last: float
    held_out_base: float
    """Likeliest rankings of held-out rows, by the base model."""
    held_out: float
    """The same by the last version, as exported."""
    tenths: tuple[float, ...]
    """All batches, by tenth of the run."""
    staleness_versions: dict[str, tuple[int, float]]
    """Sampler -> groups trained on, and their mean staleness."""
    broken: tuple[str, ...]
    """Promises of any run that were not kept."""


async def daemon_run(plan: Plan, root: Path, show: Callable[[Observation], None]) -> Outcome:
    """Run below ``root``, which is made.

    Raises:
        ChildError: a process ended by itself, or the learner made no step for STALL_S.
    """
    began_s = time.monotonic()
    async with children_below(root) as children:
        return await children.guard(_run(plan, root, children, show, began_s=began_s))


async def _run(
    plan: Plan, root: Path, children: Children, show: Callable[[Observation], None], *, began_s: float
) -> Outcome:
    directory = RunDirectory(root)
    directory.make_folders()
    session = RunSession(
        directory,
        enrolled=(NEAR, FAR),
        children=children,
        others=(LINK,),
        recipe={
            COORDINATOR: (RANKING / "coordinator.toml", TASK_FILES["ranking"]),
            LEARNER: (RANKING / "learner.toml",),
            **dict.fromkeys((NEAR, FAR), (RANKING / "sampler.toml",)),
        },
        ready_timeout_s=READY_TIMEOUT_S,
    )
    ports = session.ports
    await session.make_run(_additions(plan, directory, ports))
    listen, target = (f"127.0.0.1:{port}" for port in (ports.others[LINK], ports.members))
    line = ("deploy.demo.link_emulator", *LINK_FLAGS, "--listen", listen, "--target", target)
    await children.start(LINK, *line, environ={})
    await session.start(COORDINATOR, environ={})
    for name in (NEAR, FAR):
        await session.let_in(name)
    async with asyncio.TaskGroup() as tasks:
        for name in (LEARNER, FAR):
            tasks.create_task(session.start(name, environ={}))
    observer = session.observer(began_s=began_s)
    # The near one alone may learn it all in the minute that the far one takes to connect and deliver.
    async with asyncio.timeout(READY_TIMEOUT_S):
        while not (await observer.observe()).version:
            await session.wait_for_last_step(timeout_s=_POLL_S)
    await session.start(NEAR, environ={})
    await session.watch(observer, show, poll_s=_POLL_S, stall_s=STALL_S)
    steps = (await observer.observe()).steps
    exit_codes = {**await session.drain(), LINK: await children.stop(LINK)}
    exported = root / "export"
    where = ("--state-dir", str(directory.state(LEARNER)), "--model-dir", str(plan.model))
    await children.run("export", "node", "export", str(exported), *where)
    versions = steps[-1].version if steps else 0
    promises = promises_of_any_run(
        versions=versions,
        steps=steps,
        ledger=read_ledger(directory.ledger, run_id=directory.run_id),
        exit_codes=exit_codes,
    )
    base_score, score = await asyncio.to_thread(_held_out, plan, exported)
    rewards = [step.reward_mean for step in steps]
    return Outcome(
        baseline=plan.baseline,
        seed=plan.seed,
        elapsed_s=round(time.monotonic() - began_s, 1),
        versions=versions,
        first=round(reward_at_first(steps), 4),
        last=round(reward_at_last(steps), 4),
        held_out_base=round(base_score, 4),
        held_out=round(score, 4),
        tenths=tuple(
            round(fmean(rewards[len(rewards) * n // _TENTHS : len(rewards) * (n + 1) // _TENTHS]), 4)
            for n in range(_TENTHS)
        ),
        staleness_versions={name: staleness_of(name, steps) for name in (NEAR, FAR)},
        broken=tuple(f"{one.promise}: {one.figures}" for one in promises if not one.is_kept),
    )


def _held_out(plan: Plan, exported: Path) -> tuple[float, float]:
    rows = read_rows(plan.data)[-plan.held_out :]
    base, trained = (Ranker(model, seed=0).score(rows) for model in (plan.model, exported))
    return base, trained


def _additions(plan: Plan, directory: RunDirectory, ports: Ports) -> dict[str, dict[str, Section]]:
    """Return what each process's own file adds to the recipe ``ranking-cpu``."""
    model = {"model_dir": str(plan.model)}
    sections: dict[str, dict[str, Section]] = {
        COORDINATOR: {
            "coordinator": {
                "listen": f"127.0.0.1:{ports.members}",
                "enrolment_listen": f"127.0.0.1:{ports.enrolment}",
                "prompt_seed": plan.seed,
                "max_staleness_versions": MAX_STALENESS_VERSIONS,
                "buffer_groups": BUFFER_GROUPS,
            },
            "coordinator.data": {"file": str(plan.data), "evaluation_rows": plan.held_out},
            # The exported version is asked instead: an evaluation would hold the far sampler up.
            "coordinator.evaluation": {"every_versions": 0, "prompts": plan.held_out},
        },
        LEARNER: {
            "learner": {
                **model,
                "objective": OBJECTIVES[plan.baseline],
                "buffer_groups": BUFFER_GROUPS,
                "max_versions": plan.versions,
                "stop_at_reward": ENOUGH,
            }
        },
        NEAR: {"sampler": {**model, "seed": 2 * plan.seed}},
        FAR: {"sampler": {**model, "seed": 2 * plan.seed + 1, "concurrency_groups": FAR_GROUPS}},
    }
    dialled = {COORDINATOR: None, FAR: ports.others[LINK]}
    return {
        name: {**directory.place(name, ports, dials=dialled.get(name, ports.members)), **its}
        for name, its in sections.items()
    }
