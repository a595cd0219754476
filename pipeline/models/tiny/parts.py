"""The parts of the training with everything that differs between the real model and a toy one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.models.tiny.bank import Size
from pipeline.models.tiny.distill import TRAJECTORY_SIZES, choose_guidance, distill
from pipeline.models.tiny.evaluate import Score, default_settings, evaluate, table
from pipeline.models.tiny.export import export
from pipeline.models.tiny.networks import REAL, TOY, Sizes
from pipeline.models.tiny.state import Budget, Minutes, State, Steps
from pipeline.models.tiny.train_denoiser import BANK_SIZES, train_denoiser
from pipeline.models.tiny.train_vae import train_vae


@dataclass(frozen=True, kw_only=True)
class Plan:
    """steps: end a part after so many, whatever the time; None: by the clock."""

    sizes: Sizes
    steps: int | None
    vae_batch: int
    num_test_clips: int
    denoiser_batch: int
    bank_sizes: Sequence[Size]
    distill_batch: int
    trajectory_sizes: Sequence[Size]
    teacher_batch: int
    guidance_captions: int
    guidance_seeds: int
    evaluation_captions: int
    evaluation_seeds: int


REAL_PLAN = Plan(
    sizes=REAL,
    steps=None,
    vae_batch=32,
    num_test_clips=256,
    denoiser_batch=1024,
    bank_sizes=BANK_SIZES,
    distill_batch=512,
    trajectory_sizes=TRAJECTORY_SIZES,
    teacher_batch=2048,
    guidance_captions=200,
    guidance_seeds=2,
    evaluation_captions=200,
    evaluation_seeds=3,
)
TOY_PLAN = Plan(
    sizes=TOY,
    steps=24,
    vae_batch=2,
    num_test_clips=4,
    denoiser_batch=16,
    bank_sizes=[Size(width=size.width, height=size.height, num_clips=16) for size in BANK_SIZES],
    distill_batch=4,
    trajectory_sizes=[Size(width=size.width, height=size.height, num_clips=8) for size in TRAJECTORY_SIZES],
    teacher_batch=8,
    guidance_captions=4,
    guidance_seeds=1,
    evaluation_captions=4,
    evaluation_seeds=1,
)


def train(part: str, state: State, plan: Plan, *, minutes: float, device: str, extend: bool = False) -> None:
    """part: vae, denoiser or distill."""
    budget: Budget = Minutes(minutes) if plan.steps is None else Steps(plan.steps)
    if part == "vae":
        train_vae(
            state,
            budget,
            plan.sizes,
            device=device,
            batch=plan.vae_batch,
            num_test_clips=plan.num_test_clips,
            extend=extend,
        )
    elif part == "denoiser":
        train_denoiser(
            state,
            budget,
            plan.sizes,
            device=device,
            batch=plan.denoiser_batch,
            bank_sizes=plan.bank_sizes,
            extend=extend,
        )
    else:
        distill(
            state,
            budget,
            plan.sizes,
            device=device,
            guidance_scale=guidance(state, plan, device=device),
            batch=plan.distill_batch,
            trajectory_sizes=plan.trajectory_sizes,
            teacher_batch=plan.teacher_batch,
            extend=extend,
        )


def guidance(state: State, plan: Plan, *, device: str) -> float:
    """The scale to sample with by default."""
    return choose_guidance(
        state,
        plan.sizes,
        device=device,
        num_captions=plan.guidance_captions,
        num_seeds=plan.guidance_seeds,
    )


def export_model(state: State, folder: Path, plan: Plan) -> None:
    export(state, folder, plan.sizes)
    num_bytes = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    state.log(f"exported {num_bytes / 1e6:.2f} MB of weights to {folder}")


def evaluate_model(
    state: State,
    folder: Path,
    plan: Plan,
    *,
    device: str,
    num_captions: int | None = None,
    num_seeds: int | None = None,
) -> list[Score]:
    """num_captions, num_seeds: the plan's, when None."""
    scores = evaluate(
        folder,
        default_settings(folder),
        device=device,
        num_captions=plan.evaluation_captions if num_captions is None else num_captions,
        num_seeds=plan.evaluation_seeds if num_seeds is None else num_seeds,
    )
    state.log("evaluation\n" + table(scores))
    return scores
