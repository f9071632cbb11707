"""Rotary position embedding with the scalings of the supported families (default, linear, llama3, yarn, proportional), or none.

Formulas: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), and the Llama 3.1 model card's frequency smoothing. Shapes: R rows, N heads, E head
dimension, H pairs of dimensions that turn together, P positions of a table.
"""

import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from bloomery.models.config import RopeConfig
from bloomery.models.pointwise import rotate

_TABLE_PART: Final = 1024
"""Positions."""


class Rotation(NamedTuple):
    """The rotary embedding at the positions of some rows."""

    cos_R1H: Tensor
    sin_R1H: Tensor
    query_scale_R11: Tensor | None
    interleaved: bool
    still: bool = False
    """Nothing turns: order is what other layers see."""

    def queries(self, q_RNE: Tensor) -> Tensor:
        """Queries, turned and lengthened."""
        turned_RNE = self.keys(q_RNE)
        return turned_RNE if self.query_scale_R11 is None else turned_RNE * self.query_scale_R11

    def keys(self, x_RNE: Tensor) -> Tensor:
        """Keys, turned; dimensions behind those that turn stay as they are."""
        if self.still:
            return x_RNE
        width = 2 * self.cos_R1H.shape[-1]
        if width < x_RNE.shape[-1]:
            first_RNE, rest_RNE = x_RNE.split([width, x_RNE.shape[-1] - width], -1)
            return torch.cat([self._turned(first_RNE), rest_RNE], -1)
        return self._turned(x_RNE)

    def _turned(self, x_RNE: Tensor) -> Tensor:
        if not self.interleaved:
            return rotate(x_RNE, self.cos_R1H, self.sin_R1H)
        first_RNH, second_RNH = x_RNE.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = self.cos_R1H, self.sin_R1H
        return torch.stack([first_RNH * cos - second_RNH * sin, second_RNH * cos + first_RNH * sin], -1).flatten(-2)


class Rope:
    """Cosines and sines for given positions, computed in float32 and cast."""

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        dim = rope.rotary_dim or head_dim
        base_H = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        self._magnitude = 1.0
        self._frequencies = base_H
        self._elsewhere: dict[torch.device, Tensor] = {}
        """The same on other devices than the processor."""
        if rope.kind == "linear":
            self._frequencies = base_H / rope.scaling["factor"]
        elif rope.kind == "llama3":
            self._frequencies = _llama3(base_H, rope.scaling)
        elif rope.kind == "yarn":
            self._frequencies = _yarn(base_H, rope.scaling, rope.theta, dim)
            self._magnitude = _yarn_magnitude(rope.scaling)
        elif rope.kind == "proportional":
            self._frequencies = _proportional(base_H, rope.scaling)
        self._table = base_H.new_zeros(0, len(base_H)), base_H.new_zeros(0, len(base_H))
        """Cosines and sines of the first positions."""
        self._beta, self._original = rope.query_beta, rope.scaling["original_max_position_embeddings"]
        self._interleaved, self._still = rope.interleaved, rope.kind == "none"

    def __call__(self, positions_R: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotation at these positions."""
        cos_RH, sin_RH = self._known(positions_R) if positions_R.is_cpu else self._turns(positions_R)
        scale_R11 = self._query_scale(positions_R, dtype)
        return Rotation(cos_RH.to(dtype)[:, None], sin_RH.to(dtype)[:, None], scale_R11, self._interleaved, self._still)

    def _known(self, positions_R: Tensor) -> tuple[Tensor, Tensor]:
        """From a table, which grows by whole parts that are computed alone, so that a position has the same bits in every table."""
        # Its own from here on: other threads may put theirs in its place.
        cos_PH, sin_PH = self._table
        wanted, known = int(positions_R.max()) // _TABLE_PART + 1 if len(positions_R) else 0, len(cos_PH) // _TABLE_PART
        if wanted > known:
            parts = [self._turns(torch.arange(part * _TABLE_PART, (part + 1) * _TABLE_PART)) for part in range(known, max(wanted, 2 * known))]
            cos_PH, sin_PH = (torch.cat([old, *new]) for old, new in zip((cos_PH, sin_PH), zip(*parts, strict=True), strict=True))
            self._table = cos_PH, sin_PH
        return cos_PH.index_select(0, positions_R), sin_PH.index_select(0, positions_R)

    def _turns(self, positions_R: Tensor) -> tuple[Tensor, Tensor]:
        frequencies_H = self._frequencies
        if (device := positions_R.device) != frequencies_H.device:
            if device not in self._elsewhere:
                self._elsewhere[device] = frequencies_H.to(device)
            frequencies_H = self._elsewhere[device]
        angles_RH = positions_R.float()[:, None] * frequencies_H[None]
        return angles_RH.cos() * self._magnitude, angles_RH.sin() * self._magnitude

    def _query_scale(self, positions_R: Tensor, dtype: torch.dtype) -> Tensor | None:
        if not self._beta:
            return None
        scale_R = 1 + self._beta * torch.log(1 + torch.floor(positions_R / self._original))
        return scale_R.to(dtype)[:, None, None]


def _llama3(base_H: Tensor, scaling: dict[str, Any]) -> Tensor:
    original, low, high = scaling["original_max_position_embeddings"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength_H = 2 * math.pi / base_H
    smooth_H = ((original / wavelength_H - low) / (high - low)).clamp(0.0, 1.0)
    mixed_H: Tensor = (1 - smooth_H) * base_H / scaling["factor"] + smooth_H * base_H
    return mixed_H


def _yarn(base_H: Tensor, scaling: dict[str, Any], theta: float, dim: int) -> Tensor:
    original = scaling["original_max_position_embeddings"]

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(scaling.get("beta_fast") or 32), dimension_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp_H = ((torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)).clamp(0, 1)
    mixed_H: Tensor = base_H / scaling["factor"] * ramp_H + base_H * (1 - ramp_H)
    return mixed_H


def _yarn_magnitude(scaling: dict[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)


def _proportional(base_H: Tensor, scaling: dict[str, Any]) -> Tensor:
    """The fastest pairs turn as in a full rotation, the others not at all."""
    turning = int(scaling.get("partial_rotary_factor", 1.0) * base_H.shape[0])
    frequencies_H: Tensor = base_H.where(torch.arange(base_H.shape[0]) < turning, 0.0) / scaling.get("factor", 1.0)
    return frequencies_H
