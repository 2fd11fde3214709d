"""The verifier's work: the run's task is loaded as by a sampler, and grades groups again that others graded.
Where the run leaves grading to verifiers, it grades groups that nobody has graded.

load the task --> grade what the coordinator sends --task changed, stream lost--> again
'-- a grader that cannot repeat itself, where it should: wait until the task changes
"""

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from node.clients.membership.join_call import OwnTask
from node.clients.membership.membership_client import MembershipClient
from node.clients.rollouts.check_stream import RewardCheckClient
from node.errors import RefusedError, StartupError
from node.rpc.call_ends import ConnectionLost
from node.system.backoff import Backoff
from node.system.waits import run_until
from node.telemetry.metrics import NodeMetrics
from node.values.groups.reward_finding import GroupGrades, RewardCheck, RewardFinding
from node.values.groups.rollout import RolloutGroup
from node.values.run import RunSettings
from sampler.config import VerifierConfig
from sampler.engines.engine import Decoder
from sampler.metrics import VerifierMetrics
from sampler.rollouts.regrading import compared, completion_texts, misstated_finish, with_tokens
from sampler.rollouts.run_task import RunTask
from sampler.tasks.processes.grader_requests import Grades, TaskError

logger = logging.getLogger(__name__)

PROMPTS: Final = 1024
"""Prompts whose tokens a verifier remembers."""


class Verification:
    """A service, ready once it knows its task."""

    name = "verification"

    def __init__(
        self,
        client: RewardCheckClient,
        *,
        membership: MembershipClient,
        task_changed: asyncio.Event,
        decoder: Decoder,
        config: VerifierConfig,
        backoff: Backoff,
        metrics: VerifierMetrics,
        node_metrics: NodeMetrics,
    ) -> None:
        self._client = client
        self._membership = membership
        self._task_changed = task_changed
        self._decoder = decoder
        self._config = config
        self._backoff = backoff
        self._metrics = metrics
        self._node_metrics = node_metrics
        self._prompts: dict[tuple[bytes, int, bytes], bytes] = {}
        """Tokens of prompts that were as made here."""
        self._has_matched = False
        """Whether any group's prompt was as made here, since the task was loaded."""

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Verify until ``stopping``.

        Raises:
            ConfigError: this verifier does not know the run's task, or lacks a package that it needs.
            StartupError: the task does not start, or the tokenizer here is not the run's.
            RefusedError: for a reason after which a peer stops.
        """
        while not stopping.is_set():
            self._task_changed.clear()
            settings = await self._membership.settings()
            task = await self._load(settings)
            self._has_matched = False
            ready()
            verify = self._verify(task, repeats=not settings.verifiers_grade)
            try:
                await run_until(stopping, run_until(self._task_changed, verify))
            finally:
                await task.graders.close()

    async def _load(self, settings: RunSettings) -> RunTask:
        return await RunTask.load(
            settings.task,
            json.loads(settings.task_options_json or "{}"),
            digest=settings.task_digest,
            rows=settings.prompts,
            group_size=settings.group_size,
            config=self._config,
            metrics=self._metrics,
        )

    async def _verify(self, task: RunTask, *, repeats: bool) -> None:
        """Grade until the task changes; ``repeats``: again, what samplers have graded."""
        said = task.description
        if (repeats and said.noise_ratio is None) or said.is_stateful or said.max_turns > 1:
            logger.warning(
                "the rewards of this task cannot be worked out again",
                extra={"task": task.name, "is_stateful": said.is_stateful, "max_turns": said.max_turns},
            )
            with self._node_metrics.waiting("task whose rewards can be checked"):
                await asyncio.Event().wait()
        await self._membership.tell_task(OwnTask(0, task.digest, said.code_digest))
        while True:
            try:
                await self._client.answer(
                    lambda group, row: self._check(task, group, row),
                    task_digest=task.digest,
                    groups=self._config.groups_at_once,
                    noise_ratio=said.noise_ratio or 0.0,
                    grades_at_once=self._config.grader_processes,
                    grading_limit_s=self._config.grader_wall_limit_s,
                )
            except (RefusedError, ConnectionLost) as error:
                if isinstance(error, RefusedError) and not error.reason.is_retryable:
                    raise
                logger.warning("stream of checks lost", extra={"detail": str(error)})
            await self._backoff.wait()

    async def _check(self, task: RunTask, group: RolloutGroup, row: bytes) -> RewardFinding:
        self._backoff.reset()
        with self._metrics.check_seconds.time():
            finding = await self._finding(task, group, row)
        self._metrics.checks.labels(finding.outcome).inc()
        return finding

    async def _finding(self, task: RunTask, group: RolloutGroup, row: bytes) -> RewardFinding:
        if group.is_graded and group.grader_digest != task.description.code_digest:
            what = f"grader code {group.grader_digest.hex()} is not this verifier's"
            return RewardFinding(group.group_id, RewardCheck.SKIPPED, what)
        if group.tokenizer_digest != self._decoder.digest:  # the learner came after this verifier
            raise StartupError(
                f"the tokenizer of {self._config.model_dir} has digest {self._decoder.digest.hex()}, "
                f"the run's has {group.tokenizer_digest.hex()}",
                fix="Copy the model directory of the samplers; the weights are not needed.",
            )
        texts = await asyncio.to_thread(_decoded, group, self._decoder)
        if odd := misstated_finish(group, texts, self._decoder.end_ids):
            return RewardFinding(group.group_id, RewardCheck.UNGRADABLE, odd)
        if odd := await self._odd_prompt(task, group, row):
            outcome = RewardCheck.DISAGREED if group.is_graded else RewardCheck.UNGRADABLE
            return RewardFinding(group.group_id, outcome, odd)
        seen = completion_texts(group, texts)
        if task.description.sees_tokens:
            prompt = await asyncio.to_thread(self._decoder.decode_prompt, group.prompt_token_ids)
            seen = with_tokens(seen, group, prompt=prompt)
        try:
            grades, graded_s = await task.graders.grade_again(
                group.prompt_index, row.decode(errors="replace"), seen
            )
        except TaskError as error:
            outcome = RewardCheck.SKIPPED if error.fault is None else RewardCheck.UNGRADABLE
            return RewardFinding(group.group_id, outcome, str(error), error.fault)
        finding = compared(group, grades.as_floats) if group.is_graded else _graded(group, grades)
        return replace(finding, graded_s=graded_s)

    async def _odd_prompt(self, task: RunTask, group: RolloutGroup, row: bytes) -> str:
        """Return how a group's prompt is not the task's, for people; "" if it is, or cannot be told."""
        key, stated = (task.digest, group.prompt_index, row), group.prompt_token_ids.tobytes()
        made = self._prompts.get(key) or await self._made(task, group.prompt_index, row)
        if made == stated:
            self._has_matched = True
            self._prompts[key] = made
            if len(self._prompts) > PROMPTS:
                del self._prompts[next(iter(self._prompts))]
            return ""
        # Nothing is known of one that comes out otherwise each time, or where no prompt was ever the same.
        if not self._has_matched or made is None or made != await self._made(task, group.prompt_index, row):
            return ""
        return (
            f"its prompt {group.prompt_index} is not the task's: {len(stated) // 4} tokens, other than here"
        )

    async def _made(self, task: RunTask, index: int, row: bytes) -> bytes | None:
        try:
            prompt = await task.make_prompt(index, row, self._decoder)
        except TaskError:
            return None
        return prompt.token_ids.tobytes()


def _graded(group: RolloutGroup, grades: Grades) -> RewardFinding:
    metrics = {name: np.array(values, np.float32) for name, values in grades.metrics.items()}
    rewards = np.array(grades.as_floats, np.float32)
    return RewardFinding(group.group_id, RewardCheck.GRADED, grades=GroupGrades(rewards, metrics))


def _decoded(group: RolloutGroup, decoder: Decoder) -> list[str]:
    return [decoder.decode(one.token_ids) for one in group.completions]
