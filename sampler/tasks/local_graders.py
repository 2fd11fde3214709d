"""What this sampler has for graders that need more than a function, and whether it is enough for a run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from node.errors import ConfigError
from node.extras import NeededPackage
from node.task_options import JsonlOptions, JudgeOptions
from sampler.tasks.judge_endpoint import JudgeEndpoint

GROUP_SHARE: Final = 0.9
"""Share of ``sampler.grader_wall_limit_s`` after which a judge's group is given back. Later the process would
be killed, which would blame the prompt."""


@dataclass(frozen=True, slots=True)
class LocalGraders:
    """Parts of the sampler's configuration."""

    judge: JudgeEndpoint | None
    wall_limit_s: float

    def settings(self, options: JsonlOptions, group_size: int) -> Mapping[str, Any]:
        """Return what the task needs to know of this sampler.

        Raises:
            ConfigError: the run asks for what this sampler does not allow, or leaves no time for.
            StartupError: the package or the key is missing.
        """
        return {} if options.judge is None else self._judge_settings(options.judge, group_size)

    def _judge_settings(self, options: JudgeOptions, group_size: int) -> Mapping[str, Any]:
        if (judge := self.judge) is None:
            raise ConfigError(
                key="coordinator.task_options.grader",
                value="judge",
                source="the coordinator",
                rule="this sampler has no judge",
                fix="Set sampler.judge.url and sampler.judge.models, or change the task's options.",
            )
        if options.model not in judge.models:
            raise ConfigError(
                key="coordinator.task_options.judge.model",
                value=options.model,
                source="the coordinator",
                rule=f"sampler.judge.models has {', '.join(judge.models)}",
                fix="Add it there, where its cost is yours to spend, or change the task's options.",
            )
        NeededPackage("grader = 'judge'", "httpx", extra="judge").check()
        judge.api_key()
        turns = math.ceil(group_size / judge.concurrency)
        self._check_time(
            turns * judge.timeout_s / GROUP_SHARE,
            f"the judge may take {judge.timeout_s} s for each of {group_size} completions, "
            f"{judge.concurrency} at a time",
            "Or lower sampler.judge.timeout_s, or raise sampler.judge.concurrency.",
        )
        return {"judge": judge.model_dump(mode="json"), "group_limit_s": GROUP_SHARE * self.wall_limit_s}

    def _check_time(self, needed_s: float, because: str, other_fix: str) -> None:
        if self.wall_limit_s < needed_s:
            raise ConfigError(
                key="sampler.grader_wall_limit_s",
                value=self.wall_limit_s,
                source="the configuration",
                rule=f"must be at least {math.ceil(needed_s)} for this run: {because}",
                fix=f"Set it to {math.ceil(needed_s)}. {other_fix}",
            )


NO_LOCAL_GRADERS: Final = LocalGraders(judge=None, wall_limit_s=math.inf)
"""Of a sampler that is not configured for any."""
