"""A prompt that does not fit is refused with the key that helps."""

import numpy as np
import pytest

from node.errors import Reason
from node.values.groups.sampling_parameters import SamplingParameters
from sampler.engines.engine import GenerationRequest, check_fits
from support.refusals import refused


def request(prompt_tokens: int, *, max_new_tokens: int) -> GenerationRequest:
    sampling = SamplingParameters(1.0, 1.0, 0, max_new_tokens)
    return GenerationRequest("0.1", np.zeros(prompt_tokens, np.int32), 2, sampling)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_new_tokens", "said"),
    [
        (600, 8, "set max_prompt_tokens = 504 in coordinator.task_options, and shorten or remove such rows"),
        (510, 8, "set max_prompt_tokens = 504 in coordinator.task_options"),
        (100, 500, "lower coordinator.max_new_tokens to 412 or less"),
    ],
)
def test_the_hint_names_a_key_that_helps(prompt_tokens: int, max_new_tokens: int, said: str) -> None:
    check_fits(request(12, max_new_tokens=500), 512)
    check_fits(request(prompt_tokens, max_new_tokens=max_new_tokens), None)
    with refused(Reason.OVER_LIMIT, "512") as error:
        check_fits(
            request(prompt_tokens, max_new_tokens=max_new_tokens), 512, what="the engine", or_raise="more"
        )
    assert said in error.value.fix
    assert error.value.fix.endswith(", or more")
