"""The run's task on this sampler: what the coordinator asks for, against what the owner allows and has here.

Options are the run's; judge, sandbox, environments and graders of one's own are the sampler's to allow.
"""

import math
import os
from collections.abc import Mapping
from typing import Any, Final

from node.errors import ConfigError
from node.extras import NeededPackage
from node.task_options import (
    GRADERS,
    CodeOptions,
    JsonlOptions,
    JudgeOptions,
    PromptOptions,
    TaskOptions,
    VerifiersOptions,
    checked_options,
)
from node.tokenizer import chat_template
from sampler.config import GradingConfig
from sampler.tasks.code.code_grader import completion_limit_s
from sampler.tasks.task import TaskSetup, import_path

GROUP_SHARE: Final = 0.9
"""Share of ``grader_wall_limit_s`` after which a judge's group is given back. Later the process would
be killed, which would blame the prompt."""

PROGRAMS_AT_ONCE: Final = 8
"""Most sandboxes side by side of a grader process; fewer where there are fewer cores."""

PROXIES: Final = tuple(
    name
    for upper in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
    for name in (upper, upper.lower())
)
"""Variables that may hold a password, and that only our own judge gets unasked."""


def task_setup(
    config: GradingConfig,
    name: str,
    options: Mapping[str, Any],
    *,
    group_size: int = 1,
    grades: bool = True,
) -> TaskSetup:
    """Return the run's task on this peer, from the name and options that the coordinator sent.

    Blocks for a moment where the task needs the sandbox, which is tried. Where this peer does not grade, it
    needs nothing that only graders do: no judge, sandbox or grader of one's own.

    Raises:
        ConfigError: the name is neither built in nor in ``custom_tasks``, this peer does not allow
            what an option names or leaves it no time, or a package that it needs is not installed.
        StartupError: it needs a key or a sandbox, and there is none here.
    """
    path = import_path(name, config.custom_tasks, section=config.section)
    if name in config.custom_tasks:
        return TaskSetup(path, options, environment=config.grader_environment, section=config.section)
    try:
        checked = checked_options(name, options)
    except ValueError as error:
        raise _wrong_options(options, str(error)) from error
    is_for_prompts = isinstance(checked, JsonlOptions) and not grades
    if not is_for_prompts:
        _check_code(config, checked)
    if not is_for_prompts and checked is not None and checked.package is not None:
        NeededPackage(
            "coordinator.task", name, checked.package, extra=checked.extra, source="the coordinator"
        ).check()
    has_chat_template = bool(chat_template(config.model_dir))
    if not has_chat_template and (need := _template_need(checked)):
        raise _wrong_options(options, f"{need}, and this {config.section}'s model has no chat template")
    local: Mapping[str, Any] = {}
    variables: tuple[str, ...] = config.grader_environment
    if isinstance(checked, PromptOptions):
        options = {**options, "chat": checked.chat is not False and has_chat_template}
    if is_for_prompts:
        local = {"grades": False}
    elif isinstance(checked, JsonlOptions) and checked.judge is not None:
        local = _judge_settings(config, checked.judge, group_size)
        key = config.judge.api_key_env if config.judge is not None else None
        variables = (*variables, *PROXIES, *([key] if key else []))
    elif isinstance(checked, JsonlOptions) and checked.code is not None:
        local = _code_settings(config, checked.code, group_size)
    served_at = str(config.programs_socket or "") if "is_sandbox_tried" in local else ""
    return TaskSetup(
        path,
        options,
        getattr(checked, "template_arguments", {}),
        local,
        variables,
        served_at=served_at,
        section=config.section,
    )


def _template_need(options: TaskOptions | None) -> str | None:
    if isinstance(options, VerifiersOptions):
        return "its prompts are messages"
    if not isinstance(options, PromptOptions):
        return None
    if options.chat is True:
        return "chat = true"
    if isinstance(options, JsonlOptions) and options.tools is not None:
        return "tools are a column of the rows"
    return "template_arguments are set" if options.template_arguments else None


def _check_code(config: GradingConfig, options: TaskOptions | None) -> None:
    """Raise if the options name code that this peer does not allow."""
    if isinstance(options, JsonlOptions) and options.grader not in GRADERS:
        option, code = "grader", options.grader
    elif isinstance(options, VerifiersOptions):
        option, code = "environment", options.loader
    else:
        return
    if code not in config.allowed_graders:
        raise _refused(
            option,
            code,
            f"{config.section}.allowed_graders has {', '.join(config.allowed_graders) or 'nothing'}",
            "Add it there, where you trust it and have it installed",
        )


def _judge_settings(config: GradingConfig, options: JudgeOptions, group_size: int) -> Mapping[str, Any]:
    """Return what the task needs to know of this peer's judge."""
    if (judge := config.judge) is None:
        raise _refused(
            "grader",
            "judge",
            f"this {config.section} has no judge",
            f"Set {config.section}.judge.url and {config.section}.judge.models",
        )
    if options.model not in judge.models:
        raise _refused(
            "judge.model",
            options.model,
            f"{config.section}.judge.models has {', '.join(judge.models)}",
            "Add it there, where its cost is yours to spend",
        )
    NeededPackage(f"{config.section}.judge.url", judge.url, "httpx", extra="judge").check()
    judge.api_key()
    turns = math.ceil(group_size / judge.concurrency)
    _check_time(
        config,
        turns * judge.timeout_s / GROUP_SHARE,
        f"the judge may take {judge.timeout_s} s for each of {group_size} completions, "
        f"{judge.concurrency} at a time",
        f"Or lower {config.section}.judge.timeout_s, or raise {config.section}.judge.concurrency.",
    )
    return {"judge": judge.model_dump(mode="json"), "group_limit_s": GROUP_SHARE * config.grader_wall_limit_s}


def _code_settings(config: GradingConfig, options: CodeOptions, group_size: int) -> Mapping[str, Any]:
    """Return what the task needs to know of this peer's sandbox."""
    if not config.run_code:
        raise _refused(
            "grader",
            "code",
            f"this {config.section} runs no programs that a policy wrote: {config.section}.run_code = false",
            "Set it to true, after reading what the sandbox prevents",
        )
    if options.memory_limit_bytes > config.grader_memory_limit_bytes:
        raise ConfigError(
            key=f"{config.section}.grader_memory_limit_bytes",
            value=config.grader_memory_limit_bytes,
            source="the configuration",
            rule=f"must be at least code.memory_limit_bytes = {options.memory_limit_bytes} of the run",
            fix="Raise it, or lower the run's.",
        )
    at_once = min(PROGRAMS_AT_ONCE, len(os.sched_getaffinity(0)))
    completion_s = completion_limit_s(options)
    _check_time(
        config,
        math.ceil(group_size / at_once) * completion_s,
        f"each of {group_size} programs may take {completion_s:.0f} s, {at_once} at a time here",
        "Or lower code.time_limit_s or code.most_tests of the run.",
    )
    config.check_sandbox()
    return {"at_once": at_once, "is_sandbox_tried": config.programs_socket is None}


def _check_time(config: GradingConfig, needed_s: float, because: str, other_fix: str) -> None:
    if config.grader_wall_limit_s < needed_s:
        raise ConfigError(
            key=f"{config.section}.grader_wall_limit_s",
            value=config.grader_wall_limit_s,
            source="the configuration",
            rule=f"must be at least {math.ceil(needed_s)} for this run: {because}",
            fix=f"Set it to {math.ceil(needed_s)}. {other_fix}",
        )


def _refused(option: str, value: str, rule: str, way_out: str) -> ConfigError:
    return ConfigError(
        key=f"coordinator.task_options.{option}",
        value=value,
        source="the coordinator",
        rule=rule,
        fix=f"{way_out}, or change the task's options.",
    )


def _wrong_options(options: Mapping[str, Any], rule: str) -> ConfigError:
    return ConfigError(
        key="coordinator.task_options",
        value=dict(options),
        source="the coordinator",
        rule=rule,
        fix="Change them at the coordinator and restart it.",
    )
