"""Wan's decoder with its residual blocks' convolutions in 8-bit floats (e4m3), 93 % of its arithmetic.

What comes out of a norm and SiLU is bounded: no channel is beyond sqrt(C) times its weight. So its scale is
fixed and folded into the weights it meets, and nobody looks how large values are; to a scale that is some ten
times too large e4m3 loses next to nothing. All else stays in the decoder's dtype: what no norm bounds
(upsampling, doubling of time, shortcuts), the middle's attention, and the first and the last convolution.

The built-in model's VAE then decodes 53.8 dB from exactly, the median of 60 clips (worst 49.1). The last
convolution as well would cost 5 dB, upsampling 4.

Shapes: C channels, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch

from pipeline.kernels.fp8_conv import fp8_conv, fp8_kernel
from pipeline.kernels.fp8_rows import LARGEST, SMALLEST
from pipeline.kernels.triton_jit import TensorDescriptor
from pipeline.models.wan_vae.causal import CausalConv, MakeConv, StreamMemory, plain_conv

_MULTIPLE = 16  # of channels: bytes that the tensor memory accelerator steps by
_CAPABILITIES = (9, 10)  # cards that have one, and room for four stages of the kernel in shared memory


class Fp8Conv(CausalConv):
    """A CausalConv whose window and history are in e4m3, as is its weight."""

    def __init__(self, module: Any, gamma_C: torch.Tensor, *, scale: int, memory: StreamMemory) -> None:
        """gamma: weight of the norm before it. The module's own weight goes, and it can compute no more."""
        scales_C = gamma_C.float().abs().clamp(min=SMALLEST) * (len(gamma_C) ** 0.5 / LARGEST)
        self._kernel = fp8_kernel(module.weight.detach(), input_scales=scales_C)
        self.factor_C = 1 / scales_C
        module.weight = None
        super().__init__(self._kernel.values_OC333, module.bias.detach(), scale=scale, memory=memory)

    def __call__(self, window_THWC: torch.Tensor) -> torch.Tensor:
        return fp8_conv(window_THWC, kernel=self._kernel, dtype=self.bias.dtype)


def fp8_conv_maker(device: str, *, dtype: torch.dtype) -> MakeConv:
    """For a WanDecoder in this dtype. Where the device has no such kernel all stays plain."""
    return plain_conv if why_plain(device, dtype=dtype) else make_fp8_conv


def why_plain(device: str, *, dtype: torch.dtype) -> str:
    """What is missing for it; nothing on a CPU, which emulates it. Initialises CUDA for a card."""
    if device == "cpu":
        return ""
    if dtype != torch.bfloat16:
        return f"{dtype} was asked for, not torch.bfloat16"
    if TensorDescriptor is None:
        return "Triton is older than 3.4"
    major, minor = torch.cuda.get_device_capability(device)
    return (
        "" if major in _CAPABILITIES else f"the card's compute capability is {major}.{minor}, not 9.x or 10.x"
    )


def make_fp8_conv(module: Any, gamma_C: torch.Tensor, *, scale: int, memory: StreamMemory) -> CausalConv:
    """A MakeConv; a plain one where the kernel cannot take its sizes."""
    make = plain_conv if any(size % _MULTIPLE for size in module.weight.shape[:2]) else Fp8Conv
    return make(module, gamma_C, scale=scale, memory=memory)
