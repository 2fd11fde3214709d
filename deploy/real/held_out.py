"""The held-out prompts of a run, made as its samplers make them."""

import json
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from deploy.real.greedy_texts import Prompt
from node.config.settings import load
from node.coordinator.config import CoordinatorConfig
from node.coordinator.data.row_sources import open_rows
from node.values.evaluation import Evaluation
from node.values.groups.sampling_parameters import SamplingParameters
from sampler.config import SamplerConfig
from sampler.rollouts.task_setup import task_setup
from sampler.tasks.task import Row, load_task


def settings_of(files: Sequence[Path]) -> CoordinatorConfig:
    """Return the coordinator's settings in its files."""
    resolved = load(roles=["coordinator"], files=files, environ={})
    return resolved.config.section(CoordinatorConfig)


def greedy(settings: CoordinatorConfig) -> SamplingParameters:
    """Return the run's sampling with the most likely token each time."""
    return replace(settings.sampling, temperature=1.0, top_p=1.0, min_p=0.0, top_k=1)


def prompts_of(evaluation: Evaluation, settings: CoordinatorConfig, *, model_dir: Path) -> list[Prompt]:
    """Return the prompts that an evaluation asked."""
    indices = range(evaluation.first_prompt, evaluation.first_prompt + evaluation.prompts)
    task = load_task(task_setup(SamplerConfig(model_dir=model_dir), settings.task, settings.task_options))
    rows: dict[int, Row | None] = dict.fromkeys(indices)
    if settings.data is not None:
        source = open_rows(settings.data, scratch=Path(tempfile.gettempdir()))
        with closing(source):
            rows = {index: json.loads(source.row(index)) for index in indices}
    return [task.prompt(index, rows[index]) for index in indices]
