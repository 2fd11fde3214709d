"""Two consecutive versions of a model's weights for bench/weights.py: read from a file, or trained here.

A file is an .npz with `base` (uint16 words), `changed` (uint32 places), `new_values` (uint16), and optionally
`names` and `sizes` of the tensors in order, and their `shapes` as text, such as "(640, 512)".

Trained: a small Qwen3 is pre-trained on the sources of the standard library, so that its weights have the
shape of trained ones, then takes steps of policy gradient with fp32 masters and AdamW; the last step is the
pair. The density follows the learning rate.
"""

import ast
import re
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bench.weight_formats import Tensor, changed_places
from node.weights.digests import Words

_COLUMNS: Final = 1024
"""Taken for the columns of a tensor whose shape is not told and whose size allows it."""

_VOCABULARY: Final = 8192
_SEQUENCES, _TOKENS = 8, 64
_CORPUS_FILES: Final = 200


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
        changed = changed_places(self.words, self.base)
        np.savez(
            path,
            base=self.base,
            changed=changed.astype(np.uint32),
            new_values=self.words[changed],
            names=np.array([tensor.name for tensor in self.tensors]),
            sizes=np.array([tensor.words for tensor in self.tensors]),
            shapes=np.array([str(tensor.shape) for tensor in self.tensors]),
        )


def load_pair(path: Path) -> Pair:
    """Read a pair.

    Raises:
        ValueError: the arrays contradict each other.
    """
    with np.load(path, allow_pickle=False) as file:
        base = np.ascontiguousarray(file["base"], np.uint16).ravel()
        words = base.copy()
        words[file["changed"]] = file["new_values"]
        sizes = [int(size) for size in file["sizes"]] if "sizes" in file else [base.size]
        names = [str(name) for name in file["names"]] if "names" in file else []
        shapes = [ast.literal_eval(str(shape)) for shape in file["shapes"]] if "shapes" in file else []
    if (
        sum(sizes) != base.size
        or (names and len(names) != len(sizes))
        or (shapes and len(shapes) != len(sizes))
    ):
        raise ValueError(f"{path}: {len(names)} names and {len(sizes)} sizes for {base.size} words")
    return Pair.of(
        path.stem,
        base,
        words,
        names=names or [f"tensor.{number:05}" for number in range(len(sizes))],
        shapes=shapes or [_guessed_shape(size) for size in sizes],
    )


def trained_pair(*, learning_rate: float, pretrain_steps: int, steps: int) -> Pair:
    """Train a pair; some minutes on one core."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=_VOCABULARY,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
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
    for _ in range(pretrain_steps):
        take_step(optimizer, -token_logprob().mean())
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    base = snapshot()
    for _ in range(steps):
        base = snapshot()
        advantage = torch.randn(_SEQUENCES, generator=generator)
        take_step(optimizer, -(token_logprob() * (advantage - advantage.mean())[:, None]).mean())
    named = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    return Pair.of(
        f"qwen3-lr{learning_rate:g}",
        base,
        snapshot(),
        names=[name for name, _ in named],
        shapes=[shape for _, shape in named],
    )


def _guessed_shape(size: int) -> tuple[int, ...]:
    return (size // _COLUMNS, _COLUMNS) if size % _COLUMNS == 0 and size > _COLUMNS else (size,)


def _corpus() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Give the words of the standard library's sources as token ids: a natural, long-tailed distribution."""
    library = Path(sysconfig.get_path("stdlib"))
    ids: list[int] = []
    for path in sorted(library.glob("*.py"))[:_CORPUS_FILES]:
        text = path.read_text(errors="ignore")
        ids += (zlib.crc32(word.encode()) % _VOCABULARY for word in re.findall(r"\w+|\s+|[^\w\s]", text))
    return np.array(ids, np.int64)
