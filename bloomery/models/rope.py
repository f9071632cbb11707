"""Rotary position embedding with the scalings of the supported families (default, linear, llama3, yarn).

Formulas: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), and the Llama 3.1 model card's frequency smoothing. Shapes: R rows, H half the
head dimension.
"""

import math
from typing import Any

import torch
from torch import Tensor

from bloomery.models.config import DecoderConfig


class Rope:
    """Cosines and sines for given positions, computed in float32 and cast."""

    def __init__(self, config: DecoderConfig) -> None:
        rope, dim = config.rope, config.head_dim
        base_H = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        self._magnitude = 1.0
        self._frequencies = base_H
        if rope.kind == "linear":
            self._frequencies = base_H / rope.scaling["factor"]
        elif rope.kind == "llama3":
            self._frequencies = _llama3(base_H, rope.scaling)
        elif rope.kind == "yarn":
            self._frequencies = _yarn(base_H, rope.scaling, rope.theta, dim)
            self._magnitude = _yarn_magnitude(rope.scaling)
        self._beta, self._original = rope.query_beta, rope.scaling["original_max_position_embeddings"]

    def __call__(self, positions_R: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """(cos [R, 1, H], sin [R, 1, H], scale of the queries [R, 1, 1] or None)."""
        angles_RH = positions_R.float()[:, None] * self._frequencies.to(positions_R.device)[None]
        cos, sin = angles_RH.cos() * self._magnitude, angles_RH.sin() * self._magnitude
        return cos.to(dtype)[:, None], sin.to(dtype)[:, None], self._query_scale(positions_R, dtype)

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
