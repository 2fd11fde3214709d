"""A sampler's means for graders that need more than a function, checked against a run's needs."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from node.errors import ConfigError
from node.extras import NeededPackage
from node.task_options import CodeOptions, JsonlOptions, JudgeOptions
from sampler.api_key import api_key_in, checked_key

GROUP_SHARE: Final = 0.9
"""Share of ``sampler.grader_wall_limit_s`` after which a judge's group is given back. Later the process would
be killed, which would blame the prompt."""

PROGRAMS_AT_ONCE: Final = 8
"""Most sandboxes side by side of a grader process; fewer where there are fewer cores."""

PROXIES: Final = tuple(
    name
    for upper in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
    for name in (upper, upper.lower())
)
"""Variables that may hold a password, and that only our own judge gets unasked."""


class JudgeEndpoint(BaseModel):
    """Section ``[sampler.judge]``. Without it this sampler asks no judge, whatever the run wants."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$")
    """Base of an OpenAI-compatible API, such as ``https://api.example.org/v1``; ``/chat/completions`` is
    appended. Redirects are not followed."""

    models: tuple[str, ...] = Field(min_length=1)
    """Models that a run may ask for. Each completion costs a request, at this sampler's expense."""

    api_key_file: Path | None = None
    """File with the API key. Unset, and ``api_key_env`` too: none is sent."""

    api_key_env: str | None = None
    """Environment variable with the API key."""

    timeout_s: float = Field(default=20.0, gt=0, le=600)
    """Longest time for one request, from asking to the end of the answer."""

    concurrency: int = Field(default=8, ge=1, le=256)
    """Requests at once, of each grader process; ``grader_processes`` bounds these."""

    attempts: int = Field(default=4, ge=1, le=20)
    """Requests for one completion at most. After the last the group is given back."""

    @model_validator(mode="after")
    def _has_one_key(self) -> Self:
        if self.api_key_file is not None and self.api_key_env is not None:
            raise ValueError("api_key_file and api_key_env are both set: leave one out")
        return self

    def api_key(self) -> str | None:
        """Return the key; None: none is sent. StartupError if there is none where the configuration says."""
        if self.api_key_file is not None:
            return api_key_in(self.api_key_file, setting="sampler.judge.api_key_file")
        if self.api_key_env is not None:
            return checked_key(
                os.environ.get(self.api_key_env, ""),
                where=f"The variable {self.api_key_env}",
                fix="Set it, or correct sampler.judge.api_key_env.",
            )
        return None


@dataclass(frozen=True, slots=True)
class LocalGraders:
    """Parts of the sampler's configuration."""

    judge: JudgeEndpoint | None
    run_code: bool
    wall_limit_s: float
    memory_limit_bytes: float
    environment: tuple[str, ...] = ()
    """Variables that the owner lets every grader have."""

    @property
    def judge_environment(self) -> tuple[str, ...]:
        """Variables that asking the judge needs: its key's, and how to reach it."""
        key = self.judge.api_key_env if self.judge is not None else None
        return (*PROXIES, *([key] if key else []))

    def settings(self, options: JsonlOptions, group_size: int) -> Mapping[str, Any]:
        """Return what the task needs to know of this sampler.

        Raises:
            ConfigError: the run asks for what this sampler does not allow or leaves no time for, or the
                package is not installed.
            StartupError: there is no API key, or the sandbox does not start.
        """
        if options.judge is not None:
            return self._judge_settings(options.judge, group_size)
        return {} if options.code is None else self._code_settings(options.code, group_size)

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
        NeededPackage("sampler.judge.url", judge.url, "httpx", extra="judge").check()
        judge.api_key()
        turns = math.ceil(group_size / judge.concurrency)
        self._check_time(
            turns * judge.timeout_s / GROUP_SHARE,
            f"the judge may take {judge.timeout_s} s for each of {group_size} completions, "
            f"{judge.concurrency} at a time",
            "Or lower sampler.judge.timeout_s, or raise sampler.judge.concurrency.",
        )
        return {"judge": judge.model_dump(mode="json"), "group_limit_s": GROUP_SHARE * self.wall_limit_s}

    def _code_settings(self, options: CodeOptions, group_size: int) -> Mapping[str, Any]:
        if not self.run_code:
            raise ConfigError(
                key="coordinator.task_options.grader",
                value="code",
                source="the coordinator",
                rule="this sampler runs no programs that a policy wrote: sampler.run_code = false",
                fix="Set it to true, after reading what the sandbox prevents, or change the task's options.",
            )
        if options.memory_limit_bytes > self.memory_limit_bytes:
            raise ConfigError(
                key="sampler.grader_memory_limit_bytes",
                value=self.memory_limit_bytes,
                source="the configuration",
                rule=f"must be at least code.memory_limit_bytes = {options.memory_limit_bytes} of the run",
                fix="Raise it, or lower the run's.",
            )
        # Here: every grader process imports this module, and few need asyncio.
        from sampler.tasks.code.code_grader import completion_limit_s
        from sampler.tasks.code.sandbox import find_sandbox

        at_once = min(PROGRAMS_AT_ONCE, len(os.sched_getaffinity(0)))
        completion_s = completion_limit_s(options)
        self._check_time(
            math.ceil(group_size / at_once) * completion_s,
            f"each of {group_size} programs may take {completion_s:.0f} s, {at_once} at a time here",
            "Or lower code.time_limit_s or code.most_tests of the run.",
        )
        find_sandbox().check()
        return {"at_once": at_once}

    def _check_time(self, needed_s: float, because: str, other_fix: str) -> None:
        if self.wall_limit_s < needed_s:
            raise ConfigError(
                key="sampler.grader_wall_limit_s",
                value=self.wall_limit_s,
                source="the configuration",
                rule=f"must be at least {math.ceil(needed_s)} for this run: {because}",
                fix=f"Set it to {math.ceil(needed_s)}. {other_fix}",
            )


NO_LOCAL_GRADERS: Final = LocalGraders(
    judge=None, run_code=False, wall_limit_s=math.inf, memory_limit_bytes=math.inf
)
"""A sampler that is not configured for any."""
