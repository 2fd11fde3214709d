"""Groups as a benchmark makes them: what it does not say is as if a sampler had drawn them just now."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from node.values.groups.rollout import Completion, RolloutGroup
from node.values.groups.sampling_parameters import SamplingParameters

_USUAL: Final[Mapping[str, Any]] = {
    "run_id": "bench",
    "layout_digest": bytes(16),
    "tokenizer_digest": bytes(16),
    "task": "bench",
    "prompt_index": 0,
}


def made_group(
    group_id: str,
    prompt: NDArray[np.int32],
    completions: Sequence[Completion],
    sampling: SamplingParameters,
    *,
    now: float = 2.0,
    **others: Any,
) -> RolloutGroup:
    """Return a group that was graded at ``now``, Unix seconds; ``others`` are fields of its own."""
    return RolloutGroup(
        group_id=group_id,
        prompt_token_ids=prompt,
        completions=tuple(completions),
        sampling=sampling,
        sampling_started_at_s=now - 2,
        sampling_finished_at_s=now - 1,
        graded_at_s=now,
        **{**_USUAL, **others},
    )
