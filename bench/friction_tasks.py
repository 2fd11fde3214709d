"""Frictions put on a task of the staleness laboratory: some of its actors lie, err or seldom succeed.

A friction changes what a task's ``sample`` returns, or where its policies start. What is asked and drawn is
the same as without, so runs are compared seed by seed. Nothing checks anything: no quarantine, no verifier.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from bench.staleness_lab.tasks import Completions, Task

_GENERATOR_SEEDS: Final = 1 << 33
"""Above those of the simulation."""
_HALVINGS: Final = 20


@dataclass(frozen=True, slots=True)
class Friction:
    """Faults of a share of the groups, each drawn by itself, or a start from which rewards are rare."""

    share: float = 0.0
    """Probability that a group is faulty."""
    inverts_rewards: bool = False
    """Whether a faulty group's rewards are 1 - r."""
    noise_nats: float = 0.0
    """Standard deviation of what is added to each recorded logprob."""
    recorded_nats: float | None = None
    """Recorded in place of every logprob."""
    draws_at_random: bool = False
    """Whether tokens are drawn uniformly, and truthfully recorded and rewarded as such."""
    start_score: float | None = None
    """Policies are flattened before the run until they score no more."""


FRICTIONS: Final = {
    "none": Friction(),
    "rewards inverted, .1": Friction(share=0.1, inverts_rewards=True),
    "rewards inverted, .3": Friction(share=0.3, inverts_rewards=True),
    "logprobs + N(0, .5), 1/3": Friction(share=1 / 3, noise_nats=0.5),
    "logprobs all -.001, 1/3": Friction(share=1 / 3, recorded_nats=-0.001),
    "logprobs all -10, 1/3": Friction(share=1 / 3, recorded_nats=-10.0),
    "random tokens, 1/3": Friction(share=1 / 3, draws_at_random=True),
    "rare: start at .01": Friction(start_score=0.01),
}


class FrictionTask:
    """A task of which some groups are faulty; which ones is a matter of the seed alone.

    For one run at a time: ``start`` begins it.
    """

    def __init__(self, task: Task, friction: Friction) -> None:
        self.groups, self.group_size, self.tokens = task.groups, task.group_size, task.tokens
        self.shapes = task.shapes
        self.prompts, self.steps, self.shifts = task.prompts, task.steps, task.shifts
        self._task, self._friction = task, friction
        self._generators: list[torch.Generator] = []

    def start(self, seeds: tuple[int, ...]) -> Tensor:
        """Return the task's own start, flattened where rewards are to be rare, [seeds, parameters]."""
        self._generators = [torch.Generator().manual_seed(_GENERATOR_SEEDS + seed) for seed in seeds]
        theta = self._task.start(seeds)
        most = self._friction.start_score
        return theta if most is None else flattened(self._task, theta, most=most)

    def sample(self, theta: Tensor, prompt: Tensor, uniform: Tensor) -> Completions:
        """Write completions for all groups of a version, and spoil those of the faulty ones."""
        honest = self._task.sample(theta, prompt, uniform)
        if not self._friction.share:
            return honest
        is_faulty = self._drawn((1,), prompt, uniform=True).squeeze(-1) < self._friction.share
        faulty = self._spoilt(honest, theta, prompt, uniform)
        return Completions(
            token=_where(is_faulty, faulty.token, honest.token),
            mask=_where(is_faulty, faulty.mask, honest.mask),
            reward=_where(is_faulty, faulty.reward, honest.reward),
            log_probability=_where(is_faulty, faulty.log_probability, honest.log_probability),
        )

    def log_probability(self, theta: Tensor, prompt: Tensor, token: Tensor) -> Tensor:
        """Score completions as the task does."""
        return self._task.log_probability(theta, prompt, token)

    def score(self, theta: Tensor) -> Tensor:
        """Return the task's own held-out score, without any friction, [rows]."""
        return self._task.score(theta)

    def _spoilt(self, honest: Completions, theta: Tensor, prompt: Tensor, uniform: Tensor) -> Completions:
        """Return the version as it were if every group were faulty."""
        friction = self._friction
        if friction.draws_at_random:  # a policy without weights has no preference
            return self._task.sample(torch.zeros_like(theta), prompt, uniform)
        recorded = honest.log_probability
        if friction.recorded_nats is not None:
            recorded = torch.full_like(recorded, friction.recorded_nats)
        if friction.noise_nats:
            each = (*uniform.shape[2:], 1)
            recorded = recorded + friction.noise_nats * self._drawn(each, prompt, uniform=False)
        reward = 1 - honest.reward if friction.inverts_rewards else honest.reward
        return Completions(honest.token, honest.mask, reward, recorded)

    def _drawn(self, shape: tuple[int, ...], prompt: Tensor, *, uniform: bool) -> Tensor:
        """Return random numbers [rows, n, *shape], uniform or normal; a seed's are its own."""
        draw = torch.rand if uniform else torch.randn
        each = torch.stack([draw((self.groups, *shape), generator=one) for one in self._generators])
        return each.view(*prompt.shape, *shape)


def flattened(task: Task, theta: Tensor, *, most: float) -> Tensor:
    """Shrink the weights of each policy [rows, parameters] until its score is ``most``; a lower one stays."""
    least, largest = torch.zeros(len(theta)), torch.ones(len(theta))
    if bool((task.score(theta) <= most).all()):
        return theta
    for _ in range(_HALVINGS):
        middle = (least + largest) / 2
        is_over = task.score(theta * middle.unsqueeze(1)) > most
        least, largest = torch.where(is_over, least, middle), torch.where(is_over, middle, largest)
    return theta * least.unsqueeze(1)


def _where(is_faulty: Tensor, faulty: Tensor, honest: Tensor) -> Tensor:
    """Choose by group, [rows, n]."""
    return torch.where(is_faulty.view(*is_faulty.shape, *[1] * (honest.ndim - 2)), faulty, honest)
