"""Changes of matrices by low rank, both factors at 4 bits: M becomes P Q^T.

    P = orth(M Q0)          one step of subspace iteration; Q0 is normal, drawn anew each time
    P <- P V                V: right singular vectors of M^T P, as many as have 99 % of the energy, at most
                            ``rank``: the rank follows the spectrum
    Q = M^T P (P^T P)^+     with P as it will be read, at 4 bits: the best Q for that P, so that nothing grows
    payload                 u16 rank | P^T | Q^T, each as four_bit has it

A tensor of more dimensions is a matrix of its first one by the rest. Vectors, and matrices that two
factors of full ``rank`` would not halve, are handed in by ``four_bit``. The receiver needs no Q0.

Source: PowerSGD, arXiv:1905.13727, without its warm start, which a restart would lose; 4 bits and a rank by
the spectrum are DiLoCoX's, arXiv:2506.21263.
"""

import math
import struct
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.merging.changes.four_bit import FourBitCodec
from learner.merging.changes.payload_parts import PayloadReader, PayloadWriter

_ENERGY: Final = 0.99
_SMALLEST: Final = 1e-30
"""A largest entry below this is left for later: its square is below float32's range."""
_SEED: Final = 0
_FACTORS: Final = FourBitCodec()


class LowRankCodec:
    """Hands in the directions in which most has changed."""

    def __init__(self, rank: int) -> None:
        """Begin the sequence of Q0.

        Args:
            rank: at most.
        """
        self._rank = rank
        self._draws = torch.Generator().manual_seed(_SEED)

    def write(self, change: NDArray[np.float32], shape: tuple[int, ...], to: PayloadWriter) -> None:
        """Append a change, flat, and take off what is handed in."""
        if not self._is_factored(shape):
            _FACTORS.write(change, shape, to)
            return
        matrix = torch.from_numpy(change).view(shape[0], -1)
        left = self._directions(matrix)
        to.put(struct.pack("<H", left.shape[1]))
        if left.shape[1]:
            left = _handed_in(left.T, to).T
            right = torch.linalg.pinv(left.T @ left, hermitian=True) @ (left.T @ matrix)
            matrix.addmm_(left, _handed_in(right, to), alpha=-1)

    def read(self, shape: tuple[int, ...], reader: PayloadReader) -> NDArray[np.float64]:
        """Return a change, flat."""
        if not self._is_factored(shape):
            return _FACTORS.read(shape, reader)
        rows, columns = shape[0], math.prod(shape[1:])
        (rank,) = struct.unpack("<H", reader.take(2))
        if rank > min(self._rank, rows, columns):
            raise ValueError(f"rank {rank} of a change of {rows} by {columns}, at most {self._rank} allowed")
        left = _FACTORS.read((rank, rows), reader).reshape(rank, rows)
        right = _FACTORS.read((rank, columns), reader).reshape(rank, columns)
        return (left.T @ right).ravel()

    def _is_factored(self, shape: tuple[int, ...]) -> bool:
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, 0)
        return 2 * self._rank * (rows + columns) <= rows * columns

    def _directions(self, matrix: Tensor) -> Tensor:
        """Return P, [rows, rank], its columns orthonormal, the strongest first."""
        largest = float(torch.linalg.vector_norm(matrix, torch.inf))
        start = torch.randn(matrix.shape[1], self._rank, generator=self._draws)
        if largest < _SMALLEST:
            return matrix.new_empty(matrix.shape[0], 0)
        left = torch.linalg.qr(matrix @ (start / largest)).Q
        spread = (left.T @ matrix).double()
        energy, vectors = torch.linalg.eigh(spread @ spread.T)  # the smallest first
        kept = int((energy.cumsum(0) > (1 - _ENERGY) * energy.sum()).sum())
        strongest = vectors[:, len(energy) - kept :].flip(1).float()
        return torch.mm(left, strongest)


def _handed_in(factor: Tensor, to: PayloadWriter) -> Tensor:
    """Append a factor, row by row; return it as it will be read."""
    left_over = factor.contiguous().clone()
    _FACTORS.write(left_over.view(-1).numpy(), tuple(factor.shape), to)
    return torch.sub(factor, left_over)
