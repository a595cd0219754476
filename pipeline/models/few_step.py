"""Which jobs' weights are few-step ones, and what that makes of a model's defaults. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from manifests.errors import ModelError
from manifests.job import Weights
from pipeline.config import LoraSource
from pipeline.models.families import Defaults
from pipeline.models.lora_files import find_lora, find_loras
from pipeline.sampling.recipes import FILE_NAME, Recipe


@dataclass(frozen=True, kw_only=True)
class FewStep:
    """loras: all that go into the weights. recipe: None for weights that take many steps."""

    loras: tuple[LoraSource, ...]
    recipe: Recipe | None


def few_step_of(weights: Weights, *, recipe: Recipe | None, folder: Path) -> FewStep:
    """recipe: of the checkpoint in folder, or of the few-step LoRA that lies in it.

    Raises ModelError for a LoRA that cannot be used, for `turbo` with weights that take many steps, and
    where two recipes meet.
    """
    loras = [] if weights.lora is None else find_loras(weights.lora)
    sources = tuple(lora.source for lora in loras)
    recipes = [lora.recipe for lora in loras if lora.recipe is not None]
    if recipe is not None and recipe.lora is None:
        recipes.insert(0, recipe)  # the checkpoint is a few-step one, whatever is asked of it
    elif recipe is not None and weights.few_step and not recipes:
        assert recipe.lora is not None
        own = find_lora(str(folder / recipe.lora)).source
        if any(source.revision == own.revision for source in sources):
            raise ModelError(
                f"the few-step LoRA that the model brings along, a second time: {weights}",
                hint="leave it out: `turbo` takes it by itself",
            )
        sources = (own, *sources)
        recipes.append(recipe)
    if len(recipes) > 1:
        names = " and ".join(one.name for one in recipes)
        raise ModelError(f"two few-step recipes at once, {names}: {weights}", hint="leave one of them out")
    if weights.few_step and not recipes:
        raise ModelError(
            f"`turbo` needs weights that were trained for a few steps, and of these none is known: {weights}",
            hint=f"name a few-step checkpoint or LoRA, or describe it in a file {FILE_NAME} in its folder",
        )
    return FewStep(loras=sources, recipe=recipes[0] if recipes else None)


def few_step_defaults(defaults: Defaults, recipe: Recipe) -> Defaults:
    return replace(
        defaults,
        steps=recipe.steps,
        guidance_scale=1.0,
        guidance_scale_2=None if defaults.guidance_scale_2 is None else 1.0,
        flow_shift=defaults.flow_shift if recipe.flow_shift is None else recipe.flow_shift,
    )
