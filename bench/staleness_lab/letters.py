"""A token task: sort the letters of a word and stop. A small transformer, warm-started, exact match.

    prompt      d a c _ _ _         3 to 6 letters of 8, padded
    completion  a c d .             as many letters, then the end; reward 1 only for the whole answer

The warm start stands for pretraining: some supervised steps, after which about a third of the answers
sampled are right. Completions differ in length, so a method's normaliser matters.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
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
_WIDTH: Final = 32
_HEADS: Final = 1
_LAYERS: Final = 1
_MLP: Final = 64
_TRAINING_PROMPTS: Final = 4096
_HELD_OUT: Final = 128
_PROMPT_SEED: Final = 20250817
_WARM_STEPS: Final = 120
_WARM_BATCH: Final = 64
_WARM_LEARNING_RATE: Final = 5e-3

_Memory = list[tuple[Tensor, Tensor]]
"""Keys and values of the prompt, a pair a layer, each [rows, n, heads, letters, width of a head]."""


@dataclass(slots=True)
class _Written:
    """Keys and values of the completion so far, each [rows, n, G, heads, t, width of a head]."""

    key: Tensor
    value: Tensor


class LetterSorting:
    """A two-layer transformer that reads the whole word and writes the answer left to right."""

    groups = 4
    group_size = 8
    tokens = _LONGEST + 1

    def __init__(self) -> None:
        words, answers = _words(np.random.default_rng(_PROMPT_SEED), _TRAINING_PROMPTS + _HELD_OUT)
        self._word, self._held_out_word = words[:_TRAINING_PROMPTS], words[_TRAINING_PROMPTS:]
        self._answer, self._held_out_answer = answers[:_TRAINING_PROMPTS], answers[_TRAINING_PROMPTS:]
        self._shapes = Shapes(_parameter_shapes())
        self.prompts = _TRAINING_PROMPTS
        self.parameters = self._shapes.size

    def start(self, seeds: tuple[int, ...]) -> Tensor:
        """Give policies after a short supervised warm start, [seeds, parameters]."""
        theta = self._shapes.initial(seeds).requires_grad_()
        adam = Adam(theta.data, _WARM_LEARNING_RATE, gradient_clip_norm=1.0)
        orders = [np.random.default_rng(seed) for seed in seeds]
        for _ in range(_WARM_STEPS):
            index = torch.from_numpy(np.stack([o.integers(self.prompts, size=_WARM_BATCH) for o in orders]))
            answer = self._answer[index].unsqueeze(2)
            surprisal = -_of(self.log_probability(theta, index, answer), answer)
            mask = answer != _PAD
            loss = (surprisal * mask).sum(dim=(1, 2, 3)) / mask.sum(dim=(1, 2, 3))
            (gradient,) = torch.autograd.grad(loss.sum(), theta)
            adam.step(gradient)
        return theta.detach()

    def sample(self, theta: Tensor, prompt: Tensor, uniform: Tensor) -> Completions:
        """Write until the end token, at most 7 tokens; ``uniform`` is [rows, n, G, 7]."""
        token, mask, log_probability = self._write(theta, self._word[prompt], uniform)
        answer = self._answer[prompt].unsqueeze(2)
        right = (token == answer).cumprod(-1).sum(-1) - (answer == _PAD).sum(-1) * (token == answer).all(-1)
        reward = right / (answer != _PAD).sum(-1)
        return Completions(token=token, mask=mask, reward=reward, log_probability=log_probability)

    def log_probability(self, theta: Tensor, prompt: Tensor, token: Tensor) -> Tensor:
        """Give [rows, n, G, T, vocabulary] for completions that are known whole."""
        p = self._shapes.views(theta)
        return self._log_policy(p, self._read(p, self._word[prompt]), _shifted(token), first=0, written=None)

    def score(self, theta: Tensor) -> Tensor:
        """Give the share of held-out words that greedy decoding sorts exactly, [rows]."""
        words = self._held_out_word.expand(theta.shape[0], -1, -1)
        token, _, _ = self._write(theta, words, uniform=None)
        return (token.squeeze(2) == self._held_out_answer).all(-1).float().mean(1)

    def _write(self, theta: Tensor, word: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Decode [rows, n, G, T]: by ``uniform``, or (None) one greedy completion."""
        p = self._shapes.views(theta)
        memory = self._read(p, word)
        completions = 1 if uniform is None else uniform.shape[2]
        last = torch.full((*word.shape[:2], completions, 1), _END)
        is_open = torch.ones_like(last, dtype=torch.bool)
        written: list[_Written] = []
        tokens, masks, policies = [], [], []
        for position in range(self.tokens):
            policy = self._log_policy(p, memory, last, first=position, written=written)
            drawn = (
                policy.argmax(-1) if uniform is None else choice(policy.exp(), uniform[..., position, None])
            )
            last = torch.where(is_open, drawn, _PAD)
            tokens.append(last)
            masks.append(is_open)
            policies.append(policy)
            is_open = is_open & (last != _END)
        return torch.cat(tokens, -1), torch.cat(masks, -1), torch.cat(policies, -2)

    def _read(self, p: Mapping[str, Tensor], word: Tensor) -> _Memory:
        """Encode [rows, n, letters]; every letter sees every other."""
        x = _embedded(p, word, "word_position", first=0)
        memory: _Memory = []
        for layer in range(_LAYERS):
            query, key, value = _heads(_linear(_normal(x, p, f"{layer}.attention_gain"), p, f"{layer}.qkv"))
            memory.append((key, value))
            if layer == _LAYERS - 1:
                break  # nothing reads what the prompt would become above its last keys
            share = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1)
            x = x + _linear(_joined(share @ value), p, f"{layer}.out")
            x = x + _mlp(x, p, layer)
        return memory

    def _log_policy(
        self,
        p: Mapping[str, Tensor],
        memory: _Memory,
        token: Tensor,
        *,
        first: int,
        written: list[_Written] | None,
    ) -> Tensor:
        """Score the token after each of ``token`` [rows, n, G, t]; ``written`` is read and extended."""
        x = _embedded(p, token, "answer_position", first=first)
        for layer, (prompt_key, prompt_value) in enumerate(memory):
            query, key, value = _heads(_linear(_normal(x, p, f"{layer}.attention_gain"), p, f"{layer}.qkv"))
            if written is not None:
                key, value = _extended(written, layer, key, value)
            share_prompt, share_self = _attention(query, prompt_key, key)
            seen = _per_group(share_prompt) @ prompt_value
            seen = _per_completion(seen, query) + share_self @ value
            x = x + _linear(_joined(seen), p, f"{layer}.out")
            x = x + _mlp(x, p, layer)
        return _linear(_normal(x, p, "final_gain"), p, "output").log_softmax(-1)


def _words(rng: np.random.Generator, count: int) -> tuple[Tensor, Tensor]:
    word = np.full((count, _LONGEST), _PAD)
    answer = np.full((count, _LONGEST + 1), _PAD)
    for row in range(count):
        letters = rng.integers(_LETTERS, size=rng.integers(_SHORTEST, _LONGEST + 1))
        word[row, : len(letters)] = letters
        answer[row, : len(letters)] = np.sort(letters)
        answer[row, len(letters)] = _END
    return torch.from_numpy(word), torch.from_numpy(answer)


def _parameter_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embedding": (_VOCABULARY, _WIDTH),
        "word_position_embedding": (_LONGEST, _WIDTH),
        "answer_position_embedding": (_LONGEST + 1, _WIDTH),
    }
    for layer in range(_LAYERS):
        shapes |= {
            f"{layer}.attention_gain": (_WIDTH,),
            f"{layer}.qkv": (_WIDTH, 3 * _WIDTH),
            f"{layer}.out": (_WIDTH, _WIDTH),
            f"{layer}.mlp_gain": (_WIDTH,),
            f"{layer}.up": (_WIDTH, _MLP),
            f"{layer}.down": (_MLP, _WIDTH),
        }
    return shapes | {"final_gain": (_WIDTH,), "output": (_WIDTH, _VOCABULARY)}


def _shifted(token: Tensor) -> Tensor:
    """What each position reads: the end token as a start sign, then the tokens before."""
    return torch.cat([torch.full_like(token[..., :1], _END), token[..., :-1]], dim=-1)


def _of(log_probability: Tensor, token: Tensor) -> Tensor:
    return log_probability.gather(-1, token.unsqueeze(-1)).squeeze(-1)


def _embedded(p: Mapping[str, Tensor], token: Tensor, position: str, *, first: int) -> Tensor:
    rows = torch.arange(token.shape[0]).view(-1, *[1] * (token.ndim - 1))
    positions = p[f"{position}_embedding"][:, first : first + token.shape[-1]]
    return p["token_embedding"][rows, token] + positions.view(
        token.shape[0], *[1] * (token.ndim - 2), *positions.shape[1:]
    )


def _linear(x: Tensor, p: Mapping[str, Tensor], name: str) -> Tensor:
    weight = p[name]
    return torch.bmm(x.reshape(x.shape[0], -1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[-1])


def _normal(x: Tensor, p: Mapping[str, Tensor], name: str) -> Tensor:
    gain = p[name].view(x.shape[0], *[1] * (x.ndim - 2), x.shape[-1])
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain


def _mlp(x: Tensor, p: Mapping[str, Tensor], layer: int) -> Tensor:
    return _linear(_linear(_normal(x, p, f"{layer}.mlp_gain"), p, f"{layer}.up").relu(), p, f"{layer}.down")


def _heads(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[..., t, 3 width] to three of [..., heads, t, width of a head]."""
    query, key, value = (
        qkv.unflatten(-1, (3, _HEADS, _WIDTH // _HEADS)).movedim(-3, 0).transpose(-2, -3).unbind(0)
    )
    return query, key, value


def _joined(heads: Tensor) -> Tensor:
    return heads.transpose(-2, -3).flatten(-2)


def _extended(written: list[_Written], layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    if layer == len(written):
        written.append(_Written(key, value))
    else:
        kept = written[layer]
        kept.key, kept.value = torch.cat([kept.key, key], -2), torch.cat([kept.value, value], -2)
    return written[layer].key, written[layer].value


def _attention(query: Tensor, prompt_key: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Share each position's attention between the prompt and the completion up to itself.

    The completions of a group read one copy of the prompt's keys: [rows, n, heads, G t, letters].
    """
    scale = 1 / math.sqrt(query.shape[-1])
    to_prompt = _per_completion(_per_group(query) @ prompt_key.mT, query) * scale
    to_self = query @ key.mT * scale
    if query.shape[-2] > 1:  # a single position may see everything written
        later = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).triu(1)
        to_self = to_self.masked_fill(later, -torch.inf)
    share = torch.cat([to_prompt, to_self], -1).softmax(-1)
    return share[..., : prompt_key.shape[-2]], share[..., prompt_key.shape[-2] :]


def _per_group(x: Tensor) -> Tensor:
    """[rows, n, G, heads, t, d] to [rows, n, heads, G t, d]."""
    return x.transpose(2, 3).flatten(3, 4)


def _per_completion(x: Tensor, like: Tensor) -> Tensor:
    """[rows, n, heads, G t, d] to [rows, n, G, heads, t, d]."""
    return x.unflatten(3, (like.shape[2], like.shape[4])).transpose(2, 3)
