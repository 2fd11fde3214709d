"""A decoder of a few layers, one for every row of a parameter matrix; a group reads its prompt once."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.staleness_lab.batched import Shapes

Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer and head: of prompts [rows, n, heads, length, width / heads], of completions
[rows, n, G, heads, t, width / heads]."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """A causal transformer with learned positions: RMS norms, no bias."""

    vocabulary: int
    width: int
    heads: int
    layers: int
    prompt_tokens: int
    completion_tokens: int

    @property
    def shapes(self) -> Shapes:
        """Return the parameters of one model; those of layer i start with ``i.``."""
        layer = {
            "attention_gain": (self.width,),
            "query_key_value": (self.width, 3 * self.width),
            "attended": (self.width, self.width),
            "mlp_gain": (self.width,),
            "up": (self.width, 2 * self.width),
            "down": (2 * self.width, self.width),
        }
        return Shapes(
            {
                "token_embedding": (self.vocabulary, self.width),
                "prompt_position_embedding": (self.prompt_tokens, self.width),
                "answer_position_embedding": (self.completion_tokens, self.width),
                **{f"{i}.{name}": shape for i in range(self.layers) for name, shape in layer.items()},
                "final_gain": (self.width,),
                "output": (self.width, self.vocabulary),
            }
        )

    def read(self, p: Mapping[str, Tensor], prompt: Tensor) -> Cache:
        """Return what completions attend to of prompts [rows, n, length], as wide as ``prompt_tokens``."""
        x = _embedded(p, prompt, p["prompt_position_embedding"])
        caches: Cache = []
        for i in range(self.layers):
            query, key, value = self._query_key_value(p, i, x)
            caches.append((key, value))
            if i + 1 < self.layers:  # nothing reads what the last layer makes of a prompt
                share = _causal(query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1)
                x = _after_attention(p, i, x, share @ value)
        return caches

    def log_policy(
        self,
        p: Mapping[str, Tensor],
        read: Cache,
        token: Tensor,
        *,
        first: int = 0,
        written: Cache | None = None,
    ) -> tuple[Tensor, Cache]:
        """Return the distribution after each of ``token`` [rows, n, G, t], whose first is at place ``first``.

        Also returns the completions' keys and values so far: ``written`` and what was added.
        """
        x = _embedded(p, token, p["answer_position_embedding"][:, first : first + token.shape[-1]])
        now: Cache = []
        for i in range(self.layers):
            query, key, value = self._query_key_value(p, i, x)
            if written is not None:
                key, value = torch.cat([written[i][0], key], -2), torch.cat([written[i][1], value], -2)
            now.append((key, value))
            x = _after_attention(p, i, x, _attended(query, read[i], (key, value)))
        return _linear(_normal(x, p["final_gain"]), p["output"]).log_softmax(-1), now

    def _query_key_value(self, p: Mapping[str, Tensor], layer: int, x: Tensor) -> tuple[Tensor, ...]:
        """Return three of [..., heads, t, width / heads] from [..., t, width]."""
        normal = _normal(x, p[f"{layer}.attention_gain"])
        each = _linear(normal, p[f"{layer}.query_key_value"]).chunk(3, dim=-1)
        return tuple(torch.unflatten(one, -1, (self.heads, -1)).transpose(-2, -3) for one in each)


def _after_attention(p: Mapping[str, Tensor], layer: int, x: Tensor, attended: Tensor) -> Tensor:
    x = x + _linear(attended.transpose(-2, -3).flatten(-2), p[f"{layer}.attended"])
    up = _linear(_normal(x, p[f"{layer}.mlp_gain"]), p[f"{layer}.up"]).relu()
    return x + _linear(up, p[f"{layer}.down"])


def _attended(query: Tensor, read: tuple[Tensor, Tensor], written: tuple[Tensor, Tensor]) -> Tensor:
    """Mix the values of the prompt and of the completion up to each position, [rows, n, G, heads, t, d].

    The completions of a group read one copy of the prompt: [rows, n, heads, G t, length].
    """
    key, value = written
    scale = 1 / math.sqrt(query.shape[-1])
    completions = (query.shape[2], query.shape[4])
    of_group = query.transpose(2, 3).flatten(3, 4)  # [rows, n, heads, G t, d]
    to_prompt = _unflattened(of_group @ read[0].mT, completions) * scale
    to_written = _causal(query @ key.mT * scale)
    share = torch.cat([to_prompt, to_written], -1).softmax(-1)
    of_prompt, of_written = torch.split(share, [to_prompt.shape[-1], key.shape[-2]], dim=-1)
    mixed = _unflattened(of_prompt.transpose(2, 3).flatten(3, 4) @ read[1], completions)
    return mixed + of_written @ value


def _unflattened(of_group: Tensor, completions: tuple[int, int]) -> Tensor:
    """Return [rows, n, G, heads, t, d] from [rows, n, heads, G t, d]."""
    return torch.unflatten(of_group, 3, completions).transpose(2, 3)


def _causal(attention: Tensor) -> Tensor:
    """Close [..., positions, so far] to what comes later; the last position is the last so far."""
    positions, so_far = attention.shape[-2:]
    later = torch.ones(positions, so_far, dtype=torch.bool).triu(so_far - positions + 1)
    return attention.masked_fill(later, -torch.inf)


def _embedded(p: Mapping[str, Tensor], token: Tensor, position: Tensor) -> Tensor:
    """Embed [rows, ..., t] with ``position`` [rows, t, width]."""
    rows = torch.arange(len(token)).view(-1, *[1] * (token.ndim - 1))
    between = [1] * (token.ndim - 2)
    return p["token_embedding"][rows, token] + position.reshape(len(token), *between, *position.shape[1:])


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply [rows, ..., a] by each row's own [a, b]."""
    return torch.bmm(x.reshape(len(x), -1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[-1])


def _normal(x: Tensor, gain: Tensor) -> Tensor:
    """Divide [rows, ..., width] by its root mean square and multiply by each row's own gain."""
    gain = gain.view(len(x), *[1] * (x.ndim - 2), x.shape[-1])
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain
