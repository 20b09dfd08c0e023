"""Sums: what a weighted least-squares fit needs to know of its data, and nothing else. They add up.

Every sum is taken about ``centre``, the mean of the first text, so that float32 is safe where keys carry a large
bias: what is added is as large as the spread of the features, not as their distance from zero. Merging moves the
other worker's sums to one's own centre, which is exact up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbaton.errors import InvariantError, StoreError

NAMES = ("weight", "centre", "inputs", "targets", "gram", "cross")


@dataclass
class Sums:
    """Sums over rows for N blocks of F features, about ``centre``; float32.

    ``weight`` ``[N]``: sum of w; ``centre``, ``inputs`` (sum of w x), ``targets`` (sum of w y) ``[N, F]``;
    ``gram`` (sum of w x x^T), ``cross`` (sum of w x y^T) ``[N, F, F]``.
    """

    weight: Tensor
    centre: Tensor
    inputs: Tensor
    targets: Tensor
    gram: Tensor
    cross: Tensor

    @classmethod
    def zeros(cls, blocks: int, features: int, device: torch.device | str = "cpu") -> Sums:
        vector = (blocks, features)
        shapes = ((blocks,), vector, vector, vector, (*vector, features), (*vector, features))
        return cls(*(torch.zeros(shape, device=device) for shape in shapes))

    def _tensors(self) -> Iterator[Tensor]:
        return (getattr(self, name) for name in NAMES)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def add(self, blocks: slice, x: Tensor, offset: Tensor, decay: Tensor) -> None:
        """Take in T rows of some ``blocks``: inputs ``x`` and ``offset`` (target minus source) ``[B, T, F]``, float32.

        ``decay`` g ``[T, 1]``: a row counts with weight g^2 and its target is offset / g, so that w x y^T is
        (g x) offset^T and nothing is divided.
        """
        gx = (x - self.centre[blocks, None]) * decay
        self.weight[blocks] += decay.square().sum()
        self.inputs[blocks] += (gx * decay).sum(-2)
        self.targets[blocks] += (offset * decay).sum(-2)
        self.gram[blocks].baddbmm_(gx.mT, gx)
        self.cross[blocks].baddbmm_(gx.mT, offset)

    def mean(self) -> Tensor:
        """Weighted mean of the inputs ``[N, F]``, float64."""
        return self.centre.double() + self.inputs.double() / self.weight.double().clamp(min=1e-12)[:, None]

    def part(self, blocks: slice, features: Tensor) -> Sums:
        """The sums of some features ``[f]`` of some blocks: those that would have been taken of them alone."""
        features = features.to(self.gram.device)
        vectors = (tensor[blocks][:, features] for tensor in (self.centre, self.inputs, self.targets))
        matrices = (tensor[blocks][:, features[:, None], features] for tensor in (self.gram, self.cross))
        return Sums(self.weight[blocks], *vectors, *matrices)

    @classmethod
    def stack(cls, parts: Sequence[Sums]) -> Sums:
        """Blocks of equal features after each other."""
        return cls(*(torch.cat(tensors) for tensors in zip(*(part._tensors() for part in parts), strict=True)))

    def scale(self, factor: float) -> None:
        """Let everything learned so far count ``factor`` times."""
        for tensor in (self.weight, self.inputs, self.targets, self.gram, self.cross):
            tensor *= factor

    def merge(self, other: Sums) -> None:
        """Add another worker's sums, moved to this centre: x - c = (x - c') + (c' - c)."""
        if not bool(self.weight.any()):
            self.centre.copy_(other.centre)
        move = (other.centre - self.centre).double()
        inputs, weight = other.inputs.double(), other.weight.double()[:, None]
        ahead = inputs[:, :, None] * move[:, None, :]
        gram = other.gram.double() + ahead + ahead.mT + weight[..., None] * move[:, :, None] * move[:, None, :]
        cross = other.cross.double() + move[:, :, None] * other.targets.double()[:, None, :]
        self.weight += other.weight
        self.inputs += inputs + weight * move
        self.targets += other.targets
        self.gram += gram
        self.cross += cross

    def to_tensors(self) -> dict[str, Tensor]:
        return {f"sums.{name}": getattr(self, name) for name in NAMES}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], blocks: int, features: int) -> Sums:
        """Raises StoreError where a sum is missing, of another shape or not finite."""
        sums = cls.zeros(blocks, features)
        for name in NAMES:
            found, wanted = tensors.get(f"sums.{name}"), getattr(sums, name)
            if found is None or found.shape != wanted.shape or found.dtype != torch.float32:
                raise StoreError(f"affine state: {name} must be float32 of shape {tuple(wanted.shape)}, got "
                                 f"{'nothing' if found is None else (found.dtype, tuple(found.shape))}")
            if not bool(found.isfinite().all()):
                raise StoreError(f"affine state: {name} holds values that are not finite")
            setattr(sums, name, found.clone())
        return sums

    def check(self) -> None:
        """Raise InvariantError unless all is finite and the weights are those of a sum of squares."""
        if not all(bool(tensor.isfinite().all()) for tensor in self._tensors()):
            raise InvariantError("affine sums are not finite")
        if bool((self.weight < 0).any()) or bool((self.gram.diagonal(dim1=-2, dim2=-1) < 0).any()):
            raise InvariantError("affine sums have a negative weight or square")
