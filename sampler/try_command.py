"""``heterorl-node try``: ask the base model a task's first prompts and grade them, before a run exists.

Prompts, sampling and grader are those of a coordinator's configuration; model, engine and what graders may do
are a sampler's. One start-up, no coordinator, nothing written.
"""

import argparse
import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from node.checks.check import START, require
from node.checks.start_checks import start_checks
from node.config.setting_sources import read_flags
from node.config.settings import load
from node.coordinator.config import CoordinatorConfig
from node.coordinator.data.row_sources import open_rows, scratch_directory
from node.coordinator.data.rows import START_CHECK_S, RowCheck, Rows
from node.coordinator.work.slots.prompt_order import prompt_of_slot
from node.exit_code import ExitCode
from node.telemetry import printed_lines
from node.text.visible_text import quoted, visible
from node.values.groups.rollout import PromptLease
from node.values.roles import Role
from sampler.config import SamplerConfig
from sampler.metrics import SamplerMetrics
from sampler.rollouts.run_task import RunTask
from sampler.rollouts.trial import Trial, TriedGroup, summary
from sampler.sampler_role import load_configured_engine

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EXAMPLE: Final = """\
  heterorl-node try --config coordinator.toml --model-dir models/base
  heterorl-node try --config coordinator.toml --config sampler.toml -n 16 --json
  heterorl-node try --config coordinator.toml --model-dir models/base --set coordinator.temperature=0.7 \\
    --set 'coordinator.task_options={prompt="question",grader="mine:grade"}' \\
    --set 'sampler.allowed_graders=["mine:grade"]'

A group teaches where its completions get different rewards. Where few do, the task is too hard or too easy
for this model, the prompt does not say what the grader wants, or max_new_tokens cuts the answers off.
"""

PROMPTS: Final = 4
"""Enough to see a wrong template or grader; the share of groups that teach wants more."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--config", action="append", default=[], type=Path, metavar="FILE", dest="files",
        help="a TOML file with [coordinator], and perhaps one with [sampler]; later files win",
    )  # fmt: skip
    parser.add_argument("--model-dir", metavar="DIR", help="the base model (sampler.model_dir)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="assignments",
        help="set any key of either section; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "-n", type=_count, default=PROMPTS, dest="prompts", help=f"prompts; default: {PROMPTS}"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Ask, grade and show.

    Raises:
        NotReadyError, ConfigError, StartupError: as a start of the two roles does.
    """
    given = {} if arguments.model_dir is None else {"--model-dir": ("sampler.model_dir", arguments.model_dir)}
    # Nothing is dialled or written; a role's configuration is refused without these all the same.
    unused = ["node.coordinator=127.0.0.1:7700", f"node.state_dir={scratch_directory()}"]
    flags = read_flags(given, [*unused, *arguments.assignments])
    roles = ["coordinator", "sampler"]
    config = load(roles=roles, files=arguments.files, environ=os.environ, flags=flags).config
    require(start_checks(config, (Role.COORDINATOR, Role.SAMPLER), now=time.time()), needs=START)
    coordinator, sampler = config.section(CoordinatorConfig), config.section(SamplerConfig)
    from tokenizers import Tokenizer  # a core install, whose --help and refusal these are too, lacks it

    with printed_lines.shown():
        groups, facts = asyncio.run(_tried(coordinator, sampler, wanted=arguments.prompts))
    totals = {**summary(groups), **facts}
    tokenizer = Tokenizer.from_file(str(sampler.model_dir / "tokenizer.json"))
    if arguments.json:
        shown = [
            asdict(group) | {"prompt": _text(tokenizer, group), "teaches": group.teaches} for group in groups
        ]
        print(json.dumps({"groups": shown, "summary": totals}))
    else:
        _show(groups, totals, tokenizer)
    return ExitCode.FAILED if totals["failed_prompts"] == len(groups) else ExitCode.DRAINED


async def _tried(
    coordinator: CoordinatorConfig, sampler: SamplerConfig, *, wanted: int
) -> tuple[list[TriedGroup], dict[str, Any]]:
    """Return the groups, and what else there is to say of the trial."""
    metrics = SamplerMetrics(CollectorRegistry())
    groups: list[TriedGroup] = []
    async with AsyncExitStack() as stack:
        rows = None
        if coordinator.data:
            check = RowCheck(coordinator.built_in_options, limit_s=START_CHECK_S)
            scratch = scratch_directory()
            rows = open_rows(coordinator.data, scratch=scratch, columns=coordinator.columns, check=check)
            stack.callback(rows.close)
            if unusable := rows.tally.summary():
                print(f"warning: {visible(unusable)}; a run leaves them out", file=sys.stderr)
        # The graders start first: what is wrong with them is found before the model is loaded.
        task = await RunTask.load(
            coordinator.task,
            coordinator.task_options,
            digest=coordinator.task_digest,
            rows=0 if rows is None else rows.prompts,
            group_size=coordinator.group_size,
            config=sampler,
            metrics=metrics,
        )
        stack.push_async_callback(task.graders.close)
        leases = list(_leases(coordinator, rows, prompts=task.prompts, wanted=wanted))
        engine = await asyncio.to_thread(load_configured_engine, sampler)
        stack.callback(engine.close)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        progress = stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
        bar = progress.add_task("prompts answered", total=len(leases))

        def done(group: TriedGroup) -> None:
            groups.append(group)
            progress.advance(bar)

        began = time.monotonic()
        options = coordinator.built_in_options
        await Trial(engine, task, options=options, metrics=metrics, done=done).run(leases)
        took_s = time.monotonic() - began
    is_counted = rows is not None or coordinator.known_prompts == task.prompts
    return groups, {
        "seconds": took_s,
        "task_digest": task.digest.hex(),
        "grader_digest": task.description.code_digest.hex(),
        "prompts_to_set": None if is_counted else task.prompts,
    }


def _leases(
    coordinator: CoordinatorConfig, rows: Rows | None, *, prompts: int, wanted: int
) -> Iterator[PromptLease]:
    """Yield leases on the prompts that a run would ask first."""
    prompts -= coordinator.evaluation_settings.held_out_prompts
    order = (prompt_of_slot(slot, prompts=prompts, seed=coordinator.prompt_seed) for slot in range(prompts))
    usable = (index for index in order if rows is None or rows.is_usable(index))
    for slot, index in enumerate(itertools.islice(usable, wanted)):
        yield PromptLease(
            f"{slot}.1",
            coordinator.task,
            index,
            coordinator.group_size,
            coordinator.sampling,
            ttl_s=0.0,
            row=b"" if rows is None else rows.row(index),
            task_digest=coordinator.task_digest,
        )


def _text(tokenizer: "Tokenizer", group: TriedGroup) -> str:
    """Return the prompt as the model reads it, special tokens included."""
    text: str = tokenizer.decode(list(group.prompt_token_ids), skip_special_tokens=False)
    return text


def _show(groups: Sequence[TriedGroup], totals: dict[str, Any], tokenizer: "Tokenizer") -> None:
    # Lines are not wrapped, and text is no markup: a completion may hold [square brackets].
    console = Console(soft_wrap=True, highlight=False, file=sys.stdout)
    for group in groups:
        teaches = "teaches" if group.teaches else "failed" if group.problem else "teaches nothing"
        heading = f"prompt {group.prompt_index}, {len(group.prompt_token_ids)} tokens: {teaches}"
        console.print(Text(heading, "bold"))
        if group.prompt_token_ids:
            console.print(Text(quoted(_text(tokenizer, group)), "dim"))
        if group.right_answers:
            console.print(Text(f"right answer {quoted(' or '.join(group.right_answers))}", "bold"))
        if group.problem:
            console.print(Text(visible(group.problem), "red"))
        for one in group.completions:
            numbers = {name: value for name, value in one["metrics"].items() if value is not None}
            measured = "".join(f", {name} {value:.4g}" for name, value in numbers.items())
            style = "green" if (one["reward"] or 0) > 0 else "yellow"
            reward = "no reward" if one["reward"] is None else f"reward {one['reward']:.4g}"
            console.print(Text(f"{reward}, {one['tokens']} tokens, {one['finish']}{measured}", style))
            console.print(Text(quoted(one["text"])))
            if "no_answer" in one:
                console.print(Text(f"no answer: {one['no_answer']}", style))
            for name in ("graded", "compared"):
                if name in one:
                    console.print(Text(f"{name} {quoted(one[name])}", style))
        console.print()
    console.print(Text("\n".join(_lines(totals)), "bold"))


def _lines(totals: dict[str, Any]) -> Iterator[str]:
    yield f"{totals['prompts']} prompts, {totals['failed_prompts']} failed, {totals['seconds']:.1f} s"
    if "reward_mean" in totals:
        yield (
            f"reward {totals['reward_mean']:.3f}, {totals['teaching_share']:.0%} of the groups teach, "
            f"{totals['cut_share']:.0%} of the completions cut at max_new_tokens"
        )
        yield (
            f"completions of {totals['tokens_mean']:.0f} tokens, at most {totals['tokens_max']}; "
            f"prompts of at most {totals['prompt_tokens_max']}"
        )
    yield f"grader code {totals['grader_digest']}"
    if (prompts := totals["prompts_to_set"]) is not None:
        yield f"the task has {prompts} prompts: set coordinator.prompts = {prompts}, which a run needs"
