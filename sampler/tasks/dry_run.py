"""Checks that run code: whether graders can be imported, and whether the chat template renders."""

import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from node.errors import ConfigError, StartupError
from sampler.tasks.grader_process import START_TIMEOUT_S, environment

_IMPORT: Final = "import pkgutil, sys; pkgutil.resolve_name(sys.argv[1])"

_RENDER: Final = """
import sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True)
messages = [{"role": "user", "content": "1+1="}]
tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
"""


def check_imports(key: str, paths: Iterable[str], variables: Collection[str]) -> None:
    """Import ``package.module:name`` each, as graders do; ConfigError for the first that cannot be."""
    for path in paths:
        if problem := _problem(_IMPORT, path, variables):
            raise ConfigError(
                key=key,
                value=path,
                source="the configuration",
                rule=f"cannot be imported: {problem}",
                fix="Install it where this sampler's Python finds it, or correct the name.",
            )


def check_template(model_dir: Path) -> None:
    """Render a question by the model's chat template; StartupError if it does not take one."""
    if problem := _problem(_RENDER, str(model_dir), ()):
        raise StartupError(
            f"the chat template of {model_dir} does not render a question: {problem}",
            fix="Correct chat_template.jinja or tokenizer_config.json there, or set chat = false in "
            "coordinator.task_options.",
        )


def _problem(program: str, argument: str, variables: Collection[str]) -> str:
    """Return the last line that a program ended with; empty where it worked."""
    try:
        ended = subprocess.run(
            [sys.executable, "-c", program, argument],
            env=environment(variables),
            capture_output=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {START_TIMEOUT_S:.0f} s"
    lines = ended.stderr.decode(errors="replace").strip().splitlines()
    return "" if ended.returncode == 0 else (lines or [f"exit code {ended.returncode}"])[-1][:500]
