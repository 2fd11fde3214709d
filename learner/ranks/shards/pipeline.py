"""One stage's part in running micro-batches through a pipeline, by torch.distributed.pipelining.

    first stage --hidden states--> ... --> last stage --> logprobs, and the loss of each micro-batch
                <--their gradient-- ... <--

torch's stages have buffers of one shape for all micro-batches, so these are padded to the longest row and to
as many rows. They have a buffer for each micro-batch, so these run in rounds of a few.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor

from learner.model.micro_batches import MicroBatch, padded
from learner.model.model import Take, Weigh
from learner.model.scorer import Scorer

MICRO_BATCHES_A_STAGE: Final = 4
"""Micro-batches of a round, for each stage. A round of m on p stages is idle for (p - 1) / (m + p - 1) of its
time (arXiv:2104.12369), here less than a fifth; its buffers hold the hidden states of m micro-batches."""


class Pipeline:
    """Runs micro-batches through all stages, together with the ranks that have the others."""

    def __init__(
        self,
        scorer: Scorer,
        stage: int,
        *,
        stages: int,
        group: ProcessGroup,
        tied: "TiedEmbedding | None",
        device: torch.device,
    ) -> None:
        """Run one stage's part.

        Args:
            scorer: of this stage's modules.
            group: the ranks of all stages, in order.
            tied: on the first and last stage of a trained model whose head is the embedding.
        """
        self._scorer = scorer
        self._stage = stage
        self._stages = stages
        self._group = group
        self._device = device
        self._tied = tied
        self._width: int = scorer.model.config.get_text_config().hidden_size
        self._dtype = scorer.master_dtype

    def score(self, parts: Sequence[MicroBatch], take: Take) -> None:
        """As ``ScoringModel.score``; logprobs are taken on the last stage alone."""
        with torch.no_grad():
            self._run(parts, take, weigh=None)

    def differentiate(self, parts: Sequence[MicroBatch], weigh: Weigh) -> None:
        """As ``ScoringModel.differentiate``; logprobs are weighed on the last stage alone."""
        self._run(parts, None, weigh=weigh)
        if self._tied is not None:
            self._tied.add_up()

    def _run(self, parts: Sequence[MicroBatch], take: Take | None, *, weigh: Weigh | None) -> None:
        rows = max(len(part.input_ids) for part in parts)
        length = max(part.input_ids.shape[1] for part in parts)
        equal = [padded(part, rows=rows, length=length) for part in parts]
        most = MICRO_BATCHES_A_STAGE * self._stages
        for first in range(0, len(parts), most):
            self._run_round(equal[first : first + most], take, weigh=weigh)

    def _run_round(self, parts: Sequence[MicroBatch], take: Take | None, *, weigh: Weigh | None) -> None:
        count, ids = len(parts), torch.cat([part.input_ids for part in parts])
        is_first, is_last = self._stage == 0, self._stage == self._stages - 1
        shape = (len(ids) // count, ids.shape[1], self._width)
        # Shapes that are stated are not asked of the other stages, which torch does with pickled objects.
        hidden = torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=weigh is not None)
        stage = PipelineStage(
            _StageOfRound(self._scorer, parts, take if is_last else None),
            self._stage,
            self._stages,
            self._device,
            input_args=ids[: shape[0]].to("meta") if is_first else hidden,
            output_args=hidden[:, 0, 0] if is_last else hidden,
            group=self._group,
        )
        kind = Schedule1F1B if count >= self._stages else ScheduleGPipe
        loss = None if weigh is None else partial(_weighed_sum, parts, weigh)
        schedule = kind(stage, count, loss_fn=loss, scale_grads=False)
        numbers = torch.arange(count)
        target = None if weigh is None else numbers
        schedule.step(*((ids,) if is_first else ()), number=numbers, target=target, return_outputs=False)


class TiedEmbedding:
    """A parameter that the first stage and the last have; each has a part of its gradient."""

    def __init__(self, parameter: Tensor, group: ProcessGroup) -> None:
        self.parameter = parameter
        self._group = group

    @torch.no_grad()
    def add_up(self) -> None:
        """Replace each gradient by the sum of the two."""
        gradient = self.parameter.grad
        assert gradient is not None
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        dist.all_reduce(local, group=self._group)


class _StageOfRound(torch.nn.Module):
    """A stage with the micro-batches of a round.

    torch's pipelining resets the gradients of FSDP2's modules in a new stage. Here they are those of earlier
    rounds, so the scorer is called without being one of the stage's modules.
    """

    def __init__(self, scorer: Scorer, parts: Sequence[MicroBatch], take: Take | None) -> None:
        super().__init__()
        self._score = partial(scorer)
        self._parts = parts
        self._take = take

    def forward(self, inputs: Tensor, *, number: Tensor) -> Any:
        """Return what the next stage is sent; the last stage's logprobs."""
        part = self._parts[int(number)]
        made = self._score(inputs, *part.asked)
        if self._take is not None:
            self._take(part, made)
        return made


def _weighed_sum(parts: Sequence[MicroBatch], weigh: Weigh, logprob: Tensor, number: Tensor) -> Tensor:
    """Return a scalar whose gradient at the logprobs is their weights."""
    return (weigh(parts[int(number)], logprob) * logprob).sum()
