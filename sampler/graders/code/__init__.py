"""The share of a row's tests that the program in a completion passes, in sandboxes."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from node.errors import ConfigError
from node.grading.completion import CompletionText, Graded, GraderOutageError, Row
from node.grading.grader import TIMED_NOISE, AnswerGrader, check_time, option_refused
from node.questions.answer_part import answer_part
from node.questions.data_row import column_of
from node.tasks.task_options import TaskNeeds
from sampler.graders.code.code_options import CodeOptions, CodeSettings
from sampler.graders.code.program_tests import check_tests
from sampler.tasks.processes.grader_link import check_socket

PROGRAMS_AT_ONCE: Final = 8
"""Most sandboxes side by side of a grader process; fewer where there are fewer cores."""


class CodeGrader(AnswerGrader):
    """Runs the programs of a group against their row's tests, which are the column ``answer``."""

    table = CodeOptions
    settings = CodeSettings
    noise_ratio = TIMED_NOISE
    options: CodeOptions

    def check_row(self, row: Row) -> None:
        check_tests(row, self.question.answer, self.options)

    def right_answers(self, row: Row) -> tuple[str, ...]:
        """Return none: tests are not answers."""
        return ()

    @classmethod
    def check_peer(cls, peer: Any) -> None:
        if peer.run_code:
            _check_sandbox(peer)

    def needs_of(self, peer: Any, *, group_size: int) -> TaskNeeds:
        from sampler.graders.code.program_runs import completion_limit_s

        if not peer.run_code:
            raise option_refused(
                "grader",
                "code",
                f"this {peer.section} runs no programs that a policy wrote: {peer.section}.run_code = false",
                "Set it to true, after reading what the sandbox prevents",
            )
        needed_bytes = self.options.memory_limit_bytes
        if needed_bytes > peer.grader_memory_limit_bytes:
            raise ConfigError(
                key=f"{peer.section}.grader_memory_limit_bytes",
                value=peer.grader_memory_limit_bytes,
                source="the configuration",
                rule=f"must be at least code.memory_limit_bytes = {needed_bytes} of the run",
                fix="Raise it, or lower the run's.",
            )
        at_once = min(PROGRAMS_AT_ONCE, len(os.sched_getaffinity(0)))
        completion_s = completion_limit_s(self.options)
        check_time(
            peer,
            math.ceil(group_size / at_once) * completion_s,
            f"each of {group_size} programs may take {completion_s:.0f} s, {at_once} at a time here",
            "Or lower code.time_limit_s or code.most_tests of the run.",
        )
        _check_sandbox(peer)
        socket = peer.programs_socket
        local = {"at_once": at_once, "is_sandbox_tried": socket is None}
        return TaskNeeds(local, served_at=str(socket or ""))

    def start(self, local: Mapping[str, Any]) -> None:
        from sampler.graders.code.program_runs import ProgramRuns
        from sampler.graders.code.sandbox import find_sandbox

        sandbox = find_sandbox()
        if not local["is_sandbox_tried"]:
            sandbox.check()
        self._runs = ProgramRuns(self.options, sandbox, at_once=local["at_once"])

    def grade_group(self, row: Row, completions: Sequence[CompletionText]) -> list[Graded]:
        # What continues a prefix keeps its indentation.
        parts = (answer_part(each.text, each.finish, self.question) for each in completions)
        texts = [part.text or "" for part in parts]
        try:
            verdicts = self._runs.verdicts(row, column_of(row, self.question.answer), texts)
        except GraderOutageError as error:
            self.outages[error.outage] += 1
            raise
        grades: list[Graded] = []
        for verdict in verdicts:
            share = verdict.passed / verdict.tests
            reward = share if self.options.reward == "share" else float(share == 1.0)
            metrics = {"passed": share, "timed_out": verdict.timed_out, "crashed": verdict.crashed}
            grades.append((reward, metrics))
        return grades


def _check_sandbox(peer: Any) -> None:
    """Raise StartupError if programs cannot be run: neither here nor where ``programs_socket`` is."""
    from sampler.graders.code.sandbox import find_sandbox

    if peer.programs_socket is None:
        find_sandbox().check()
    else:
        check_socket(peer.programs_socket)


GRADER: Final = CodeGrader
