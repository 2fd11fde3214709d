"""Learners of several processes on gloo, each beside a learner of one process that takes the same steps."""

import asyncio
import copy
import faulthandler
import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, Self
from unittest import mock

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    NanoChatConfig,
    NanoChatForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from bench.forked_context import forked_context
from learner.config import LearnerConfig, Rematerialise
from learner.journal.checkpoint import ShardCopy, load_into
from learner.masters.tensor_files import save_tensors
from learner.model.model import Policy, ScoringModel, load_policy
from learner.model.rank_exchanges import Instruction
from learner.ranks import launching
from learner.ranks.errors import RankLostError
from learner.ranks.instruction_stream import InstructionStream
from learner.ranks.launching import Fleet
from learner.ranks.rank_group import RankGroup
from learner.ranks.words.sharded_words import ShardedWords
from learner.ranks.words.tensor_shards import sharding_of
from learner.sizing.mesh_sizes import MeshSizes
from learner.step.step_inputs import StepInputs
from learner.step.train_step import train_step
from learner.step.trainer import Trainer
from learner.step_settings import StepSettings
from node.errors import StartupError
from node.process.abandoned_threads import exit_without_them
from node.process.daemon import Phase, StartStage, run_daemon
from node.process.service import Service, StopsAfter
from support.float64 import in_float64
from support.made_up_groups import VERSION, made_up_groups
from support.step_settings import make_step_settings
from support.warm_python import WarmProcess

STEPS: Final = 2
"""The second has moments and parameters of the first."""
LIMIT: Final = timedelta(seconds=120)

LAYOUTS: Final = (MeshSizes(2, 2), MeshSizes(tp=2, pp=2), MeshSizes(dp_shard=2, tp=2))
"""Layouts of the successive steps of ``save_and_publish``."""


@dataclass(frozen=True)
class Case:
    """A layout, a model, and settings of the steps that differ from ``make_step_settings``."""

    sizes: MeshSizes
    model: str = "llama"
    objective: str = "drift_aware"
    settings: Mapping[str, Any] | None = None
    has_reference: bool = False
    rematerialise: Rematerialise = "none"
    layers: int = 2
    is_narrow: bool = False
    """Whether products are in bfloat16, of float32 masters; else all is in float64."""


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
    first_figures_differ_by: float
    """The same of the first step, which begins from the same parameters."""
    sizes: str
    """After sharding: a family without a plan has no slices."""


def tiny_model(kind: str, *, layers: int = 2) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 44,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 2,
    }
    model: PreTrainedModel
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    elif kind == "granite":  # scales embeddings and logits
        sizes |= {"embedding_multiplier": 3.0, "logits_scaling": 2.0}
        model = GraniteForCausalLM(GraniteConfig(**sizes, tie_word_embeddings=True))
    elif kind == "nanochat":  # caps logits
        model = NanoChatForCausalLM(NanoChatConfig(**sizes, final_logit_softcapping=0.5))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=8, tie_word_embeddings=False))
    else:
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=44, n_embd=32, n_layer=layers, n_head=4, n_positions=64)
        )
    return in_float64(model)


def compare(case: Case) -> Compared | None:
    """Take the same steps on all ranks, and in one process on the first, which returns the figures."""
    model, reference = (tiny_model(case.model, layers=case.layers) for _ in range(2))
    if case.is_narrow:
        for wide in (model, reference):
            torch.nn.Module.to(wide, torch.float32)
    with torch.no_grad():  # the base model is another one, or the penalty has no gradient at first
        for parameter in reference.parameters():
            parameter.mul_(1.01)
    reference.requires_grad_(False)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    group = RankGroup(case.sizes, device_type="cpu")
    one = None
    if dist.get_rank() == 0:
        one = Taker.of(case, copy.deepcopy(model), copy.deepcopy(reference))
    shared = Taker.of(case, model, reference, ranks=group)
    differ: list[float] = []
    for number in range(STEPS):
        figures = shared.step(number)
        if one is not None:
            expected = one.step(number)
            differ.append(float(((figures - expected).abs() / expected.abs()).max()))
    assert shared.policy.is_finite()
    difference = 0.0
    tensors = {name: start[name].clone() for name in shared.names}
    for name, tensor in tensors.items():
        if one is not None:
            tensor.copy_(one.policy.tensors[name].detach())
        dist.broadcast(tensor, src=0)
        if name in shared.policy.tensors:  # a stage has some of them
            difference = max(difference, _difference(shared.policy.tensors[name].detach(), tensor, group))
    largest = torch.tensor([difference, shared.elements()], dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if one is None:
        return None
    return Compared(
        difference=float(largest[0]),
        moved=max(float((start[name] - tensor).abs().max()) for name, tensor in tensors.items()),
        held_share=float(largest[1]) / one.elements(),
        figures_differ_by=max(differ),
        first_figures_differ_by=differ[0],
        sizes=str(group.sizes),
    )


@dataclass(frozen=True)
class Taker:
    """A model, or a rank's part of it, and what its steps take."""

    policy: Policy
    reference: ScoringModel | None
    optimizer: torch.optim.Optimizer
    settings: StepSettings

    @classmethod
    def of(cls, case: Case, model: PreTrainedModel, reference: PreTrainedModel, **ranks: Any) -> "Taker":
        ranks["compute_dtype"] = torch.bfloat16 if case.is_narrow else None
        policy = Policy(model, rematerialise=case.rematerialise, **ranks)
        optimizer = torch.optim.AdamW(policy.parameters.values(), lr=1e-2, weight_decay=0.1, fused=True)
        plain = {"micro_batch_tokens": 24, "gradient_clip_norm": 0.05, "kl_coefficient": 0.005}
        settings = make_step_settings(objective=case.objective, **plain | dict(case.settings or {}))
        base = ScoringModel(reference, **ranks) if case.has_reference else None
        return cls(policy, base, optimizer, settings)

    def step(self, seed: int) -> Tensor:
        """Take a step; return its figures."""
        outcome = train_step(
            self.policy,
            self.optimizer,
            # Equal lengths: DTensor works out each operation anew for every shape, which takes the longest.
            made_up_groups(seed, lengths=0),
            version=VERSION,
            settings=self.settings,
            reference=self.reference,
        )
        assert outcome.is_applied
        numbers = outcome.numbers
        figures = [outcome.loss, numbers.gradient_norm, numbers.kl_nats, numbers.ess_ratio, numbers.tokens]
        return torch.tensor([*figures, numbers.surprisal_nats], dtype=torch.float64)

    @property
    def names(self) -> list[str]:
        """The tensors of the whole model."""
        return [span.name for span in self.policy.layout.tensors]

    def elements(self) -> int:
        """Count what this process holds of parameters, gradients, which are as many, and moments."""
        local = self.policy.ranks.local
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        parameters = self.policy.local_parameters()
        return 2 * sum(map(Tensor.numel, parameters)) + sum(local(value).numel() for value in moments)


def _difference(part: Tensor, whole: Tensor, group: RankGroup) -> float:
    """Return the largest difference of this rank's part of a tensor from the same part of the whole one."""
    of_whole = sharding_of(part).part(whole, group.sizes.coordinate(group.rank), group.sizes)
    held = group.local(part)
    assert held.shape == of_whole.shape
    return float((held - of_whole).abs().max()) if held.numel() else 0.0


class Ranks:
    """As many processes that know each other; they do one piece of work after another."""

    def __init__(self, count: int) -> None:
        context = forked_context(__name__)
        pipes = [context.Pipe() for _ in range(count)]
        self._ours = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_work, args=(rank, count, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def run(self, work: Callable[..., None], *arguments: Any) -> None:
        """Call ``work(*arguments)`` in each; raise what the first one that fails says."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        waiting = set(self._ours)
        for pipe in self._ours:
            pipe.send((port, work, arguments))
        while waiting:
            for ready in wait(waiting):
                assert isinstance(ready, Connection)
                if said := ready.recv():
                    raise AssertionError(said)
                waiting.remove(ready)


def _work(rank: int, ranks: int, pipe: Connection) -> None:
    gc.freeze()  # collecting what was imported would copy it
    faulthandler.enable()
    torch.set_num_threads(1)
    while True:
        port, work, arguments = pipe.recv()
        try:
            dist.init_process_group(
                "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks, timeout=LIMIT
            )
            work(*arguments)
            dist.destroy_process_group()
            gc.collect()  # each group that is left has a thread that wakes all the time
            said = ""
        except Exception:
            said = f"rank {rank}: {traceback.format_exc()}"
        pipe.send(said)


def write_compared(case: Case, path: Path) -> None:
    """Compare a case; the first rank writes the figures."""
    compared = compare(case)
    if compared is not None:
        path.write_text(json.dumps(asdict(compared)))


def save_and_publish(directory: Path) -> None:
    """Take steps on four ranks, each in another layout, from the checkpoint of the one before; leave them."""
    for number, sizes in enumerate(LAYOUTS):
        take_step(directory, number, sizes)


def take_step(directory: Path, number: int, sizes: MeshSizes, suffix: str = "") -> None:
    """Take a step from the checkpoint of the step before; leave a checkpoint and its words."""
    settings = make_step_settings(objective="drift_aware")
    saved = directory / f"checkpoint-{number - 1}" if number else None
    group = RankGroup(sizes, device_type="cpu")
    policy = Policy(tiny_model("llama"), ranks=group)
    optimizer = torch.optim.AdamW(policy.parameters.values(), lr=1e-2, fused=True)
    if saved is not None:
        load_into(policy, optimizer, saved)
    train_step(policy, optimizer, made_up_groups(number), version=VERSION, settings=settings)
    saved = directory / f"checkpoint-{number}{suffix}"
    for name, tensors in ShardCopy.of(policy, optimizer, number=1).parts.items():
        if dist.get_rank() == 0:
            (saved / name).mkdir(parents=True)
        dist.barrier()
        save_tensors(saved / name, tensors, group=group.saves.exchanges)
    words = policy.master_words
    assert isinstance(words, ShardedWords)
    if dist.get_rank() == 0:
        made = np.empty(policy.layout.words, np.uint16)
        policy.snapshot(made)
        words.end()
        np.save(directory / f"words-{number}{suffix}.npy", made)
    else:
        words.follow()
    dist.barrier()


class WarmRank(WarmProcess):
    """As much of ``Popen`` as a fleet uses, of a rank that is forked warm: imports take 7 s of a core."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], stdin: int) -> None:
        heard, self._held = os.pipe()
        super().__init__(command[2:], env=env, descriptors={0: heard, 1: 1, 2: 2})
        os.close(heard)


def lead(layout: Mapping[str, Any], fault: str, model_dir: Path, path: Path) -> None:
    """Be the first of two ranks and start the other; take steps, lose it, and write down what came of it.

    Args:
        fault: "memory", for want of which what saves its shards ends it, told to expect more bytes than there
            are; or at which instruction it is stopped, and then killed: "step", "words", "save".
    """
    config = LearnerConfig(model_dir=model_dir, learning_rate=1e-2, rank_timeout_s=LIMIT.seconds, **layout)
    with mock.patch.object(launching, "Popen", WarmRank):
        fleet = Fleet(config)
    fleet.meet()
    shared = Trainer(load_policy(model_dir, device="cpu", ranks=fleet.group), config)
    one = Trainer(load_policy(model_dir, device="cpu"), config)

    def step(trainer: Trainer, number: int) -> None:
        trainer.step(StepInputs(made_up_groups(number), VERSION, StepSettings.of(config)))

    for number in range(2 if fault in ("memory", "step") else 1):
        for trainer in (shared, one):
            step(trainer, number)
            assert trainer.is_finite()
    words = [np.empty(one.policy.layout.words, np.uint16) for _ in range(2)]
    for trainer, made in zip((shared, one), words, strict=True):
        trainer.policy.snapshot(made)
    differing = float((words[0] != words[1]).mean())
    [child] = fleet.children
    said = []

    def save(copy: ShardCopy) -> None:
        (saved := path.with_suffix(".masters")).mkdir()
        with fleet.group.saving(saved, "masters", copy=copy.number) as ranks:
            save_tensors(saved, copy.parts["masters"], group=ranks)

    def lose(work: Callable[[], object]) -> None:
        try:
            work()
        except RankLostError as error:
            said.append(str(error))

    if fault == "memory":
        dist.broadcast(torch.tensor([1 << 60]), src=0, group=fleet.group.saves._group)
    elif fault == "step":
        fleet.instructions.limit_s = 1.0
        stop(child.pid)
        lose(partial(step, shared, 2))
        child.process.kill()
    elif fault == "words":
        with stopped_at_an_instruction(child.pid, fleet.group._words_stream):
            lose(partial(shared.policy.snapshot, words[0]))
        child.process.kill()
    else:
        copy = shared.copy()
        with stopped_at_an_instruction(child.pid, fleet.group.saves):
            lose(partial(save, copy))
        child.process.kill()
    child.process.wait()
    lose(partial(step, shared, 2))
    path.write_text(json.dumps({"said": said, "pid": child.pid, "differing_words": differing}))


def stop(pid: int) -> None:
    """Stop a process and wait until it has stopped: busy cores may take longer than a rank is waited for."""
    os.kill(pid, signal.SIGSTOP)
    until_s = time.monotonic() + LIMIT.seconds
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < until_s
        time.sleep(0.001)


@contextmanager
def stopped_at_an_instruction(pid: int, stream: InstructionStream) -> Iterator[None]:
    """Stop a rank that has taken an instruction; the first is to wait a second for what it is due then."""
    send = stream.send

    def send_and_stop(instruction: Instruction) -> None:
        send(instruction)
        stop(pid)

    _set_pg_timeout(timedelta(seconds=1), stream.exchanges)
    with mock.patch.object(stream, "send", send_and_stop):
        yield


class _LastStep:
    """A service that takes a step before it stops, for which the other ranks have to be there."""

    name = "last step"

    def __init__(self, config: LearnerConfig, ranks: RankGroup) -> None:
        self._settings = StepSettings.of(config)
        self._trainer = Trainer(load_policy(config.model_dir, device="cpu", ranks=ranks), config)

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        ready()
        await stopping.wait()
        self._trainer.step(StepInputs(made_up_groups(0), VERSION, self._settings))


def serve(model_dir: Path, told: Connection) -> None:
    """Be a daemon of two ranks; tell the other one's process once it serves, and its exit code at the end."""
    config = LearnerConfig(model_dir=model_dir, learning_rate=1e-2, dp_shard=2)
    fleets: list[Fleet] = []

    async def build() -> Sequence[Service]:
        fleet = Fleet(config)
        fleets.append(fleet)
        os.kill(fleet.children[0].pid, signal.SIGTERM)  # it has hardly begun
        await fleet.met()
        work = StopsAfter(await asyncio.to_thread(_LastStep, config, fleet.group))
        return StopsAfter(fleet, other=work), work

    def announce(phase: Phase) -> None:
        if phase is Phase.SERVING:
            told.send(fleets[0].children[0].pid)

    stages = [StartStage("learner", build)]
    with (
        mock.patch.object(launching, "Popen", WarmRank),
        mock.patch.object(launching, "END_LIMIT_S", float(LIMIT.seconds)),  # on cores that are busy
    ):
        code = asyncio.run(run_daemon(stages, drain_timeout_s=LIMIT.seconds, announce=announce))
    told.send(fleets[0].children[0].process.returncode)
    sys.exit(code)


def meet_in_vain(model_dir: Path, told: Connection) -> None:
    """Be a daemon whose other rank does not come; tell its process, and the error that ends the wait."""

    async def build() -> Sequence[Service]:
        fleet = Fleet(LearnerConfig(model_dir=model_dir, learning_rate=1e-2, dp_shard=2))
        [child] = fleet.children
        child.process.send_signal(signal.SIGSTOP)
        told.send(child.pid)
        try:
            await fleet.met()
        except StartupError as error:
            told.send(str(error))
            raise
        return ()

    stages = [StartStage("learner", build)]
    code = asyncio.run(run_daemon(stages, drain_timeout_s=10, announce=lambda _: None))
    exit_without_them(code)
    sys.exit(code)
