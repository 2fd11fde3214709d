"""The writers of steps that a learner's configuration asks for: samples, TensorBoard, W&B."""

from learner.config import LearnerConfig
from learner.metrics import LearnerMetrics
from learner.records.sample_writer import SampleWriter, load_tokenizer
from learner.records.trackers import TensorBoardWriter, WandbWriter
from learner.records.writer_thread import StepWriter, WriterThread
from node.page.run_sections import SHOWN_GROUPS, RunView, run_sections
from node.page.samples_file import FILE_NAME, SamplesFile
from node.process.role_context import RoleContext


def step_writers(
    context: RoleContext, config: LearnerConfig, *, metrics: LearnerMetrics
) -> list[WriterThread]:
    """Return the writers that are configured, each with its thread; show the newest samples on the page."""
    samples = SamplesFile(context.state_dir / FILE_NAME)
    context.page.add(
        context.run.run_id, lambda: run_sections(RunView(samples=samples.newest(SHOWN_GROUPS)[::-1]))
    )
    writers: list[StepWriter] = []
    if config.samples_every_versions:
        tokenizer = load_tokenizer(config.model_dir)
        every_versions, groups = config.samples_every_versions, config.samples_groups
        writers.append(SampleWriter(samples, tokenizer, every_versions=every_versions, groups=groups))
    if config.tensorboard_dir is not None:
        writers.append(TensorBoardWriter(config.tensorboard_dir))
    if config.wandb_project is not None:
        writers.append(
            WandbWriter(
                config.wandb_project,
                run_id=context.run.run_id,
                directory=context.state_dir,
                configuration=config.model_dump(mode="json"),
            )
        )
    return [WriterThread(writer, metrics=metrics) for writer in writers]
