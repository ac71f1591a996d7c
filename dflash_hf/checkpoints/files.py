"""Files of a published draft: fetching them, and reading them with errors that name the file at fault."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MASK_EMBEDDING_NAME = "mask_embedding.pt"
WANTED = ["*.json", "*.safetensors", MASK_EMBEDDING_NAME]


def find_folder(name_or_path: str | Path, **hub_kwargs: Any) -> Path:
    """The folder that holds a draft: `name_or_path` itself where it is one, else a snapshot of that Hub repository.

    Raises:
        OSError: If there is neither such a folder nor such a repository.
    """
    path = Path(name_or_path)
    if path.is_dir():
        return path
    if path.exists():
        raise OSError(f"{path} is a file; name the folder that holds the draft's {CONFIG_NAME} and weights.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(str(name_or_path), allow_patterns=WANTED, **hub_kwargs))
    except HFValidationError as error:
        raise OSError(
            f"{str(name_or_path)!r} is no folder here and no repository name of the Hub; check the path."
        ) from error
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise OSError(
            f"{str(name_or_path)!r} is no folder here and could not be fetched from the Hub ({reason})"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        OSError: If the file is missing.
        ValueError: If it is not a JSON object.
    """
    return read_json_object(folder / CONFIG_NAME)


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file's object.

    Raises:
        OSError: If the file is missing.
        ValueError: If it holds no JSON object.
    """
    if not path.is_file():
        raise OSError(f"{path} is missing; a draft's folder holds it beside the weights.")
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))  # an editor may leave a byte-order mark
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); fetch it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, where an object of fields is expected.")
    return content


def read_tensors(folder: Path) -> "dict[str, torch.Tensor]":
    """Every tensor of the folder's safetensors files, by its name on disk.

    Raises:
        OSError: If a weights file is missing.
        ValueError: If one is truncated or corrupted, or does not hold what the index says.
    """
    tensors = {}
    for path in weight_files(folder):
        for name, tensor in _tensors_of(path):
            if name in tensors:
                raise ValueError(f"{path} holds {name!r}, which another weights file of the draft holds too.")
            tensors[name] = tensor
    _check_index(folder, tensors)
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files to read: the single one, or else those that the index names, as Transformers chooses."""
    if _has_index(folder):
        paths = [folder / name for name in sorted(set(_weight_map(folder).values()))]
    else:
        paths = [folder / WEIGHTS_NAME]
    for path in paths:
        if not path.is_file():
            raise OSError(f"{path} is missing; a draft's weights are read from safetensors files only.")
    return paths


def _has_index(folder: Path) -> bool:
    return (folder / INDEX_NAME).is_file() and not (folder / WEIGHTS_NAME).is_file()


def _weight_map(folder: Path) -> dict[str, str]:
    weight_map = read_json_object(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{folder / INDEX_NAME} has no `weight_map` that says which file holds which tensor.")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:  # a path could lead out of the draft's folder
            raise ValueError(f"{folder / INDEX_NAME} says that {tensor!r} is in {name!r}, which is no file beside it.")
    return weight_map


def _check_index(folder: Path, tensors: "dict[str, torch.Tensor]") -> None:
    if not _has_index(folder):
        return
    lost = sorted(set(_weight_map(folder)) - set(tensors))
    if lost:
        raise ValueError(f"{folder / INDEX_NAME} lists {lost[0]!r}, which is in none of the weights files.")


def _tensors_of(path: Path) -> "Iterator[tuple[str, torch.Tensor]]":
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (the handle is no mapping)
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(
            f"{path} is truncated or corrupted ({path.stat().st_size} bytes, {error}); fetch it again."
        ) from error


def read_mask_embedding(folder: Path) -> "tuple[int | None, torch.Tensor | None]":
    """The mask token that the folder's mask_embedding.pt is for, and the vector that stands for it.

    Raises:
        ValueError: If the file is damaged, or holds something else.
    """
    import torch

    path = folder / MASK_EMBEDDING_NAME
    if not path.is_file():
        return None, None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever its unpickler or its zip reader met
        raise ValueError(f"{path} is truncated or corrupted ({type(error).__name__}); fetch it again.") from error
    content = content if isinstance(content, dict) else {"embedding": content}
    embedding = content.get("embedding")
    if not isinstance(embedding, torch.Tensor):
        raise ValueError(f"{path} holds no tensor `embedding`; it should hold the vector that stands for a mask.")
    return content.get("mask_token_id"), embedding.reshape(-1)
