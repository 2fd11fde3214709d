"""Two consecutive versions of a model's weights for ``bench.weights``: read from a file, or trained.

A file is an .npz of `base` and `words` (uint16), and the `names` of the tensors in order with their `shapes`
as JSON.

Trained: a small Qwen3 is pre-trained on the sources of the standard library, so that its weights have the
shape of trained ones, then takes steps of policy gradient with fp32 masters and AdamW; the last step is the
pair. The density follows the learning rate.
"""

import copy
import json
import math
import re
import sysconfig
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bench.weights.formats import Tensor
from node.weights.format.digests import Words

_VOCABULARY: Final = 8192
_SEQUENCES, _TOKENS = 8, 64
_CORPUS_FILES: Final = 200
_PRETRAIN_STEPS: Final = 250
_STEPS: Final = 24
"""Steps of policy gradient, the last of which is the pair."""


class PairError(ValueError):
    """A file is no pair."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A model before and after a step, as flat words in the canonical order: tensors by name."""

    name: str
    base: Words
    words: Words
    tensors: tuple[Tensor, ...]

    @property
    def changes(self) -> int:
        return int(np.count_nonzero(self.base != self.words))

    @classmethod
    def of(
        cls, name: str, base: Words, words: Words, *, names: Sequence[str], shapes: Sequence[tuple[int, ...]]
    ) -> "Pair":
        """Bring tensors that follow each other in any order into the canonical one."""
        sizes = [int(np.prod(shape)) for shape in shapes]
        starts = np.cumsum([0, *sizes])
        order = sorted(range(len(names)), key=lambda number: names[number].encode())
        tensors, start = [], 0
        for number in order:
            tensors.append(Tensor(names[number], start, shapes[number]))
            start += sizes[number]
        pieces = [slice(starts[number], starts[number + 1]) for number in order]
        return cls(
            name,
            np.concatenate([base[piece] for piece in pieces]),
            np.concatenate([words[piece] for piece in pieces]),
            tuple(tensors),
        )

    def save(self, path: Path) -> None:
        """Write a file that ``load_pair`` reads."""
        np.savez(
            path,
            base=self.base,
            words=self.words,
            names=np.array([tensor.name for tensor in self.tensors]),
            shapes=np.array(json.dumps([tensor.shape for tensor in self.tensors])),
        )


def load_pair(path: Path) -> Pair:
    """Read a pair.

    Raises:
        PairError: it is none, and why.
    """
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            base, words, names, shapes = (file[name] for name in ("base", "words", "names", "shapes"))
            told = [tuple(shape) for shape in json.loads(str(shapes))]
    except (OSError, EOFError, ValueError, TypeError, KeyError, zipfile.BadZipFile) as error:
        raise PairError(f"{path}: no pair, or a damaged one: {error}") from error
    size = sum(math.prod(shape) for shape in told)
    if not base.dtype == words.dtype == np.uint16 or not base.shape == words.shape == (size,):
        raise PairError(f"{path}: {base.dtype} {base.shape} and {words.dtype} {words.shape} for {size} words")
    if len(names) != len(told):
        raise PairError(f"{path}: {len(names)} names for {len(told)} shapes")
    return Pair.of(path.stem, base, words, names=names.tolist(), shapes=told)


def trained_pairs(learning_rates: Sequence[float]) -> Iterator[Pair]:
    """Train a model, some minutes on one core, and give a pair of it for each learning rate."""
    import torch
    from transformers import Qwen3ForCausalLM

    from bench.shared.random_model import qwen3_config

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(qwen3_config(_VOCABULARY, 512, 1408, 6, 8, 4, 64))
    corpus = torch.from_numpy(_corpus())
    generator = torch.Generator().manual_seed(0)

    def token_logprob() -> torch.Tensor:
        starts = torch.randint(0, corpus.numel() - _TOKENS - 1, (_SEQUENCES,), generator=generator)
        tokens = torch.stack([corpus[start : start + _TOKENS + 1] for start in starts])
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens[:, :-1]).logits
        logprob = torch.log_softmax(logits.float(), -1)
        return logprob.gather(-1, tokens[:, 1:, None])[..., 0]

    def take_step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def snapshot() -> Words:
        cast = [parameter.detach().to(torch.bfloat16).view(torch.int16) for parameter in model.parameters()]
        return np.concatenate([tensor.numpy().view(np.uint16).ravel() for tensor in cast])

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(_PRETRAIN_STEPS):
        take_step(optimizer, -token_logprob().mean())
    trained, drawn = copy.deepcopy(model.state_dict()), generator.get_state()
    named = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    for learning_rate in learning_rates:
        model.load_state_dict(trained)
        generator.set_state(drawn)
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
        base = snapshot()
        for _ in range(_STEPS):
            base = snapshot()
            advantage = torch.randn(_SEQUENCES, generator=generator)
            take_step(optimizer, -(token_logprob() * (advantage - advantage.mean())[:, None]).mean())
        yield Pair.of(
            f"qwen3-lr{learning_rate:g}",
            base,
            snapshot(),
            names=[name for name, _ in named],
            shapes=[shape for _, shape in named],
        )


def _corpus() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the words of the standard library's sources as token ids: a natural long tail."""
    library = Path(sysconfig.get_path("stdlib"))
    ids: list[int] = []
    for path in sorted(library.glob("*.py"))[:_CORPUS_FILES]:
        text = path.read_text(errors="ignore")
        ids += (zlib.crc32(word.encode()) % _VOCABULARY for word in re.findall(r"\w+|\s+|[^\w\s]", text))
    return np.array(ids, np.int64)
