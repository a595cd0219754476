"""Third part: four steps without guidance, as a low-rank update that follows the guided trajectories.

The teacher samples as shipped: 20 steps with guidance. The student rolls out 4 steps of the very sampler that
will be used, from the same noise, and every state it comes through is to be the teacher's at that noise
level. Gradients run through all four steps, so what an early step spoils a later one learns to mend. It is
progressive distillation (Salimans and Ho 2022) of all segments at once, on the student's own states.

Shapes: M trajectories, B clips, S states, N tokens of P numbers, L text tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from pipeline.kernels.qk_norm_rope import Rope
from pipeline.models.tiny.bank import Size
from pipeline.models.tiny.denoiser import Block, compiled_block, rope_tables, velocity
from pipeline.models.tiny.described import Order, draw_all
from pipeline.models.tiny.evaluate import FEW_STEPS, SCALES, Setting, evaluate, table
from pipeline.models.tiny.export import FEW_STEP_FOLDER, STEPS, export
from pipeline.models.tiny.flat import Weights, part_of
from pipeline.models.tiny.lora import initial_lora, merged
from pipeline.models.tiny.networks import Sizes, scheduler_config
from pipeline.models.tiny.state import Budget, Minutes, State
from pipeline.models.tiny.text_encoder import encode_text
from pipeline.models.tiny.train_denoiser import FLOW_SHIFT, empty_caption, tokenizer_file
from pipeline.models.tiny.training import Training
from pipeline.sampling.guidance import guided
from pipeline.sampling.steppers import Stepper

SEED = 31
TRAJECTORY_SIZES = (
    Size(width=64, height=64, num_clips=98_304),
    Size(width=96, height=64, num_clips=12_288),
    Size(width=64, height=96, num_clips=12_288),
)
_TEACHER_TIME_FRAC = 0.35  # of the part's time at most goes to the teacher
_TEACHER_BATCH = 2048
_OTHER_EVERY = 8
_SOFTENING = 0.03  # of the loss: distances below it count as squares, larger ones as they are


@dataclass(frozen=True, kw_only=True)
class Trajectories:
    """The teacher's clips of one size: the noise, then the state after each of the student's steps."""

    states_SMNP: torch.Tensor
    ids_ML: torch.Tensor
    lengths_M: torch.Tensor
    rope: Rope

    def __len__(self) -> int:
        return len(self.ids_ML)


def choose_guidance(
    state: State, sizes: Sizes, *, device: str, num_captions: int = 200, num_seeds: int = 2
) -> float:
    """The scale with the most clips right, measured once and kept as `guidance`. Needs `denoiser`."""
    if (known := state.facts("guidance")) is not None:
        return float(known["guidance_scale"])
    settings = [Setting(name=f"guidance {scale:g}", steps=STEPS, guidance_scale=scale) for scale in SCALES]
    with TemporaryDirectory() as folder:
        export(state, Path(folder), sizes)
        scores = evaluate(
            Path(folder),
            settings,
            device=device,
            num_captions=num_captions,
            num_seeds=num_seeds,
            to_choose=True,
        )
    state.log("guidance\n" + table(scores))
    best = max(scores, key=lambda score: score.all_three).setting.guidance_scale
    measured = {f"{score.setting.guidance_scale:g}": score.all_three for score in scores}
    state.save_facts("guidance", {"guidance_scale": best, "all_three_by_scale": measured})
    return best


def distill(
    state: State,
    budget: Budget,
    sizes: Sizes,
    *,
    device: str,
    guidance_scale: float,
    batch: int = 512,
    trajectory_sizes: Sequence[Size] = TRAJECTORY_SIZES,
    teacher_batch: int = _TEACHER_BATCH,
    extend: bool = False,
) -> None:
    """Writes `few_step`: the low-rank update. Needs `denoiser`."""
    torch.manual_seed(SEED)
    denoiser, _ = state.result("denoiser")
    training = Training(
        state,
        FEW_STEP_FOLDER,
        initial_lora(part_of(denoiser, "transformer."), rank=sizes.lora_rank),
        budget=budget,
        device=device,
        learning_rate=1e-3,
        average_decay=0.998,
        extend=extend,
    )
    if training.is_finished:
        state.log("few_step is finished")
        return
    weights = {name: tensor.to(device, training.dtype) for name, tensor in denoiser.items()}
    block = compiled_block(device)
    teacher = _Teacher(weights, guidance_scale, empty_caption(tokenizer_file(state), device), device, block)
    banks = _banks(state, budget, teacher, trajectory_sizes, teacher_batch)
    state.log(f"trajectories {[len(bank) for bank in banks]} with guidance {guidance_scale:g}")
    draw = torch.Generator(device)

    def inputs_of(step: int) -> tuple[torch.Tensor, ...]:
        draw.manual_seed(step)
        other = step // _OTHER_EVERY % max(1, len(banks) - 1) + 1
        bank = banks[other if step % _OTHER_EVERY == _OTHER_EVERY - 1 and len(banks) > 1 else 0]
        which = torch.randint(len(bank), (batch,), generator=draw, device=device)
        return bank.states_SMNP[:, which], bank.ids_ML[which], bank.lengths_M[which], *bank.rope

    def loss_of(lora: dict[str, torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        states_SBNP, ids_BL, lengths_B, cos_N1R, sin_N1R = inputs
        return rollout_loss(weights, lora, states_SBNP, ids_BL, lengths_B, (cos_N1R, sin_N1R), block)

    training.run(inputs_of, loss_of, keep=lambda: {"guidance_scale": guidance_scale, "steps": FEW_STEPS})


def rollout_loss(
    weights: Weights,
    lora: Weights,
    states_SBNP: torch.Tensor,
    ids_BL: torch.Tensor,
    lengths_B: torch.Tensor,
    rope: Rope,
    block: Block | None,
) -> torch.Tensor:
    """How far the student's states are from the teacher's, each by the width of the step that led there."""
    student = merged(part_of(weights, "transformer."), lora)
    with torch.no_grad():
        text = encode_text(part_of(weights, "text_encoder."), ids_BL, lengths_B)
    wanted = states_SBNP.float()
    stepper = _stepper(FEW_STEPS, "cpu")  # so that the timesteps can be read without waiting for the device
    timesteps = stepper.timesteps.tolist()
    sigmas = [*(timestep / 1000 for timestep in timesteps), 0.0]
    x, losses, widths = wanted[0], [], []
    for index, timestep in enumerate(timesteps):
        timestep_B = torch.full(x.shape[:1], float(timestep), device=x.device)
        predicted = velocity(student, x, timestep_B, text, lengths_B, rope, block)
        x = stepper.step(predicted, index=index, latents_BCTHW=x)
        distance = (x - wanted[index + 1]).square().mean(dim=(1, 2))
        losses.append((distance + _SOFTENING**2).sqrt().mean())
        widths.append(sigmas[index] - sigmas[index + 1])
    return torch.stack([loss / width for loss, width in zip(losses, widths, strict=True)]).mean()


class _Teacher:
    """The trained model, guided, as it ships. empty: the negative prompt's tokens and length."""

    def __init__(
        self,
        weights: Weights,
        guidance_scale: float,
        empty: tuple[torch.Tensor, torch.Tensor],
        device: str,
        block: Block | None,
    ) -> None:
        self.transformer = part_of(weights, "transformer.")
        self.text_encoder = part_of(weights, "text_encoder.")
        self.guidance_scale = guidance_scale
        self.empty = empty
        self.device = device
        self.block = block

    @torch.no_grad()
    def states(
        self, noise_BNP: torch.Tensor, ids_BL: torch.Tensor, lengths_B: torch.Tensor, rope: Rope
    ) -> torch.Tensor:
        """(S, B, N, P): the noise, and the states at the student's noise levels, the last one clean."""
        empty_ids, empty_length = self.empty
        ids = torch.cat([ids_BL, empty_ids.expand_as(ids_BL)])
        lengths = torch.cat([lengths_B, empty_length.expand_as(lengths_B)])
        text = encode_text(self.text_encoder, ids, lengths)
        stepper = _stepper(STEPS, self.device)
        x, kept = noise_BNP, [noise_BNP]
        for index, timestep in enumerate(stepper.timesteps):
            both = velocity(
                self.transformer,
                torch.cat([x, x]),
                timestep.expand(2 * len(x)),
                text,
                lengths,
                rope,
                self.block,
            )
            conditional, unconditional = both.chunk(2)
            steered = guided(conditional, unconditional, scale=self.guidance_scale)
            x = stepper.step(steered, index=index, latents_BCTHW=x)
            if (index + 1) % (STEPS // FEW_STEPS) == 0:
                kept.append(x)
        return torch.stack(kept)


def _banks(
    state: State, budget: Budget, teacher: _Teacher, sizes: Sequence[Size], teacher_batch: int
) -> list[Trajectories]:
    """One for each size, in proportion smaller when the time runs out."""
    late_s = 60 * budget.minutes * _TEACHER_TIME_FRAC if isinstance(budget, Minutes) else float("inf")
    share = late_s / sum(size.num_clips * size.width * size.height for size in sizes)
    banks = []
    for size in sizes:
        used_s = budget.used_s if isinstance(budget, Minutes) else 0.0
        until_s = used_s + share * size.num_clips * size.width * size.height
        banks.append(_bank(state, budget, teacher, size, teacher_batch, until_s))
    return banks


def _bank(
    state: State, budget: Budget, teacher: _Teacher, size: Size, teacher_batch: int, until_s: float
) -> Trajectories:
    num_scenes = min(teacher_batch, size.num_clips)
    orders = [
        Order(
            seed=SEED,
            number=number,
            num_scenes=num_scenes,
            width=size.width,
            height=size.height,
            num_captions=1,
            tokenizer=state.folder / "tokenizer.json",
        )
        for number in range(size.num_clips // num_scenes)
    ]
    height, width, frames = size.height // 8, size.width // 8, 5
    rope = rope_tables(frames, height, width, teacher.device)
    num_numbers = teacher.transformer["proj_out.weight"].shape[0]
    draw = torch.Generator(teacher.device)
    parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for order, described in zip(orders, draw_all(orders), strict=True):
        draw.manual_seed(order.number)
        shape = (num_scenes, frames * height * width // 4, num_numbers)
        noise = torch.randn(shape, generator=draw, device=teacher.device)
        ids = torch.from_numpy(described.ids[:, 0]).long().to(teacher.device)
        lengths = torch.from_numpy(described.lengths[:, 0]).long().to(teacher.device)
        parts.append((teacher.states(noise, ids, lengths, rope).half(), ids, lengths))
        if isinstance(budget, Minutes) and budget.used_s > until_s:
            break
    return Trajectories(
        states_SMNP=torch.cat([states for states, _, _ in parts], dim=1),
        ids_ML=torch.cat([ids for _, ids, _ in parts]),
        lengths_M=torch.cat([lengths for _, _, lengths in parts]),
        rope=rope,
    )


def _stepper(steps: int, device: str) -> Stepper:
    return Stepper(scheduler_config(), flow_shift=FLOW_SHIFT, steps=steps, device=device)
