"""The 8-bit convolution and what fills its window: against float64, and as rounding to e4m3 must have it.

Triton's interpreter rounds to e4m3 wrongly, so there kernels store what they would round; a card does both.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from pipeline.kernels import fp8_rows
from pipeline.kernels.fp8_conv import Fp8Kernel, fp8_conv, fp8_kernel, triton_fp8_conv
from pipeline.kernels.rms_silu import fused_rms_silu, triton_rms_silu
from pipeline.kernels.upsample_rms_silu import fused_upsample_rms_silu, triton_upsample_rms_silu
from tests.pipeline_ops import rand
from tests.test_pipeline_kernels_fp8 import REGISTRATION
from tests.test_pipeline_rms_silu import CARD, DEVICE, ROUTES, Route, normed_silu

pytestmark = pytest.mark.usefixtures("interpreter_loops")

E4M3 = torch.float8_e4m3fn
HALF_STEP, LEAST_STEP = 2.0**-4, 2.0**-9  # of e4m3: relative, and below its normal numbers
# Frames, sides and channels of the window; outputs. A program's tile is 8x16 pixels by 256 outputs.
WINDOWS = [
    ((3, 1, 1, 16), 16),
    ((4, 3, 5, 48), 16),
    ((3, 9, 17, 16), 32),
    ((3, 2, 1, 144), 16),
    ((3, 1, 2, 32), 272),
]


@pytest.fixture
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_rows, "E4M3", torch.float32)


def convolution(window: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    frames = window.double().permute(3, 0, 1, 2)[None]
    return F.conv3d(frames, weight.double(), padding=(0, 1, 1))[0].permute(1, 2, 3, 0)


def kernel_of(weight: torch.Tensor, *, scales: torch.Tensor | None = None) -> Fp8Kernel:
    return fp8_kernel(weight, input_scales=weight.new_ones(weight.shape[1]) if scales is None else scales)


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize("way", [fp8_conv] if CARD else [fp8_conv, triton_fp8_conv])
@pytest.mark.parametrize(("shape", "outputs"), WINDOWS, ids=str)
def test_it_convolves(shape: tuple[int, ...], outputs: int, way: Callable[..., torch.Tensor]) -> None:
    window, weight = rand(*shape, seed=1), rand(outputs, shape[-1], 3, 3, 3, seed=2)
    kernel = kernel_of(weight)
    if way is fp8_conv:
        ours = fp8_conv(window, kernel=kernel, dtype=torch.float32)
    else:
        ours = triton_fp8_conv(window, *kernel, torch.float32)
    truth = convolution(window, weight)
    assert ours.shape == truth.shape
    assert ours.is_contiguous()
    assert (ours - truth).abs().max() <= 1e-6 * truth.abs().max() + 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16] if CARD else [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("shape", "outputs"), WINDOWS, ids=str)
def test_of_given_8_bit_values_it_is_the_convolution(
    shape: tuple[int, ...], outputs: int, dtype: torch.dtype
) -> None:
    window = (20 * rand(*shape, seed=1, device=DEVICE)).to(E4M3)
    kernel = kernel_of(rand(outputs, shape[-1], 3, 3, 3, seed=2, device=DEVICE))
    ours = fp8_conv(window, kernel=kernel, dtype=dtype)
    truth = convolution(window, kernel.values_OC333.double() * kernel.scales_O.view(-1, 1, 1, 1, 1))
    allowed = (truth.to(dtype) - truth).abs().max()
    short_sums = 2**-10 if CARD else 1e-6  # of tensor cores
    assert ours.dtype == dtype
    assert (ours.double() - truth).abs().max() <= 2 * allowed + short_sums * truth.abs().max()


def test_weights_take_up_their_inputs_scales_and_are_rounded_by_their_own_output() -> None:
    weight = rand(6, 5, 3, 3, 3, seed=1) * 10.0 ** torch.arange(-3, 3).view(-1, 1, 1, 1, 1)
    scales = 10.0 ** torch.arange(-2.0, 3.0)
    values, output_scales = kernel_of(weight, scales=scales)
    assert values.dtype == E4M3
    assert values.permute(2, 3, 4, 0, 1).is_contiguous()
    scaled = weight.double() * scales.view(-1, 1, 1, 1)
    assert (values.float().abs().amax((1, 2, 3, 4)) == fp8_rows.LARGEST).all()
    steps = output_scales.double().view(-1, 1, 1, 1, 1)
    error = (values.double() * steps - scaled).abs()
    assert (error <= HALF_STEP * scaled.abs() + 1.001 * LEAST_STEP / 2 * steps).all()


def bounded(gamma: torch.Tensor) -> torch.Tensor:
    """The factor that takes the largest value there can be to e4m3's."""
    return fp8_rows.LARGEST / (gamma.float().abs() * len(gamma) ** 0.5)


def filled(route: Route, branch: torch.Tensor, gamma: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
    """The window of rms_silu, in the history's dtype."""
    num_frames, *sides = branch.shape
    window = history.new_empty(num_frames + 2, *sides)
    bias, factor = torch.zeros_like(gamma), bounded(gamma)
    if route.is_op:
        fused_rms_silu(
            branch, bias=bias, gamma=gamma, window=window, history=history, keep_sum=False, factor=factor
        )
    else:
        triton_rms_silu(branch, bias, None, gamma, window, history, False, factor)
    return window


def filled_by_upsampling(
    route: Route, branch: torch.Tensor, gamma: torch.Tensor, history: torch.Tensor
) -> torch.Tensor:
    """The same of a picture whose every pixel's four parts are the branch's."""
    num_frames, height, width, channels = branch.shape
    quarters = branch.new_zeros(num_frames, height // 2 + 1, width // 2 + 1, 4 * channels)
    for index in range(4):
        a, b = divmod(index, 2)
        part = quarters[..., index * channels : (index + 1) * channels]
        part[:, a : a + height // 2, b : b + width // 2] = branch[:, a::2, b::2]
    window = history.new_empty(num_frames + 2, height, width, channels)
    sums, bias, factor = torch.empty_like(branch), torch.zeros_like(gamma), bounded(gamma)
    if route.is_op:
        fused_upsample_rms_silu(
            quarters,
            bias=bias,
            shortcut=None,
            gamma=gamma,
            sums=sums,
            window=window,
            history=history,
            first_frame=0,
            time_factor=1,
            factor=factor,
        )
    else:
        triton_upsample_rms_silu(quarters, bias, None, gamma, sums, window, history, 0, 1, factor)
    assert torch.equal(sums, branch)
    return window


Fill = Callable[[Route, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
FILLS = pytest.mark.parametrize("fill", [filled, filled_by_upsampling])
SHAPE = 3, 4, 6, 33


@FILLS
@pytest.mark.parametrize(
    "route", [Route(*route) for route in ROUTES], ids=[" ".join(map(str, route)) for route in ROUTES]
)
def test_what_is_to_be_rounded_is_multiplied_by_its_factor(fill: Fill, route: Route) -> None:
    branch, gamma = route.rand(*SHAPE, seed=1), route.rand(SHAPE[-1], seed=2)
    history = rand(2, *SHAPE[1:], seed=3, device=route.device)
    given = history.clone()
    window = fill(route, branch, gamma, history)
    truth = normed_silu(branch.double(), gamma.double()) * bounded(gamma).double()
    assert (window[2:] - truth).abs().max() <= 1e-6 * fp8_rows.LARGEST
    assert torch.equal(window[:2], given)
    assert torch.equal(history, window[-2:])


@FILLS
@pytest.mark.parametrize("device", ["cpu", "cuda"] if CARD else ["cpu"])
def test_a_window_is_rounded_once_and_never_beyond_its_range(fill: Fill, device: str) -> None:
    branch, gamma = (rand(*shape, seed=1, device=device) for shape in (SHAPE, SHAPE[-1:]))
    branch[0] = 0
    branch[0, ..., 7], gamma[7] = 1e4, 5  # all of a pixel in one channel: the bound itself
    history = rand(2, *SHAPE[1:], seed=3, device=device).to(E4M3)
    given = history.clone()
    window = fill(Route("op", device, torch.float32), branch, gamma, history)
    truth = normed_silu(branch.double(), gamma.double()) * bounded(gamma).double()
    error = (window[2:].double() - truth).abs()
    assert (error <= 1.001 * HALF_STEP * truth.abs() + 1.001 * LEAST_STEP / 2).all()
    assert truth.abs().max() > 0.99 * fp8_rows.LARGEST
    assert torch.equal(window[:2].float(), given.float())
    assert torch.equal(history.float(), window[-2:].float())


def test_what_the_op_says_of_itself_is_true() -> None:
    window = (20 * rand(4, 3, 2, 16, seed=1, device=DEVICE)).to(E4M3)
    kernel = kernel_of(rand(32, 16, 3, 3, 3, seed=2, device=DEVICE))
    op = torch.ops.vgbatch.fp8_conv.default
    found = torch.library.opcheck(op, (window, *kernel, torch.bfloat16), test_utils=REGISTRATION)
    assert found == dict.fromkeys(REGISTRATION, "SUCCESS")
