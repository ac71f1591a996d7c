"""A draft on disk or on the Hub: every save is a repository that works alone, and only a whole one loads.

Transformers looks a remote module's relative imports up as files beside it: on the Hub the code is flat. There
`generation/__init__.py` is `generation.py`, and the other modules of `generation/` stand beside it; every file is
copied byte for byte. Code that was itself loaded from a repository is flat already.
"""

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import GenerationConfig
from transformers.dynamic_module_utils import get_relative_imports

AUTO_MAP = {
    "AutoConfig": "configuration_dflash.DFlashConfig",
    "AutoModel": "modeling_dflash.Qwen3DFlashForDraft",
}
ENTRY_FILES = ("configuration_dflash.py", "modeling_dflash.py")
HUB_ARGUMENTS = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder")
# How the card begins that Transformers writes where a pushed repository has none.
PLACEHOLDER_CARD = "<!-- Provide a quick summary of what the model is/does. -->"
CARD = """---
library_name: transformers
{base_model}tags:
- dflash
- speculative-decoding
- draft-model
- block-diffusion
- custom_code
inference: false
---

# {name}

**This is a drafter, not a language model.** Pass it to {target}: load it with
`draft = AutoModel.from_pretrained("{repo_id}", trust_remote_code=True)` and call
`target.generate(**inputs, assistant_model=draft)` ([DFlash](https://arxiv.org/abs/2602.06036)).
"""


class DraftRepository:
    """Mixin of a draft model: how it is saved, pushed and loaded. Stands before `PreTrainedModel` among the bases."""

    config: Any
    generation_config: GenerationConfig

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing to do: `save_pretrained` writes the code and `auto_map` itself, whatever class it came from."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None = None,
        *model_args: Any,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Like [`~transformers.PreTrainedModel.from_pretrained`], for whole drafts in safetensors only.

        Raises:
            ValueError: If a file is damaged, or a tensor is missing, of another shape, or has no place in the draft.
        """
        hub_arguments = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
        may_mismatch = kwargs.pop("ignore_mismatched_sizes", False)
        kwargs.setdefault("use_safetensors", True)
        try:
            model, info = super().from_pretrained(  # type: ignore[misc]
                pretrained_model_name_or_path,
                *model_args,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **kwargs,
            )
        except SafetensorError as error:
            raise ValueError(damaged_weights(pretrained_model_name_or_path, error)) from error
        refuse_incomplete(pretrained_model_name_or_path, info, may_mismatch)
        if pretrained_model_name_or_path is not None:
            model.read_generation_config(pretrained_model_name_or_path, **hub_arguments)
        return (model, info) if output_loading_info else model

    def read_generation_config(self, name_or_path: str | os.PathLike[str], **hub_arguments: Any) -> None:
        """Take the drafting settings that lie beside the weights; keep the present ones where there are none."""
        try:
            self.generation_config = GenerationConfig.from_pretrained(name_or_path, **hub_arguments)
        except OSError:
            return

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write a complete Hub repository: weights, config with `auto_map`, generation config and the flat code files.

        Arguments are those of [`~transformers.PreTrainedModel.save_pretrained`]. Modules that were attached to the
        draft and are no part of it, such as its target, are not saved.
        """
        hub_arguments = {
            name: kwargs.pop(name) for name in ("repo_id", "commit_message", "create_pr") if name in kwargs
        }
        self.config.auto_map = dict(AUTO_MAP)
        own = self._own_tensor_names()
        tensors = self.state_dict() if state_dict is None else state_dict  # type: ignore[attr-defined]
        tensors = {name: tensor for name, tensor in tensors.items() if name in own}
        super().save_pretrained(save_directory, is_main_process, tensors, **kwargs)  # type: ignore[misc]
        if is_main_process:
            if kwargs.get("variant") is None:
                remove_other_layout(Path(save_directory))
            save_code(save_directory)
        if push_to_hub and is_main_process:
            repo_id = hub_arguments.pop("repo_id", Path(save_directory).name)
            self.push_to_hub(repo_id, token=kwargs.get("token"), **hub_arguments)  # type: ignore[attr-defined]

    def _own_tensor_names(self) -> set[str]:
        with torch.device("meta"):
            return set(type(self)(copy.deepcopy(self.config)).state_dict())  # type: ignore[call-arg, attr-defined]

    def _upload_modified_files(
        self, working_dir: str | os.PathLike[str], repo_id: str, *args: Any, **kwargs: Any
    ) -> Any:
        """The last step of `push_to_hub`: where Transformers has put a placeholder for a card, say what this is."""
        card = Path(working_dir) / "README.md"
        if card.is_file() and PLACEHOLDER_CARD in card.read_text(encoding="utf-8"):
            card.write_text(minimal_card(repo_id, getattr(self.config, "target_name_or_path", None)), encoding="utf-8")
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)  # type: ignore[misc]


def minimal_card(repo_id: str, target: str | None) -> str:
    """What a repository says of itself until somebody writes a card."""
    return CARD.format(
        name=repo_id.split("/")[-1],
        repo_id=repo_id,
        base_model=f"base_model: {target}\n" if target else "",
        target=f"`{target}`" if target else "the target it was trained for",
    )


def damaged_weights(name: str | os.PathLike[str] | None, error: Exception) -> str:
    """What to tell who loads a draft with a safetensors file that cannot be read."""
    damaged = []
    for path in sorted(Path(name or "").glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError:
            damaged.append(path.name)
    files = ", ".join(damaged) or "a safetensors file"
    return f"The draft {name} has a damaged or truncated file, {files} ({error}); download or save it again."


def refuse_incomplete(name: str | os.PathLike[str] | None, info: dict[str, Any], may_mismatch: bool) -> None:
    """Refuse a file that does not fill the draft exactly: Transformers would warn and fill gaps at random.

    Raises:
        ValueError: Naming the tensors.
    """
    where = "The draft" if name is None else f"The draft {name}"
    for kind, what in (("missing_keys", "lacks"), ("unexpected_keys", "has no place for")):
        if tensors := sorted(info.get(kind) or ()):
            raise ValueError(
                f"{where} {what} the tensor{'s' if len(tensors) > 1 else ''} {', '.join(tensors)}; "
                "its weights and its config.json do not belong together, download or save it again."
            )
    if mismatched := sorted(info.get("mismatched_keys") or (), key=str):
        if may_mismatch:
            return
        tensor, found, expected = mismatched[0]
        raise ValueError(
            f"{where} has {tensor} of shape {list(found)}, but its config.json asks for {list(expected)}; "
            "its weights and its config.json do not belong together, download or save it again."
        )


def remove_other_layout(folder: Path) -> None:
    """After a save over an earlier one, drop the whole file beside shards, or the index that shards have left.

    Transformers removes old shards only, and loads the whole file where it finds both.
    """
    if any(folder.glob("model-*-of-*.safetensors")):
        (folder / "model.safetensors").unlink(missing_ok=True)
    else:
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)


def code_files() -> dict[str, Path]:
    """The flat code files of this very copy of the code, as far as they are imported: name in a repository -> file.

    Raises:
        FileNotFoundError: If a module that the code imports is not where this copy of the code expects it.
    """
    here = Path(__file__).resolve().parent
    is_package = (here / "__init__.py").is_file() and (here.parent / ENTRY_FILES[1]).is_file()
    folders = [here, here.parent] if is_package else [here]
    files: dict[str, Path] = {}
    pending = list(ENTRY_FILES)
    while pending:
        name = pending.pop()
        places = [folder / name for folder in folders]
        if is_package and name == "generation.py":
            places = [here / "__init__.py"]
        found = next((path for path in places if path.is_file()), None)
        if found is None:
            raise FileNotFoundError(f"The draft's code cannot be saved: {name} is missing in {here}.")
        files[name] = found
        pending += [f"{module}.py" for module in get_relative_imports(found) if f"{module}.py" not in files]
    return dict(sorted(files.items()))


def save_code(folder: str | os.PathLike[str]) -> list[str]:
    """Write the flat code files into `folder`, each aside and then renamed; returns their names."""
    files = code_files()
    for name, source in files.items():
        target = Path(folder) / name
        if target.exists() and target.samefile(source):
            continue
        aside = target.with_name(f".{name}.{os.getpid()}")
        shutil.copyfile(source, aside)
        os.replace(aside, target)
    return list(files)


__all__ = ["AUTO_MAP", "ENTRY_FILES", "DraftRepository", "code_files", "save_code"]
