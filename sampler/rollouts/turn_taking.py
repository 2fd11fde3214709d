"""The turns of the groups being generated: drawn, replied to by the task, and gone on with.

    begin --> all first turns, one request --+--> over
                                             +--> reply --> next turn, a request of its own --+--> over
                                                    ^-----------------------------------------'

After the first turn the completions of a group go on independently. A group is generated when all of its
conversations are over. A task that does not reply has one turn.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, Protocol

import numpy as np

from sampler.engines.engine import GenerationRequest, Tokenizer
from sampler.engines.text.stop_strings import text_before_stop
from sampler.metrics import SamplerMetrics
from sampler.rollouts.conversation import Conversation
from sampler.rollouts.run_task import RunTask
from sampler.rollouts.work_queue import Job
from sampler.tasks.processes.grader_requests import TaskError

_SEPARATOR: Final = "/"
"""Between a lease, whose id has none, and the number of a completion, in the id of a request."""


class Requests(Protocol):
    """Where requests go: an ``EngineThread``, or an engine itself."""

    def add(self, request: GenerationRequest) -> None: ...
    def cancel(self, request_ids: Sequence[str]) -> None: ...


class TurnTaking:
    """The groups in the engine, and those whose conversations wait for a reply."""

    def __init__(self, tokenizer: Tokenizer, *, engine_thread: Requests, metrics: SamplerMetrics) -> None:
        self._tokenizer = tokenizer
        self._engine_thread = engine_thread
        self._metrics = metrics
        self._jobs: dict[str, Job] = {}

    def begin(self, job: Job) -> None:
        """Generate the first turns of a job."""
        assert job.prompt is not None, "a job that generates has a prompt"
        lease = job.lease
        self._jobs[lease.lease_id] = job
        self._engine_thread.add(
            GenerationRequest(lease.lease_id, job.prompt.token_ids, lease.group_size, lease.sampling)
        )

    def cancel(self, lease_ids: Iterable[str]) -> None:
        """Forget groups, whatever of them is under way; ignore those not being generated."""
        for lease_id in lease_ids:
            if (job := self._jobs.pop(lease_id, None)) is not None:
                later = (_request_id(lease_id, number) for number in range(len(job.conversations)))
                self._engine_thread.cancel([lease_id, *later])

    def note(self, finished: GenerationRequest, task: RunTask) -> tuple[Job, list[Conversation]] | None:
        """Add the turns of a finished request; return its job and what waits for a reply.

        None if the group was cancelled meanwhile, even if its lease has come again.
        """
        lease_id, number = split_request_id(finished.request_id)
        job = self._jobs.get(lease_id)
        if job is None:
            return None
        speaking = job.conversations if number is None else (job.conversations[number],)
        if any((conversation.turns == 0) != (number is None) for conversation in speaking):
            return None
        for conversation, drawn in zip(speaking, finished.completions, strict=True):
            text = text_before_stop(self._tokenizer.decode(drawn.token_ids), job.lease.sampling.stop)
            conversation.add_turn(drawn, text)
            if not conversation.is_over and conversation.turns == task.description.max_turns:
                conversation.is_over = True
        return job, [conversation for conversation in speaking if not conversation.is_over]

    async def reply(self, job: Job, conversation: Conversation, task: RunTask) -> None:
        """Ask the task for a reply to a conversation's newest turn, and generate the next one.

        Raises:
            TaskError: there is no reply that the conversation could go on with. Not raised where the group
                was cancelled meanwhile.
        """
        prompt = job.prompt
        assert prompt is not None, "a job that generates has a prompt"
        try:
            with self._metrics.reply_seconds.time():
                reply = await task.reply(prompt, conversation.messages, self._tokenizer)
        except TaskError:
            if self._has(job):
                raise
            return
        if not self._has(job):
            return
        if reply is None:
            conversation.is_over = True
            return
        messages, token_ids = reply
        sampling = job.lease.sampling
        room = conversation.add_reply(token_ids, messages, max_tokens=sampling.max_new_tokens)
        if not room:
            return
        self._engine_thread.add(
            GenerationRequest(
                _request_id(job.lease.lease_id, job.conversations.index(conversation)),
                np.concatenate([prompt.token_ids, conversation.token_ids]),
                wanted=1,
                sampling=replace(sampling, max_new_tokens=room),
            )
        )

    def take_generated(self, job: Job) -> bool:
        """Forget a job whose conversations are all over; return whether it is one."""
        if not self._has(job) or not all(conversation.is_over for conversation in job.conversations):
            return False
        del self._jobs[job.lease.lease_id]
        return True

    def _has(self, job: Job) -> bool:
        return self._jobs.get(job.lease.lease_id) is job


def split_request_id(request_id: str) -> tuple[str, int | None]:
    """Return the lease of a request and, after the first turn, the number of its completion."""
    lease_id, _, number = request_id.partition(_SEPARATOR)
    return lease_id, int(number) if number else None


def _request_id(lease_id: str, number: int) -> str:
    return f"{lease_id}{_SEPARATOR}{number}"
