"""A token task: write a word backwards and stop. A small transformer, warm-started, exact match.

    prompt      _ _ _ d a c         3 to 6 letters of 8, padded
    completion  c a d .             as many letters, then the end; reward 1 only for the whole answer

The warm start stands for pretraining: supervised steps until a seed gives the right answer to 15 % of the
words. Completions differ in length, so a method's normaliser matters.
"""

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from torch import Tensor

from bench.staleness_lab.batched import Adam, Shapes, choice
from bench.staleness_lab.tasks import Completions

_LETTERS: Final = 8
_END: Final = _LETTERS
_PAD: Final = _LETTERS + 1
_VOCABULARY: Final = _LETTERS + 2
_SHORTEST, _LONGEST = 3, 6
_WIDTH: Final = 24
_MLP: Final = 48
_TRAINING_PROMPTS: Final = 4096
_HELD_OUT: Final = 128
_PROMPT_SEED: Final = 20250817
_MOST_WARM_STEPS: Final = 400
_WARM_SCORE: Final = 0.15
_WARM_BATCH: Final = 64
_WARM_LEARNING_RATE: Final = 2e-3

_Attended = tuple[Tensor, Tensor]
"""Keys and values: of a word [rows, n, letters, width], of a completion [rows, n, G, t, width]."""


class WordReversal:
    """A one-layer transformer that reads the whole word and writes the answer left to right."""

    groups = 4
    group_size = 8
    tokens = _LONGEST + 1

    def __init__(self) -> None:
        words, answers = _words(np.random.default_rng(_PROMPT_SEED), _TRAINING_PROMPTS + _HELD_OUT)
        self._word, self._held_out_word = words[:_TRAINING_PROMPTS], words[_TRAINING_PROMPTS:]
        self._answer, self._held_out_answer = answers[:_TRAINING_PROMPTS], answers[_TRAINING_PROMPTS:]
        self._shapes = Shapes(_parameter_shapes())
        self._started: dict[tuple[int, ...], Tensor] = {}
        self.prompts = _TRAINING_PROMPTS
        self.parameters = self._shapes.size

    def start(self, seeds: tuple[int, ...]) -> Tensor:
        """Give policies after the supervised warm start, [seeds, parameters]."""
        if seeds not in self._started:
            self._started[seeds] = self._warm_start(seeds)
        return self._started[seeds].clone()

    def _warm_start(self, seeds: tuple[int, ...]) -> Tensor:
        theta = self._shapes.initial(seeds).requires_grad_()
        adam = Adam(theta.data, _WARM_LEARNING_RATE, gradient_clip_norm=1.0)
        orders = [np.random.default_rng([seed, 0]) for seed in seeds]
        is_cold = torch.ones(len(seeds))
        for _ in range(_MOST_WARM_STEPS):
            index = torch.from_numpy(np.stack([o.integers(self.prompts, size=_WARM_BATCH) for o in orders]))
            log_likelihood = self._log_likelihood(theta, self._word[index], self._answer[index])
            is_cold *= (log_likelihood.detach().exp().mean(1) < _WARM_SCORE).float()
            if not bool(is_cold.any()):
                break
            (gradient,) = torch.autograd.grad(-log_likelihood.mean(1).sum(), theta)
            adam.step(gradient, is_cold)
        return theta.detach()

    def sample(self, theta: Tensor, prompt: Tensor, uniform: Tensor) -> Completions:
        """Write until the end token, at most 7 tokens; ``uniform`` is [rows, n, G, 7]."""
        token, mask, log_probability = self._write(theta, self._word[prompt], uniform)
        reward = (token == self._answer[prompt].unsqueeze(2)).all(-1).float()
        return Completions(token=token, mask=mask, reward=reward, log_probability=log_probability)

    def log_probability(self, theta: Tensor, prompt: Tensor, token: Tensor) -> Tensor:
        """Give [rows, n, G, T, vocabulary] for completions that are known whole."""
        p = self._shapes.views(theta)
        policy, _ = _log_policy(p, _read(p, self._word[prompt]), _shifted(token))
        return policy

    def score(self, theta: Tensor) -> Tensor:
        """Give the probability of the right answer, mean over the held-out words, [rows]."""
        rows = (len(theta), -1, -1)
        with torch.no_grad():
            words, answers = self._held_out_word.expand(rows), self._held_out_answer.expand(rows)
            return self._log_likelihood(theta, words, answers).exp().mean(1)

    def _log_likelihood(self, theta: Tensor, word: Tensor, answer: Tensor) -> Tensor:
        """Give [rows, n], nats: of the whole right answer."""
        p = self._shapes.views(theta)
        answer = answer.unsqueeze(2)
        policy, _ = _log_policy(p, _read(p, word), _shifted(answer))
        each = policy.gather(-1, answer.unsqueeze(-1)).squeeze(-1)
        return torch.where(answer != _PAD, each, 0.0).sum(dim=(2, 3))

    def _write(self, theta: Tensor, word: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Give tokens, mask and log-distributions, token by token."""
        p = self._shapes.views(theta)
        read = _read(p, word)
        last = torch.full((*uniform.shape[:3], 1), _END)
        is_open = torch.ones_like(last, dtype=torch.bool)
        written: _Attended | None = None
        tokens, masks, policies = [], [], []
        for position in range(self.tokens):
            policy, written = _log_policy(p, read, last, first=position, written=written)
            last = torch.where(is_open, choice(policy.exp(), uniform[..., position, None]), _PAD)
            tokens.append(last)
            masks.append(is_open)
            policies.append(policy)
            is_open = is_open & (last != _END)
        return torch.cat(tokens, -1), torch.cat(masks, -1), torch.cat(policies, -2)


def _words(rng: np.random.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Give ``count`` different words [count, 6], right-aligned, and their answers [count, 7]."""
    answers: dict[tuple[int, ...], list[int]] = {}
    while len(answers) < count:
        letters = rng.integers(_LETTERS, size=rng.integers(_SHORTEST, _LONGEST + 1)).tolist()
        padding = [_PAD] * (_LONGEST - len(letters))
        answers[*padding, *letters] = [*reversed(letters), _END, *padding]
    return torch.tensor(list(answers)), torch.tensor(list(answers.values()))


def _parameter_shapes() -> dict[str, tuple[int, ...]]:
    return {
        "token_embedding": (_VOCABULARY, _WIDTH),
        "word_position_embedding": (_LONGEST, _WIDTH),
        "answer_position_embedding": (_LONGEST + 1, _WIDTH),
        "attention_gain": (_WIDTH,),
        "query_key_value": (_WIDTH, 3 * _WIDTH),
        "attended": (_WIDTH, _WIDTH),
        "mlp_gain": (_WIDTH,),
        "up": (_WIDTH, _MLP),
        "down": (_MLP, _WIDTH),
        "final_gain": (_WIDTH,),
        "output": (_WIDTH, _VOCABULARY),
    }


def _shifted(token: Tensor) -> Tensor:
    """What each position reads: the end token as a start sign, then the tokens before."""
    return torch.cat([torch.full_like(token[..., :1], _END), token[..., :-1]], dim=-1)


def _read(p: Mapping[str, Tensor], word: Tensor) -> _Attended:
    """Give the keys and values of words [rows, n, letters]: all that one layer asks of a prompt."""
    x = _embedded(p, word, p["word_position_embedding"])
    _, key, value = _linear(_normal(x, p["attention_gain"]), p["query_key_value"]).chunk(3, dim=-1)
    return key, value


def _log_policy(
    p: Mapping[str, Tensor],
    read: _Attended,
    token: Tensor,
    *,
    first: int = 0,
    written: _Attended | None = None,
) -> tuple[Tensor, _Attended]:
    """Give the distribution after each of ``token`` [rows, n, G, t], whose first is at place ``first``.

    Also gives the completion's keys and values so far: ``written`` and what was added.
    """
    x = _embedded(p, token, p["answer_position_embedding"][:, first : first + token.shape[-1]])
    query, key, value = _linear(_normal(x, p["attention_gain"]), p["query_key_value"]).chunk(3, dim=-1)
    if written is not None:
        key, value = torch.cat([written[0], key], -2), torch.cat([written[1], value], -2)
    x = x + _linear(_attended(query, read, (key, value)), p["attended"])
    x = x + _linear(_linear(_normal(x, p["mlp_gain"]), p["up"]).relu(), p["down"])
    return _linear(_normal(x, p["final_gain"]), p["output"]).log_softmax(-1), (key, value)


def _attended(query: Tensor, read: _Attended, written: _Attended) -> Tensor:
    """Mix the values of the word and of the completion up to each position, [rows, n, G, t, width].

    The completions of a group read one copy of the word: [rows, n, G t, letters].
    """
    key, value = written
    positions, so_far = query.shape[-2], key.shape[-2]
    scale = 1 / math.sqrt(_WIDTH)
    each = query.shape[2:4]
    to_word = torch.unflatten(query.flatten(2, 3) @ read[0].mT, 2, each) * scale
    later = torch.ones(positions, so_far, dtype=torch.bool).triu(so_far - positions + 1)
    to_written = (query @ key.mT * scale).masked_fill(later, -torch.inf)
    share = torch.cat([to_word, to_written], -1).softmax(-1)
    of_word, of_written = torch.split(share, [to_word.shape[-1], so_far], dim=-1)
    return torch.unflatten(of_word.flatten(2, 3) @ read[1], 2, each) + of_written @ value


def _embedded(p: Mapping[str, Tensor], token: Tensor, position: Tensor) -> Tensor:
    """Embed [rows, ..., t] with ``position`` [rows, t, width]."""
    rows = torch.arange(len(token)).view(-1, *[1] * (token.ndim - 1))
    between = [1] * (token.ndim - 2)
    return p["token_embedding"][rows, token] + position.reshape(len(token), *between, *position.shape[1:])


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply [rows, ..., a] by each row's own [a, b]."""
    return torch.bmm(x.reshape(len(x), -1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[-1])


def _normal(x: Tensor, gain: Tensor) -> Tensor:
    """Give [rows, ..., width] its root mean square, times each row's own gain."""
    gain = gain.view(len(x), *[1] * (x.ndim - 2), x.shape[-1])
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain
