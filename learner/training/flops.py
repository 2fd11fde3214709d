"""Floating point operations of a step, to compare with what the device can do."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The parts of a causal transformer that multiply."""

    body_parameters: int
    """All but embeddings and head."""
    head_parameters: int
    """Of the product that makes logits."""
    layers: int
    attention_width: int
    """Heads times the width of one."""

    def training_flops(self, lengths: Sequence[int], *, targets: int) -> float:
        """Return the operations of one forward and backward pass: 6 N a token, and attention's own.

        Only what the mathematics needs: no padding, no logits of prompt tokens, nothing twice (activation
        checkpointing, chunks of logits), and half of the full square for causal attention.

        Args:
            lengths: positions of each row.
            targets: positions whose logits are asked for, of all rows.

        Source: PaLM, arXiv:2204.02311, appendix B.
        """
        positions, squares = sum(lengths), sum(length**2 for length in lengths)
        attention = 6 * self.layers * self.attention_width * squares
        return float(6 * (self.body_parameters * positions + self.head_parameters * targets) + attention)
