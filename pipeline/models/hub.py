"""Checkpoints on the Hugging Face hub: configs when planning, weights when an engine loads. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from manifests.errors import ModelError

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")

CONFIG_FILES = ["*.json", "*/*.json", "tokenizer/*"]
WEIGHT_FILES = [f"{part}/*.safetensors" for part in ("text_encoder", "vae", "transformer", "transformer_2")]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A commit of a hub repository. files: all it has; only configs and tokenizer are in folder yet."""

    folder: Path
    commit: str
    files: frozenset[str]


def parse_hub_id(text: str) -> tuple[str, str | None] | None:
    """("org/name", revision or None) of `org/name[@revision]`; None where the text is no hub id."""
    match = _HUB_ID.fullmatch(text)
    return (match["repo"], match["revision"]) if match else None


def fetch_configs(repo: str, *, revision: str | None) -> Snapshot:
    """Resolve a branch, tag or commit and fetch its configs. Offline, what the local cache holds of it.

    Raises ModelError.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    label = f"{repo}@{revision}" if revision else repo
    cause: Exception
    try:
        info = HfApi().model_info(repo, revision=revision)
        # By branch, not by the commit just told: so the cache remembers the branch for when it is offline.
        folder = _download(repo, revision, CONFIG_FILES)
        files = frozenset(sibling.rfilename for sibling in info.siblings or ())
        return Snapshot(folder=folder, commit=_commit(folder), files=files)
    except GatedRepoError as error:
        message, cause = "access to the model must be granted on the hub first", error
        hint = "accept its terms on its page, then log in with `hf auth login`"
    except RevisionNotFoundError as error:
        message, cause = "the hub has no such revision of the model", error
        hint = "use a branch, tag or commit it has"
    except RepositoryNotFoundError as error:
        message, cause = "neither a local folder nor a model on the hub", error
        hint = "check the spelling; a folder is given as ./folder, a private model needs `hf auth login`"
    except Exception as error:  # which errors a dead network gives depends on the client's HTTP library
        return _cached_snapshot(repo, revision, label, error)
    raise ModelError(f"{message}: {label}", hint=hint) from cause


def fetch_weights(repo: str, *, commit: str) -> Path:
    """The snapshot folder, with the weights in it. Raises ModelError."""
    return fetch_files(repo, commit=commit, names=[*CONFIG_FILES, *WEIGHT_FILES])


def fetch_files(repo: str, *, commit: str, names: list[str]) -> Path:
    """The snapshot folder, with these files or patterns in it. Raises ModelError."""
    try:
        return _download(repo, commit, names)
    except Exception as error:  # as above
        raise ModelError(
            f"the weights cannot be fetched, {_first_line(error)}: {repo}@{commit}",
            hint=f"try `hf download {repo} --revision {commit}`",
        ) from error


def fetch_tensor_shapes(repo: str, *, commit: str, name: str) -> dict[str, tuple[int, ...]] | None:
    """The shapes of a safetensors file's tensors, from its header alone; None where the hub does not tell."""
    from huggingface_hub import HfApi

    try:
        header = HfApi().parse_safetensors_file_metadata(repo, name, revision=commit)
    except Exception:  # as above; whatever it is, loading the file will tell
        return None
    return {tensor: tuple(entry.shape) for tensor, entry in header.tensors.items()}


def _download(repo: str, revision: str | None, patterns: list[str], *, offline: bool = False) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()  # logs must hold no control characters
    folder = snapshot_download(repo, revision=revision, allow_patterns=patterns, local_files_only=offline)
    return Path(folder)


def _commit(folder: Path) -> str:
    assert _COMMIT.fullmatch(folder.name), folder  # the hub's cache names snapshots so
    return folder.name


def _cached_snapshot(repo: str, revision: str | None, label: str, cause: Exception) -> Snapshot:
    try:
        folder = _download(repo, revision, [*CONFIG_FILES, *WEIGHT_FILES], offline=True)
    except Exception as error:  # the cache folder may be missing, foreign or unreadable
        raise ModelError(
            "the hub cannot be reached and the model is not, or not whole, in the local cache, "
            f"{_first_line(cause)}: {label}",
            hint=f"check the network, or fetch it: `hf download {label.replace('@', ' --revision ')}`",
        ) from error
    files = frozenset(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    return Snapshot(folder=folder, commit=_commit(folder), files=files)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
