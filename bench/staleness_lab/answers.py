"""Tasks whose answers a decoder writes: warm-started, reward 1 for a whole right answer.

    prompt      d a c _ _ _
    completion  c a d .             the answer, then the end

The warm start stands for pretraining: supervised steps on the task's own text until a seed gives the known
answer to a share of the prompts. Completions differ in length, so a method's normaliser matters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from bench.staleness_lab.batched import choice, warm_start
from bench.staleness_lab.tasks import Completions
from bench.staleness_lab.transformer import Cache, Decoder

END: Final = 0
"""Token that ends an answer; a completion reads it as its start."""
PAD: Final = 1

_SCORE_SEED: Final = 5

Judge = Callable[[Tensor, Tensor], Tensor]
"""From tokens [..., T] and a known answer [..., T] to whether they are right, [...]."""


@dataclass(frozen=True, slots=True)
class Exercises:
    """Prompts, and a right answer to each."""

    prompt: Tensor
    """[count, prompt tokens], padded."""
    answer: Tensor
    """[count, completion tokens], ends in ``END``, then padded."""
    vocabulary: int


class AnswerTask:
    """A decoder that reads a prompt and writes the answer left to right."""

    steps = 1

    def __init__(
        self,
        train: Exercises,
        held_out: Exercises,
        *,
        width: int,
        heads: int,
        layers: int,
        groups: int,
        warm_score: float,
        warm_batch: int = 64,
        one_start: bool = False,
        shifts: bool = False,
        judge: Judge | None = None,
    ) -> None:
        """Keep the exercises; without a ``judge`` the known answer is the only right one.

        The warm start draws ``warm_batch`` exercises a step from all there are, also if the task ``shifts``,
        until the known answers have the probability ``warm_score``. ``one_start``: all seeds start alike, as
        from one pretrained model.
        """
        self.groups, self.group_size, self.shifts = groups, 8, shifts
        self.tokens, self.prompts = train.answer.shape[1], len(train.prompt)
        self._train, self._held_out = train, held_out
        self._warm_score, self._warm_batch, self._one_start = warm_score, warm_batch, one_start
        self._judge = judge
        self._model = Decoder(train.vocabulary, width, heads, layers, train.prompt.shape[1], self.tokens)
        self.shapes = self._model.shapes
        self._started: dict[tuple[int, ...], Tensor] = {}

    def start(self, seeds: tuple[int, ...]) -> Tensor:
        """Return policies after the supervised warm start, [seeds, parameters]."""
        own = (0,) if self._one_start else seeds
        if own not in self._started:

            def log_likelihood(theta: Tensor, index: Tensor) -> Tensor:
                return self._log_likelihood(theta, self._train.prompt[index], self._train.answer[index])

            theta = self.shapes.initial(own)
            warm_start(
                theta,
                log_likelihood,
                seeds=own,
                prompts=self.prompts,
                batch=self._warm_batch,
                until_score=self._warm_score,
            )
            self._started[own] = theta
        return self._started[own].expand(len(seeds), -1).clone()

    def sample(self, theta: Tensor, prompt: Tensor, uniform: Tensor) -> Completions:
        """Write until the end token; ``uniform`` is [rows, n, G, T]."""
        token, mask, log_probability = self._write(theta, self._train.prompt[prompt], uniform)
        reward = self._reward(token, self._train.answer[prompt])
        return Completions(token=token, mask=mask, reward=reward, log_probability=log_probability)

    def log_probability(self, theta: Tensor, prompt: Tensor, token: Tensor) -> Tensor:
        """Return [rows, n, G, T, vocabulary] for completions that are known whole."""
        p = self.shapes.views(theta)
        read = self._model.read(p, self._train.prompt[prompt])
        return self._model.log_policy(p, read, _shifted(token))[0]

    def score(self, theta: Tensor) -> Tensor:
        """Return the probability of a right answer, mean over the held-out prompts, [rows].

        With a judge it is estimated from one completion of each prompt, always drawn alike.
        """
        rows = (len(theta), -1, -1)
        with torch.no_grad():
            prompt, answer = self._held_out.prompt.expand(rows), self._held_out.answer.expand(rows)
            if self._judge is None:
                return self._log_likelihood(theta, prompt, answer).exp().mean(1)
            generator = torch.Generator().manual_seed(_SCORE_SEED)
            uniform = torch.rand(len(self._held_out.prompt), 1, self.tokens, generator=generator)
            token, _, _ = self._write(theta, prompt, uniform.expand(len(theta), -1, -1, -1))
            return self._reward(token, answer).mean(dim=(1, 2))

    def _reward(self, token: Tensor, answer: Tensor) -> Tensor:
        """Return [rows, n, G] from completions [rows, n, G, T] and known answers [rows, n, T]."""
        answer = answer.unsqueeze(2)
        is_right = (token == answer).all(-1) if self._judge is None else self._judge(token, answer)
        return is_right.float()

    def _log_likelihood(self, theta: Tensor, prompt: Tensor, answer: Tensor) -> Tensor:
        """Return [rows, n], nats: of the whole right answer."""
        p = self.shapes.views(theta)
        answer = answer.unsqueeze(2)
        policy, _ = self._model.log_policy(p, self._model.read(p, prompt), _shifted(answer))
        each = policy.gather(-1, answer.unsqueeze(-1)).squeeze(-1)
        return torch.where(answer != PAD, each, 0.0).sum(dim=(2, 3))

    def _write(self, theta: Tensor, prompt: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, mask and log-distributions, token by token."""
        p = self.shapes.views(theta)
        read = self._model.read(p, prompt)
        last = torch.full((*uniform.shape[:3], 1), END)
        is_open = torch.ones_like(last, dtype=torch.bool)
        written: Cache | None = None
        tokens, masks, policies = [], [], []
        for position in range(self.tokens):
            policy, written = self._model.log_policy(p, read, last, first=position, written=written)
            last = torch.where(is_open, choice(policy.exp(), uniform[..., position, None]), PAD)
            tokens.append(last)
            masks.append(is_open)
            policies.append(policy)
            is_open = is_open & (last != END)
        return torch.cat(tokens, -1), torch.cat(masks, -1), torch.cat(policies, -2)


def _shifted(token: Tensor) -> Tensor:
    """Return what each position reads: the end token as a start sign, then the tokens before."""
    return torch.cat([torch.full_like(token[..., :1], END), token[..., :-1]], dim=-1)
