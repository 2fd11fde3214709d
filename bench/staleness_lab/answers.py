"""Tasks whose answers a decoder writes: warm-started, reward 1 for the whole right answer.

    prompt      d a c _ _ _
    completion  c a d .             the answer, then the end

Supervised steps on right answers stand for pretraining: they end once the model gives a share of them, and
all seeds start from there. Completions differ in length, so a method's normaliser matters.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from bench.staleness_lab.batched import choice, warm_start
from bench.staleness_lab.tasks import Completions
from bench.staleness_lab.transformer import Cache, Decoder

END: Final = 0
"""Token that ends an answer; a completion reads it as its start."""
PAD: Final = 1


TRAINING: Final = 4096
HELD_OUT: Final = 256
_WARM_SCORE: Final = 0.25
_WARM_BATCH: Final = 128
"""Exercises a step of the warm start, until their right answers have the probability ``_WARM_SCORE``."""


class AnswerTask:
    """A decoder of two layers that writes the answer to a prompt left to right."""

    groups, group_size, prompts = 4, 8, TRAINING

    def __init__(
        self, answers: Mapping[tuple[int, ...], Sequence[int]], *, vocabulary: int, width: int, heads: int
    ) -> None:
        """Keep the exercises.

        Args:
            answers: padded prompts, TRAINING and then HELD_OUT, to the right answer of each, which ends in
                ``END`` and is padded.
        """
        self._prompt, self._answer = torch.tensor(list(answers)), torch.tensor(list(answers.values()))
        self.tokens = self._answer.shape[1]
        self._model = Decoder(vocabulary, width, heads, 2, self._prompt.shape[1], self.tokens)
        self.shapes = self._model.shapes

    def start(self, seeds: tuple[int, ...]) -> Tensor:
        """Return policies after the warm start, [seeds, parameters], all alike."""
        return self._warm.expand(len(seeds), -1).clone()

    @cached_property
    def _warm(self) -> Tensor:
        """Return the one policy that all start from, [1, parameters]."""
        theta = self.shapes.initial((0,))
        warm_start(
            theta,
            self._log_likelihood,
            prompts=self.prompts,
            batch=_WARM_BATCH,
            until_score=_WARM_SCORE,
        )
        return theta

    def sample(self, theta: Tensor, prompt: Tensor, uniform: Tensor) -> Completions:
        """Write until the end token; ``uniform`` is [rows, n, G, T]."""
        token, mask, log_probability = self._write(theta, self._prompt[prompt], uniform)
        is_right = (token == self._answer[prompt].unsqueeze(2)).all(-1)
        return Completions(token=token, mask=mask, reward=is_right.float(), log_probability=log_probability)

    def log_probability(self, theta: Tensor, prompt: Tensor, token: Tensor) -> Tensor:
        """Return [rows, n, G, T, vocabulary] for completions that are known whole."""
        p = self.shapes.views(theta)
        read = self._model.read(p, self._prompt[prompt])
        return self._model.log_policy(p, read, _shifted(token))[0]

    def score(self, theta: Tensor) -> Tensor:
        """Return the probability of the right answer, mean over the held-out prompts, [rows]."""
        held_out = torch.arange(self.prompts, len(self._prompt)).expand(len(theta), -1)
        with torch.no_grad():
            return self._log_likelihood(theta, held_out).exp().mean(1)

    def _log_likelihood(self, theta: Tensor, prompt: Tensor) -> Tensor:
        """Return [rows, n], nats: of the whole right answer to ``prompt`` [rows, n]."""
        p = self.shapes.views(theta)
        answer = self._answer[prompt].unsqueeze(2)
        policy, _ = self._model.log_policy(p, self._model.read(p, self._prompt[prompt]), _shifted(answer))
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
