"""What a step is said to compute against what torch counts of it."""

import json

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from learner.metrics import LearnerMetrics
from learner.step_log import StepLine
from learner.training.flops import ModelSize
from learner.training.model import Policy
from learner.training.train_step import train_step
from node.run import StepReport
from support.made_up_groups import VERSION, made_up_groups
from support.step_settings import make_step_settings
from support.tiny_model import make_tiny_model

REPORT = StepReport(1, 0.5, 0.0, 0, 0.01, 0.9, 0.1, 1.0, step_s=2.0, surprisal_nats=1.0)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    model_dir = make_tiny_model(tmp_path_factory.mktemp("model"), hidden=128)
    return Policy(
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    )


def test_the_operations_of_a_pass_by_hand() -> None:
    size = ModelSize(body_parameters=100, head_parameters=30, layers=2, attention_width=4)
    # 6 x (100 x (3 + 5) + 30 x 4) + 6 x 2 x 4 x (9 + 25)
    assert size.training_flops([3, 5], targets=4) == 6 * 920 + 48 * 34


def test_tied_embeddings_multiply_once_and_tables_looked_up_in_never(policy: Policy) -> None:
    parameters = sum(tensor.numel() for tensor in policy.parameters.values())
    assert policy.size.head_parameters == 42 * 128
    assert policy.size.body_parameters == parameters - 42 * 128
    assert (policy.size.layers, policy.size.attention_width) == (2, 128)


def test_torch_counts_the_same_but_for_norms_and_the_half_of_attention_that_is_masked(
    policy: Policy,
) -> None:
    tokens = torch.arange(2, 34)[None]
    with FlopCounterMode(display=False) as counter:
        logprob = policy.token_logprobs(tokens, torch.arange(32), tokens[0], torch.ones(32))
        logprob.sum().backward()  # type: ignore[no-untyped-call]
    masked = 6 * 2 * 128 * 32**2
    said = policy.size.training_flops([32], targets=32) + masked
    assert counter.get_total_flops() == pytest.approx(said, rel=0.01)


@pytest.mark.parametrize("fast_steps", [0, 2])
def test_a_step_says_what_it_computed_however_it_is_cut(policy: Policy, fast_steps: int) -> None:
    optimizer = torch.optim.SGD(policy.parameters.values(), lr=0.0)
    groups = made_up_groups(0)
    lengths = [
        len(group.prompt_token_ids) + len(completion.token_ids) - 1
        for group in groups
        for completion in group.completions
    ]
    expected = policy.size.training_flops(lengths, targets=sum(group.tokens for group in groups))
    for micro_batch_tokens in (8, 1 << 20):
        settings = make_step_settings(fast_steps=fast_steps, micro_batch_tokens=micro_batch_tokens)
        outcome = train_step(policy, optimizer, groups, version=VERSION, settings=settings)
        assert outcome.flops == (1 + fast_steps) * expected


@pytest.mark.parametrize(("peak_tflops", "shown"), [(0.0, "NaN"), (0.5, "0.25")])
def test_utilisation_is_shown_where_the_peak_is_known(peak_tflops: float, shown: str) -> None:
    registry = CollectorRegistry()
    metrics = LearnerMetrics(registry, peak_tflops=peak_tflops)
    line = StepLine(at_s=0.0, report=REPORT, tokens=8, flops=0.25e12, groups=(), clamped_tokens=3)
    metrics.show_step(line)
    value = registry.get_sample_value("heterorl_learner_flop_utilisation_ratio")
    assert str(value).lower() == shown.lower()
    assert json.loads(line.to_json())["flops"] == 0.25e12
    assert registry.get_sample_value("heterorl_learner_clamped_tokens_total") == 3.0
    assert registry.get_sample_value("heterorl_learner_tokens_per_second") == 4.0
