"""The loop that every part shares: flat weights, AdamW, an average of the weights, checkpoints, a log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from pipeline.graph.recorded import Recorded, Tensors
from pipeline.models.tiny.flat import Layout, Weights, require_shapes
from pipeline.models.tiny.state import CHECKPOINT_EVERY_S, Budget, State

WARMUP_STEPS = 200
EXTENSION_FROM = 0.5  # of its schedule is where a finished part starts again when it is extended
_CLIP = 1.0

InputsOf = Callable[[int], Tensors]  # all that a step sees, by its number, everything random drawn
LossOf = Callable[..., torch.Tensor]  # of the weights as the model computes with them, and of the inputs


class Training:
    """One part's weights and how far they are.

    Constant learning rate after a warm-up, falling to zero over the second half. What is kept is an
    exponential average of the weights. device "cpu" computes in fp32, a card in bf16.
    """

    def __init__(
        self,
        state: State,
        name: str,
        initial: Weights,
        *,
        budget: Budget,
        device: str,
        learning_rate: float,
        average_decay: float,
        extend: bool = False,
    ) -> None:
        self.state = state
        self.name = name
        self.budget = budget
        self.device = device
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.learning_rate = learning_rate
        self.average_decay = average_decay
        self.layout = Layout(initial)
        self.step = 0
        self.optimizer_since = 0
        self.start = 0.0
        self._restore(initial, extend)

    def _restore(self, initial: Weights, extend: bool) -> None:
        if self.state.has(self.name):
            require_shapes(self.state.result(self.name)[0], self.layout.shapes)
        unfinished = self.state.unfinished(self.name)
        if unfinished is not None:
            tensors, facts = unfinished
            self._begin(tensors["flat"], tensors["average"])
            self.optimizer.state[self.flat] = {
                "step": torch.tensor(float(facts["step"]), device=self.device),
                "exp_avg": tensors["exp_avg"].to(self.device),
                "exp_avg_sq": tensors["exp_avg_sq"].to(self.device),
            }
            self.step, self.start = facts["step"], facts["done"]
            self.optimizer_since = facts["optimizer_since"]
        elif self.state.has(self.name):
            weights, facts = self.state.result(self.name)
            flat = self.layout.flatten(weights, device="cpu")
            self._begin(flat, flat)
            self.step = self.optimizer_since = facts["step"]
            self.start = facts["done"]
            if extend and self.start >= 1:
                self.start = EXTENSION_FROM
        else:
            flat = self.layout.flatten(initial, device="cpu")
            self._begin(flat, flat)
        self.first_step = self.step

    def _begin(self, flat: torch.Tensor, average: torch.Tensor) -> None:
        self.flat = flat.to(self.device).clone().requires_grad_()
        self.average = average.to(self.device).clone()
        self.optimizer = torch.optim.AdamW(
            [self.flat],
            lr=self.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=0.0,
            fused=self.device != "cpu",
        )

    @property
    def is_finished(self) -> bool:
        return self.start >= 1

    def run(self, inputs_of: InputsOf, loss_of: LossOf, *, keep: Callable[[], dict[str, Any]] = dict) -> None:
        """Train until the budget is spent; keep: facts to store beside the result, asked for when saving.

        loss_of is recorded (recorded.py), so it may depend on nothing but its arguments. Interrupted, what
        was trained so far is stored first.
        """
        try:
            self._train(inputs_of, loss_of, keep)
        except KeyboardInterrupt:
            self._save(keep())
            raise
        self.start = self._done()
        self._save(keep())
        if self.is_finished:
            self.state.forget_unfinished(self.name)

    def _train(self, inputs_of: InputsOf, loss_of: LossOf, keep: Callable[[], dict[str, Any]]) -> None:

        def loss_and_gradient(*inputs: torch.Tensor) -> Tensors:
            loss = loss_of(self.layout.split(self.flat.to(self.dtype)), *inputs)
            return loss.detach(), *torch.autograd.grad(loss, self.flat)

        recorded = Recorded(loss_and_gradient, enabled=self.device != "cpu")
        began_s = saved_s = time.monotonic()
        total = torch.zeros((), device=self.device)
        num_summed, next_log = 0, 100
        while not self.budget.is_spent(self.step) and (done := self._done()) < 1:
            loss, gradient = recorded(*inputs_of(self.step))
            self._update(gradient, done)
            total += loss
            num_summed += 1
            num_done = self.step - self.first_step
            if num_done in (1, 10) or num_done >= next_log:
                rate = num_done / (time.monotonic() - began_s)
                self.state.log(
                    f"{self.name} step {self.step} done {done:.3f} loss {total.item() / num_summed:.5f} "
                    f"{rate:.1f} steps/s"
                )
                total.zero_()
                num_summed, next_log = 0, num_done + max(100, round(15 * rate))
            if time.monotonic() - saved_s > CHECKPOINT_EVERY_S:
                self._save(keep())
                saved_s = time.monotonic()

    def averaged(self) -> dict[str, torch.Tensor]:
        return self.layout.split(self.average)

    def _done(self) -> float:
        return self.budget.fraction(self.step, self.start)

    def _update(self, gradient: torch.Tensor, done: float) -> None:
        # No synchronisation: a gradient that is not finite becomes a step of nothing.
        norm = gradient.norm()
        gradient.mul_((_CLIP / (norm + 1e-6)).clamp(max=1.0)).nan_to_num_(0.0, 0.0, 0.0)
        num_updates = self.step - self.optimizer_since
        warm_up = min(1.0, (num_updates + 1) / WARMUP_STEPS)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * warm_up * min(1.0, 2 * (1 - done))
        self.flat.grad = gradient
        self.optimizer.step()
        self.step += 1
        decay = min(
            self.average_decay, num_updates / (num_updates + 10)
        )  # the first weights soon count for nothing
        self.average.lerp_(self.flat.detach(), 1 - decay)

    def _save(self, facts: dict[str, Any]) -> None:
        done = self._done()
        self.state.save_result(self.name, self.averaged(), step=self.step, done=done, **facts)
        moments = self.optimizer.state.get(self.flat)
        if done < 1 and moments:
            tensors = {"flat": self.flat, "average": self.average}
            tensors |= {key: moments[key] for key in ("exp_avg", "exp_avg_sq")}
            self.state.save_unfinished(
                self.name, tensors, step=self.step, done=done, optimizer_since=self.optimizer_since
            )
