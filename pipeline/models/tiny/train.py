"""Trains the built-in model: `python -m pipeline.models.tiny.train all --state FOLDER --folder FOLDER`.

Parts, in order: vae, denoiser, guidance, distill, export, evaluate. Each takes up what the one before left in
the state folder; one that trains goes on where it was when it was stopped, the others begin anew. Seeds are
fixed; as parts end by the clock, not by a number of steps, two runs agree in quality, not bit by bit.
"""

from __future__ import annotations

import argparse
import signal
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from manifests.errors import VgbatchError

if TYPE_CHECKING:
    from pipeline.models.tiny.parts import Plan
    from pipeline.models.tiny.state import State

# What a part needs is imported when it runs: the processes that draw scenes import this file, without torch.

MINUTES = {"vae": 9.0, "denoiser": 8.5, "distill": 4.0}
PARTS = ("vae", "denoiser", "guidance", "distill", "export", "evaluate")


def main(arguments: list[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for part in PARTS if args.part == "all" else [args.part]:
        try:
            _run(part, args)
        except KeyboardInterrupt:
            raise SystemExit(f"stopped in the part `{part}`; the same command goes on with it") from None
        except VgbatchError as error:
            raise SystemExit(f"error: {error.advice}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train the built-in model.")
    parser.add_argument("part", choices=[*PARTS, "all"])
    parser.add_argument("--state", type=Path, required=True, help="what parts leave for each other")
    parser.add_argument("--folder", type=Path, help="where export writes the model (default: STATE/model)")
    parser.add_argument("--minutes", type=_minutes, help="of wall-clock time for a part, set-up included")
    parser.add_argument("--extend", action="store_true", help="go on training a finished part")
    parser.add_argument("--device", help="default: cuda:0 where there is one, else cpu")
    parser.add_argument("--toy", action="store_true", help="tiny networks and a few steps: does it all run?")
    parser.add_argument("--captions", type=_positive, help="of the evaluation's 200, the first ones")
    parser.add_argument("--seeds", type=_positive, help="clips for each caption (default: 3)")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"at least 1, not {number}")
    return number


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < 1e6:
        raise argparse.ArgumentTypeError(f"above 0, not {text}")
    return minutes


def _run(part: str, args: argparse.Namespace) -> None:
    import torch

    from pipeline.models.tiny import parts
    from pipeline.models.tiny.state import State

    device = args.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    state = State(args.state)
    folder = args.folder or args.state / "model"
    plan = parts.TOY_PLAN if args.toy else parts.REAL_PLAN
    with state.locked():
        _do(part, args, state, folder, plan, device)


def _do(part: str, args: argparse.Namespace, state: State, folder: Path, plan: Plan, device: str) -> None:
    from pipeline.models.tiny import parts

    if part in MINUTES:
        minutes = args.minutes or MINUTES[part]
        parts.train(part, state, plan, minutes=minutes, device=device, extend=args.extend)
    elif part == "guidance":
        parts.guidance(state, plan, device=device)
    elif part == "export":
        parts.export_model(state, folder, plan)
    else:
        scores = parts.evaluate_model(
            state, folder, plan, device=device, num_captions=args.captions, num_seeds=args.seeds
        )
        state.save_facts("evaluation", {"scores": [asdict(score) for score in scores]})


if __name__ == "__main__":
    main()
