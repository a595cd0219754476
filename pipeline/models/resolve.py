"""From a model's name to its sizes, limits, defaults and source, without loading a weight. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from manifests.errors import ModelError
from manifests.job import Weights
from manifests.model_spec import ModelSpec
from pipeline.config import ModelSource
from pipeline.memory.caps import batch_cap
from pipeline.memory.residency import transformer_bytes
from pipeline.models.checkpoint import Checkpoint, read_checkpoint
from pipeline.models.families import Defaults, defaults_of
from pipeline.models.few_step import few_step_defaults, few_step_of
from pipeline.models.hub import fetch_configs, parse_hub_id
from pipeline.models.lora_files import require_fit_by_shapes
from pipeline.models.revision import folder_revision
from pipeline.models.text import MAX_TOKENS, TokenCounter
from pipeline.sampling.recipes import FILE_NAME, Recipe, published_recipe, read_recipe

BUILTIN = "builtin"
_BUILTIN_FOLDER = Path(__file__).with_name("tiny")
_VALID = f"a model is `{BUILTIN}`, a folder such as ./my-model, or a hub id such as org/name@revision"


@dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    """display_name: for people. transformer_bytes: of weights on a card, all experts together."""

    spec: ModelSpec
    source: ModelSource
    display_name: str
    transformer_bytes: int


def resolve_model(
    weights: Weights | str, *, pinned_revision: str | None = None, aliases: Mapping[str, str] | None = None
) -> ResolvedModel:
    """Find a model and check it as far as that is possible without its weights.

    weights: its model is an alias, "builtin", a folder, or `org/name[@revision]`; a text is such a model
    alone. pinned_revision: the commit to use for a hub id that names none. Raises ModelError.
    """
    weights = Weights(weights) if isinstance(weights, str) else weights
    target = (aliases or {}).get(weights.model, weights.model)
    label = weights.model if weights.model == target else f"{weights.model} ({target})"
    checkpoint, source, recipe = _find(weights, target, pinned_revision=pinned_revision, label=label)
    few_step = few_step_of(weights, recipe=recipe, folder=source.folder)
    num_experts = 2 if checkpoint.two_experts else 1
    for lora in few_step.loras:
        if len(lora.files) > num_experts:
            raise ModelError(
                f"a LoRA for two experts, where the model has one: {weights}", hint="name one of its files"
            )
        require_fit_by_shapes(lora, checkpoint.transformer, num_experts=num_experts)
    return _resolved(checkpoint, replace(source, loras=few_step.loras, recipe=few_step.recipe))


def _find(
    weights: Weights, target: str, *, pinned_revision: str | None, label: str
) -> tuple[Checkpoint, ModelSource, Recipe | None]:
    """The checkpoint and its few-step recipe, without the LoRAs."""
    folder = _BUILTIN_FOLDER if target == BUILTIN else _existing_folder(target)
    if folder is not None:
        recipe = folder / FILE_NAME
        return *_from_folder(weights, folder, label=label), read_recipe(recipe) if recipe.is_file() else None
    if (hub_id := parse_hub_id(target)) is None or target.startswith("."):
        raise ModelError(f"no such folder, and not a hub id: {label}", hint=_VALID)
    repo, revision = hub_id
    found = _from_hub(weights, repo, revision=revision or pinned_revision, label=label)
    return *found, published_recipe(repo)


def _existing_folder(target: str) -> Path | None:
    try:
        folder = Path(target).expanduser()
        if folder.is_file():
            raise ModelError(f"a file, not a diffusers checkpoint folder: {target}", hint=_VALID)
        return folder.absolute() if target and folder.is_dir() else None
    except (OSError, ValueError, RuntimeError):  # too long, a null character, `~` without a home
        return None


def _from_folder(weights: Weights, folder: Path, *, label: str) -> tuple[Checkpoint, ModelSource]:
    checkpoint = read_checkpoint(folder, label=label, files=_list_files(folder))
    revision = folder_revision(folder, checkpoint.files)
    source = ModelSource(weights=weights, folder=folder, base_revision=revision, engine="wan")
    return checkpoint, source


def _list_files(folder: Path) -> frozenset[str]:
    if not (folder / "model_index.json").is_file():  # may be a home folder: do not walk through it
        return frozenset()
    return frozenset(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


def _from_hub(
    weights: Weights, repo: str, *, revision: str | None, label: str
) -> tuple[Checkpoint, ModelSource]:
    snapshot = fetch_configs(repo, revision=revision)
    checkpoint = read_checkpoint(snapshot.folder, label=label, files=snapshot.files)
    source = ModelSource(
        weights=weights,
        folder=snapshot.folder,
        base_revision=snapshot.commit,
        engine="wan",
        hub_id=repo,
    )
    return checkpoint, source


def _resolved(checkpoint: Checkpoint, source: ModelSource) -> ResolvedModel:
    defaults = defaults_of(checkpoint)
    if source.recipe is not None:
        defaults = few_step_defaults(defaults, source.recipe)
    spec = _spec(checkpoint, defaults, source)
    return ResolvedModel(
        spec=spec,
        source=source,
        display_name=defaults.display_name,
        transformer_bytes=transformer_bytes(
            checkpoint.transformer, num_experts=2 if checkpoint.two_experts else 1
        ),
    )


def _spec(checkpoint: Checkpoint, defaults: Defaults, source: ModelSource) -> ModelSpec:
    return ModelSpec(
        name=str(source.weights),
        revision=source.revision,
        engine=source.engine,
        multiple=checkpoint.patch_pixels,
        temporal=checkpoint.temporal,
        min_side=defaults.min_side,
        max_side=defaults.max_side,
        max_frames=defaults.max_frames,
        patch_pixels=checkpoint.patch_pixels,
        default_width=defaults.width,
        default_height=defaults.height,
        default_num_frames=defaults.num_frames,
        default_fps=defaults.fps,
        default_steps=defaults.steps,
        default_guidance_scale=defaults.guidance_scale,
        default_guidance_scale_2=defaults.guidance_scale_2,
        default_flow_shift=defaults.flow_shift,
        default_negative_prompt=defaults.negative_prompt,
        resolutions=defaults.resolutions,
        two_experts=checkpoint.two_experts,
        max_tokens=MAX_TOKENS,
        count_tokens=TokenCounter(checkpoint.folder / "tokenizer"),
        cap=_cap(checkpoint.patch_pixels, checkpoint.temporal),
        few_step=None if source.recipe is None else source.recipe.name,
    )


def _cap(patch_pixels: int, temporal: int) -> Callable[[int, int, int], int]:
    """width, height in pixels and num_frames, as rendered, to the largest batch worth running."""

    def cap(width: int, height: int, num_frames: int) -> int:
        latent_frames = (num_frames - 1) // temporal + 1
        return batch_cap((width // patch_pixels) * (height // patch_pixels) * latent_frames)

    return cap
