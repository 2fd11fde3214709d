"""Learners of several processes on gloo, each beside a learner of one process that takes the same steps."""

import copy
import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from learner.config import LearnerConfig
from learner.objective.registry import load_objective
from learner.ranks.errors import RankLostError
from learner.ranks.launching import Fleet
from learner.ranks.mesh_sizes import MeshSizes
from learner.ranks.rank_group import RankGroup
from learner.ranks.shard_words import ShardWords
from learner.training.checkpoint import load_into, parts_of
from learner.training.model import Policy, ScoringModel, load_policy
from learner.training.tensor_files import save_tensors
from learner.training.train_step import StepSettings, train_step
from support.made_up_groups import VERSION, made_up_groups
from support.step_settings import make_step_settings

STEPS: Final = 3
LIMIT: Final = timedelta(seconds=120)


@dataclass(frozen=True)
class Case:
    """A layout, a model, and settings of the steps that differ from ``make_step_settings``."""

    sizes: MeshSizes
    model: str = "llama"
    objective: str = "drift_aware"
    settings: Mapping[str, Any] | None = None
    has_reference: bool = False
    checkpoints_activations: bool = False


@dataclass(frozen=True)
class Compared:
    """Figures of a case, from the first rank."""

    difference: float
    """Largest of any parameter, from one process."""
    moved: float
    """Largest change of any parameter."""
    held_share: float
    """Elements of parameters, gradients and moments on the fullest rank, over those of one process."""
    figures_differ_by: float
    """Largest relative difference of loss, norm, KL and ESS of any step."""
    sizes: str
    """After sharding: a family without a plan has no slices."""


def tiny_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 44,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 2,
    }
    model: PreTrainedModel
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=8, tie_word_embeddings=False))
    else:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=44, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    return model.double()


def compare(case: Case) -> Compared:
    """Take the same steps in one process and in all; called on every rank."""
    model = tiny_model(case.model)
    reference = copy.deepcopy(model)
    with torch.no_grad():  # the base model is another one, or the penalty has no gradient at first
        for parameter in reference.parameters():
            parameter.mul_(1.01)
    reference.requires_grad_(False)
    start = copy.deepcopy(model)
    group = RankGroup(case.sizes, device_type="cpu")
    one, shared = (
        Policy(copy.deepcopy(model), checkpoints_activations=case.checkpoints_activations, **ranks)
        for ranks in ({}, {"ranks": group})
    )
    references: list[ScoringModel | None] = [None, None]
    if case.has_reference:
        references = [ScoringModel(copy.deepcopy(reference)), ScoringModel(reference, ranks=group)]
    settings = make_step_settings(
        objective=load_objective(case.objective),
        **{"micro_batch_tokens": 24, "gradient_clip_norm": 0.05, "kl_coefficient": 0.005}
        | dict(case.settings or {}),
    )
    optimizers = [
        torch.optim.AdamW(policy.parameters.values(), lr=1e-2, weight_decay=0.1, fused=True)
        for policy in (one, shared)
    ]
    differ = 0.0
    for number in range(STEPS):
        outcomes = [
            train_step(
                policy,
                optimizer,
                made_up_groups(number),
                version=VERSION,
                settings=settings,
                reference=reference,
            )
            for policy, optimizer, reference in zip((one, shared), optimizers, references, strict=True)
        ]
        assert all(outcome.is_applied for outcome in outcomes)
        figures = [
            torch.tensor([o.loss, o.gradient_norm, o.kl_nats, o.ess_ratio, o.surprisal_nats, o.tokens])
            for o in (replace(outcome) for outcome in outcomes)
        ]
        differ = max(differ, float(((figures[0] - figures[1]).abs() / figures[0].abs()).max()))
    assert shared.is_finite()
    whole = {name: _whole(tensor.detach()) for name, tensor in shared.tensors.items()}
    first = start.state_dict()
    held = torch.tensor(_elements(shared, optimizers[1], group.local) / _elements(one, optimizers[0]))
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return Compared(
        difference=max(float((whole[n] - p.detach()).abs().max()) for n, p in one.tensors.items()),
        moved=max(float((first[n] - p.detach()).abs().max()) for n, p in one.tensors.items()),
        held_share=float(held),
        figures_differ_by=differ,
        sizes=str(group.sizes),
    )


def _elements(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    local: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> int:
    """Count what a rank holds of parameters, gradients, which are as large, and moments."""
    count = sum(2 * local(p.detach()).numel() for p in policy.parameters.values())
    return count + sum(local(value).numel() for state in optimizer.state.values() for value in state.values())


def _whole(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def run_on_ranks(work: Callable[..., None], *arguments: Any, ranks: int) -> None:
    """Call ``work(*arguments)`` in as many processes that know each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_run, args=(ranks, port, work, arguments), nprocs=ranks)  # type: ignore[no-untyped-call]


def _run(rank: int, ranks: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks, timeout=LIMIT
    )
    work(*arguments)
    dist.destroy_process_group()


def compare_all(cases: Mapping[str, Case], path: Path) -> None:
    """Compare each case; the first rank writes the figures."""
    figures = {name: asdict(compare(case)) for name, case in cases.items()}
    if dist.get_rank() == 0:
        path.write_text(json.dumps(figures))


def save_and_publish(directory: Path) -> None:
    """Take steps on four ranks; leave their checkpoint, its words, and the masters one step later.

    The first half is taken as two copies of two shards, and goes on as two slices of two shards: a checkpoint
    is loaded into another layout here too.
    """
    settings = make_step_settings(objective=load_objective("drift_aware"))
    first, second = MeshSizes(2, 2, 1), MeshSizes(1, 2, 2)
    saved: Path | None = None
    for number, sizes in enumerate((first, second)):
        group = RankGroup(sizes, device_type="cpu")
        policy = Policy(tiny_model("qwen3"), ranks=group)
        optimizer = torch.optim.AdamW(policy.parameters.values(), lr=1e-2, fused=True)
        if saved is not None:
            load_into(policy, optimizer, saved)
        train_step(policy, optimizer, made_up_groups(number), version=VERSION, settings=settings)
        saved = directory / f"checkpoint-{number}"
        for name, tensors in parts_of(policy, optimizer).items():
            if dist.get_rank() == 0:
                (saved / name).mkdir(parents=True)
            dist.barrier()
            save_tensors(saved / name, tensors, group=group.saves.group)
        words = policy.master_words
        assert isinstance(words, ShardWords)
        if dist.get_rank() == 0:
            made = np.empty(policy.layout.words, np.uint16)
            words.snapshot(made)
            words.end()
            np.save(directory / f"words-{number}.npy", made)
        else:
            words.follow()
        dist.barrier()


def lead(_: int, model_dir: Path, path: Path) -> None:
    """Be the first of two ranks and start the other; take steps, lose it, and write down what came of it."""
    config = LearnerConfig(model_dir=model_dir, learning_rate=1e-2, dp_shard=2, rank_timeout_s=LIMIT.seconds)
    settings = StepSettings.of(config)
    fleet = Fleet(config)
    shared, one = (
        load_policy(model_dir, device="cpu", ranks=fleet.group),
        load_policy(model_dir, device="cpu"),
    )
    fleet.leads(shared)
    optimizers = [torch.optim.AdamW(p.parameters.values(), lr=1e-2, fused=True) for p in (shared, one)]
    fleet.group.follow_writes(optimizers[0])
    words = []
    for number in range(2):
        for policy, optimizer in zip((shared, one), optimizers, strict=True):
            groups = made_up_groups(number)
            train_step(policy, optimizer, groups, version=VERSION, settings=settings)
            assert policy.is_finite()
    for policy in (shared, one):
        words.append(np.empty(policy.layout.words, np.uint16))
        policy.snapshot(words[-1])
    [child] = fleet.children
    child.process.kill()
    child.process.wait()
    try:
        train_step(shared, optimizers[0], made_up_groups(2), version=VERSION, settings=settings)
    except RankLostError as error:
        said = str(error)
    differing = float((words[0] != words[1]).mean())
    path.write_text(json.dumps({"said": said, "pid": child.process.pid, "differing_words": differing}))
