"""A score that a model gives to each completion, asked over the chat API that OpenAI, vLLM and others serve.

The run says what is asked (``JudgeOptions``), each peer whom and with which key (``JudgeEndpoint``).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from node.grading.completion import CompletionText, Graded, Row
from node.grading.grader import AnswerGrader, check_time, option_refused
from node.questions.messages import content_text
from node.questions.question import question_of
from node.system.extras import NeededPackage
from node.tasks.task_options import TaskNeeds
from sampler.graders.judge.judge_endpoint import JudgeEndpoint
from sampler.graders.judge.judge_options import JudgeOptions, JudgeSettings

GROUP_SHARE: Final = 0.9
"""Share of ``grader_wall_limit_s`` after which a group is given back. Later the process would be killed,
which would blame the prompt."""

PROXIES: Final = tuple(
    name
    for upper in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
    for name in (upper, upper.lower())
)
"""Variables that may hold a password, and that only our own judge gets unasked."""


class JudgeGrader(AnswerGrader):
    """Asks about the completions of a group side by side."""

    table = JudgeOptions
    settings = JudgeSettings
    options: JudgeOptions

    @property
    def reads_answer(self) -> bool:
        return "{answer}" in self.options.template

    @classmethod
    def needed_packages(cls, peer: Any) -> tuple[NeededPackage, ...]:
        if peer.judge is None:
            return ()
        return (NeededPackage(f"{peer.section}.judge.url", peer.judge.url, "httpx", extra="judge"),)

    def needs_of(self, peer: Any, *, group_size: int) -> TaskNeeds:
        judge: JudgeEndpoint | None = peer.judge
        if judge is None:
            raise option_refused(
                "grader",
                "judge",
                f"this {peer.section} has no judge",
                f"Set {peer.section}.judge.url and {peer.section}.judge.models",
            )
        if self.options.model not in judge.models:
            raise option_refused(
                "judge.model",
                self.options.model,
                f"{peer.section}.judge.models has {', '.join(judge.models)}",
                "Add it there, where its cost is yours to spend",
            )
        for package in self.needed_packages(peer):
            package.check()
        judge.api_key()
        turns = math.ceil(group_size / judge.concurrency)
        check_time(
            peer,
            turns * judge.timeout_s / GROUP_SHARE,
            f"the judge may take {judge.timeout_s} s for each of {group_size} completions, "
            f"{judge.concurrency} at a time",
            f"Or lower {peer.section}.judge.timeout_s, or raise {peer.section}.judge.concurrency.",
        )
        local = {
            "judge": judge.model_dump(mode="json"),
            "group_limit_s": GROUP_SHARE * peer.grader_wall_limit_s,
        }
        key = (judge.api_key_env,) if judge.api_key_env else ()
        return TaskNeeds(local, (*PROXIES, *key))

    def start(self, local: Mapping[str, Any]) -> None:
        from sampler.graders.judge.asking import Judge  # httpx is an extra's

        endpoint = JudgeEndpoint.model_validate(local["judge"])
        self._judge = Judge(
            self.options, endpoint, group_limit_s=local["group_limit_s"], outages=self.outages
        )

    def grade_group(self, row: Row, completions: Sequence[CompletionText]) -> list[Graded]:
        question = question_of(row, self.question)
        if not isinstance(question, str):
            question = "\n\n".join(map(content_text, question))
        right = " or ".join(self.right_answers(row))
        answers = [self.answer_of(completion) for completion in completions]
        # Completions without an answer get 0 and are not sent to the judge.
        judged = iter(self._judge.rewards(question, right, [text for text in answers if text is not None]))
        grades: list[Graded] = []
        for answer in answers:
            reward, score = (0.0, self.options.lowest) if answer is None else next(judged)
            grades.append((reward, {"judge_score": score}))
        return grades


GRADER: Final = JudgeGrader
