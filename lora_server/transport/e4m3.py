"""Rows in 8 bits: float8_e4m3fn codes, and for each row a float32 scale, the row's largest magnitude / 448.

What comes back is within 2^-4 of an element, or 2^-10 of the row's scale if that is more. A row with a NaN or an
infinity travels, and comes back, as a row of NaN. Scales are finite and above zero whatever the row.

Shapes: T rows of K columns.
"""

from __future__ import annotations

import math

import torch

LARGEST = 448.0
LEAST_SCALE = 2.0**-126  # its inverse is a float32, too, so rows of zeros need no special case
NAN = 0x7F  # the code, but for its sign
AT_ONCE = 1 << 18  # elements; as float32 they stay in a core's cache


def quantise(x_TK: torch.Tensor, codes_TK: torch.Tensor, scales_T: torch.Tensor) -> None:
    """Fill codes and scales, on any device, from x. If all of them are on a GPU, the host does not wait."""
    few = max(1, AT_ONCE // x_TK.shape[1] if x_TK.device.type == "cpu" else len(x_TK))
    for parts in zip(*(torch.split(one, few) for one in (x_TK, codes_TK, scales_T)), strict=True):
        _quantise(*parts)


def _quantise(x_TK: torch.Tensor, codes_TK: torch.Tensor, scales_T: torch.Tensor) -> None:
    x_TK = x_TK.float()
    largest_T = torch.maximum(x_TK.amax(1), x_TK.amin(1).neg())
    own_T = (largest_T / largest_T.new_full((), LARGEST)).clamp_(min=LEAST_SCALE)  # a GPU multiplies by 1 / a float
    finite_T, scaled_TK = largest_T.isfinite(), x_TK * own_T.reciprocal()[:, None]
    if x_TK.device.type != "cpu" or not finite_T.all():
        own_T.masked_fill_(~finite_T, 1.0)
        scaled_TK.masked_fill_(~finite_T[:, None], math.nan)
    codes_TK.copy_(scaled_TK)
    scales_T.copy_(own_T)


def expand(codes_TK: torch.Tensor, scales_T: torch.Tensor | None = None) -> torch.Tensor:
    """Return the values in float32, times their rows' scales if these are given. On a GPU the host does not wait."""
    out_TK = _by_halves(codes_TK) if codes_TK.device.type == "cpu" else codes_TK.float()
    return out_TK if scales_T is None else out_TK.mul_(scales_T[:, None])


def _by_halves(codes_TK: torch.Tensor) -> torch.Tensor:
    """Convert by way of float16, which differs from e4m3 in its bias: torch takes ten times as long on a CPU."""
    bytes_TK = codes_TK.view(torch.int8)
    bits_TK = bytes_TK.to(torch.int16)
    bits_TK <<= 7
    bits_TK &= -0x4080  # sign, exponent and mantissa; not what the sign was extended to
    out_TK = bits_TK.view(torch.float16).float()
    out_TK *= 2.0**8
    nan_TK = (bytes_TK & NAN) == NAN
    if nan_TK.any():
        out_TK.masked_fill_(nan_TK, math.nan)
    return out_TK
