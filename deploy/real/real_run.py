"""One real run, from an empty directory to an exported model and the records it is judged by."""

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from rich.console import Console

from deploy.real.digits import write_digits
from deploy.real.greedy_texts import questions_json
from deploy.real.held_out import greedy, prompts_of, settings_of
from deploy.real.outcome import ExportedModel, Outcome
from deploy.real.real_plan import MERGE, TASK_FILES, Plan, additions
from deploy.real.topics import write_topics
from deploy.real.word_problems import write_word_problems
from deploy.runs.contributions import Contributions
from deploy.runs.live_view import View
from deploy.runs.processes import Children
from deploy.runs.records import read_ledger
from deploy.runs.run_directory import COORDINATOR, LEARNER, RunDirectory
from deploy.runs.run_session import RunSession
from learner.export import best_in
from node.coordinator.config import CoordinatorConfig
from node.coordinator.ledger.ledger_check import read_evaluations
from node.values.evaluation import Evaluation

POLL_S: Final = 1.0
LINE_EVERY_S: Final = 20.0

READY_TIMEOUT_S: Final = 300.0
"""Three processes load the model on two cores; vLLM alone takes half a minute."""

STALL_S: Final = 600.0
"""The run has failed after this long without a step, which takes ten seconds."""

STOP_TIMEOUT_S: Final = 180.0
"""The learner ends its step, writes it down and publishes it first."""

_ENVIRON: Final = {
    # Threads that wait for each other let others use the core: four processes share two.
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


WRITERS: Final[Mapping[Path, Callable[[Path], None]]] = {
    TASK_FILES["jsonl"]: write_word_problems,
    TASK_FILES["ranking"]: write_topics,
    TASK_FILES["noise_mask"]: write_digits,
}
"""Task -> what writes its rows."""


async def real_run(plan: Plan, directory: RunDirectory, console: Console) -> Outcome:
    """Run a plan and return its records; shows the run on ``console``.

    Raises:
        ChildError: a process did not start, ended, or the learner made no step for STALL_S.
    """
    settings = settings_of((plan.recipe / "coordinator.toml", plan.task_file))
    data = settings.data
    write = WRITERS.get(plan.task_file)
    if write is not None and data is not None and not data.file.exists():
        write(data.file)
    began_s = time.monotonic()
    goal = str(plan.versions or f"{plan.seconds / 60:g} min")
    with View(
        console, goal=goal, samplers=tuple(plan.samplers), began_s=began_s, line_every_s=LINE_EVERY_S
    ) as view:
        environ = {**os.environ, **_ENVIRON}
        async with Children(log_of=directory.log, environ=environ, stop_timeout_s=STOP_TIMEOUT_S) as children:
            return await children.guard(_train(plan, directory, settings, children, view, began_s=began_s))


async def _train(
    plan: Plan,
    directory: RunDirectory,
    settings: CoordinatorConfig,
    children: Children,
    view: View,
    *,
    began_s: float,
) -> Outcome:
    session = RunSession(
        directory,
        enrolled=(*plan.samplers, *plan.contributor_names),
        others=(MERGE,),
        children=children,
        recipe=plan.recipe_files,
        pythons=plan.pythons,
        ready_timeout_s=READY_TIMEOUT_S,
    )
    view.say(f"run {directory.run_id} in {directory.root}")
    await session.make_run(additions(plan, directory, session.ports))
    await session.start(COORDINATOR, environ={})
    for name in (*plan.samplers, *plan.contributor_names):
        await session.let_in(name)
    await session.start_others()
    view.say("all processes serve")
    observer = session.observer(began_s=began_s)
    await session.watch(observer, view.show, poll_s=POLL_S, stall_s=STALL_S, seconds=plan.seconds)
    view.say("the time is over, or the learner has made its last version: every process drains")
    await session.end_learner()
    seen = await observer.observe()
    exit_codes = await session.drain()
    evaluations = [one for one in read_evaluations(directory.ledger) if one.has_score]
    export = None
    if seen.steps and evaluations:
        view.say("exports the best version and asks it the held-out prompts")
        export = await _exported(plan, directory, settings, children, evaluations[0])
    return Outcome(
        plan=plan,
        run_id=directory.run_id,
        elapsed_s=time.monotonic() - began_s,
        steps=seen.steps,
        ledger=read_ledger(directory.ledger, run_id=directory.run_id),
        exit_codes=exit_codes,
        evaluations=evaluations,
        export=export,
        contributions={name: Contributions.of(directory.log(name)) for name in plan.contributor_names},
    )


async def _exported(
    plan: Plan,
    directory: RunDirectory,
    settings: CoordinatorConfig,
    children: Children,
    evaluation: Evaluation,
) -> ExportedModel:
    """Export the best version, or the last where none is known to be better than the base model, and ask it.

    Args:
        evaluation: Of the prompts to ask.
    """
    target, state = directory.root / "export", directory.state(LEARNER)
    best = best_in(state / LEARNER)
    which = ("--version", str(best.version)) if best is not None and best.version else ()
    printed = await children.run(
        "export",
        *("node", "export", str(target), "--state-dir", str(state), "--model-dir", str(plan.model)),
        *(*which, "--json"),
    )
    exported = json.loads(printed)
    texts = await _greedy_texts(plan, directory, settings, children, target, evaluation)
    return ExportedModel(exported["version"], exported["root"], texts)


async def _greedy_texts(
    plan: Plan,
    directory: RunDirectory,
    settings: CoordinatorConfig,
    children: Children,
    model_dir: Path,
    evaluation: Evaluation,
) -> dict[str, list[str]]:
    """Return what the model answers to the prompts of an evaluation, by reader."""
    prompts = await asyncio.to_thread(prompts_of, evaluation, settings, model_dir=model_dir)
    questions, answers = directory.root / "questions.json", directory.root / "answers.json"
    questions.write_text(questions_json(model_dir, prompts, greedy(settings)))
    texts = {}
    for reader, python in plan.readers.items():
        arguments = ("deploy.real.greedy_texts", reader, str(questions), str(answers))
        await children.run(f"answers-{reader}", *arguments, python=python)
        texts[reader] = json.loads(answers.read_text())
    return texts
