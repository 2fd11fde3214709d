"""The run's task on this sampler: what the coordinator asks for, against what the owner allows and has here.

Options are the run's; judge, sandbox, environments and graders of one's own are the sampler's to allow.
"""

from collections.abc import Mapping
from typing import Any

from node.errors import ConfigError
from node.grading.grader import option_refused
from node.system.extras import NeededPackage
from node.tasks.task_options import PromptOptions, TaskNeeds, TaskOptions, checked_options
from node.text.tokenizer import chat_template
from sampler.config import GradingConfig
from sampler.tasks.task import TaskSetup, import_path


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
    if checked is None:
        raise AssertionError(f"{name} is built in, and has options")
    for_prompts = checked.prompts_alone and not grades
    if not for_prompts:
        _check_permission(config, checked)
        if checked.package is not None:
            NeededPackage(
                "coordinator.task", name, checked.package, extra=checked.extra, source="the coordinator"
            ).check()
    has_chat_template = bool(chat_template(config.model_dir))
    if not has_chat_template and (need := checked.template_need):
        raise _wrong_options(options, f"{need}, and this {config.section}'s model has no chat template")
    if isinstance(checked, PromptOptions):
        options = {**options, "chat": checked.chat is not False and has_chat_template}
    needs = TaskNeeds({"grades": False}) if for_prompts else checked.needs_of(config, group_size=group_size)
    return TaskSetup(
        path,
        options,
        getattr(checked, "template_arguments", {}),
        needs.local,
        (*config.grader_environment, *needs.environment),
        served_at=needs.served_at,
        section=config.section,
    )


def _check_permission(config: GradingConfig, options: TaskOptions) -> None:
    """Raise if the options name code that this peer does not allow."""
    if options.named_code is None:
        return
    option, code = options.named_code
    if code not in config.allowed_graders:
        raise option_refused(
            option,
            code,
            f"{config.section}.allowed_graders has {', '.join(config.allowed_graders) or 'nothing'}",
            "Add it there, where you trust it and have it installed",
        )


def _wrong_options(options: Mapping[str, Any], rule: str) -> ConfigError:
    return ConfigError(
        key="coordinator.task_options",
        value=dict(options),
        source="the coordinator",
        rule=rule,
        fix="Change them at the coordinator and restart it.",
    )
