"""What is known about a draft: read from its config, its weights and the two records that may lie beside them.

A card states facts and nothing else, so each field here has one source, and a field without one stays empty:

* `training.json`: how the draft was made. Known keys: `target`, `license`, `languages`, `datasets` (names, or
  dictionaries with `name`, `license`, `rows`), `thinking` (`"on"`, `"off"` or `"both"`), `max_length` (tokens of the
  longest training sequence), `commands`; every other plain value becomes a row of the card's training table.
* `benchmark.json`: what `dflash-hf benchmark` measured; its schema is in `dflash_hf.evaluation.record`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .results import Results, read_results

TRAINING_FILE = "training.json"
BENCHMARK_FILE = "benchmark.json"
SUFFIX = "DFlash"


@dataclass
class Facts:
    """Everything a model card may say about a draft."""

    name: str
    base_model: str
    license: str
    block_size: int
    mask_token_id: int
    target_layer_ids: list[int]
    num_layers: int
    max_position_embeddings: int
    parameters: int
    dtype: str
    repo_id: str | None = None
    revision: str | None = None
    weight_bytes: int = 0
    code_files: list[str] = field(default_factory=list)
    training: dict[str, Any] = field(default_factory=dict)
    results: Results | None = None

    @property
    def datasets(self) -> list[dict[str, Any]]:
        listed = self.training.get("datasets") or []
        return [entry if isinstance(entry, dict) else {"name": str(entry)} for entry in listed]

    @property
    def languages(self) -> list[str]:
        return [str(language) for language in self.training.get("languages") or []]


def read_record(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ValueError: If the file is missing, is not JSON, or holds no object.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); write it anew or leave it out.") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path} holds a {type(record).__name__}, not an object; write it anew or leave it out.")
    return record


def collect_facts(
    draft: Any,
    source: Path | None,
    *,
    name: str | None = None,
    repo_id: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
    training: Path | None = None,
    benchmark: Path | None = None,
) -> Facts:
    """The facts of a loaded draft. `source` is the folder it came from, where it came from one.

    Its name is that of the repository, else `name`, else that of the folder.

    Raises:
        ValueError: If no source names the target or the licence, or a record is unreadable.
    """
    record = _record_of(source, training, TRAINING_FILE)
    found = _record_of(source, benchmark, BENCHMARK_FILE)
    results = read_results(found, benchmark or Path(BENCHMARK_FILE)) if found else None
    metadata = _card_metadata(source)
    target = base_model or getattr(draft.config, "target_name_or_path", None) or record.get("target")
    target = target or _first(metadata.get("base_model"))
    if not target:
        raise ValueError("The draft does not say which target it was trained for; name it with --base-model ORG/NAME.")
    licence = license or record.get("license") or metadata.get("license")
    if not licence:
        raise ValueError(
            "The draft does not state its licence, and a card must; name it with --license, such as apache-2.0."
        )
    config = draft.config
    return Facts(
        name=repo_id.split("/")[-1] if repo_id else name or _folder_name(source, target),
        base_model=target,
        license=str(licence),
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        target_layer_ids=list(config.target_layer_ids),
        num_layers=config.num_hidden_layers,
        max_position_embeddings=config.max_position_embeddings,
        parameters=sum(parameter.numel() for parameter in draft.parameters()),
        dtype=str(draft.dtype).removeprefix("torch."),
        repo_id=repo_id,
        training=record,
        results=results,
    )


def _record_of(source: Path | None, named: Path | None, file_name: str) -> dict[str, Any]:
    if named is not None:
        return read_record(named)
    if source is not None and (source / file_name).is_file():
        return read_record(source / file_name)
    return {}


def _card_metadata(source: Path | None) -> dict[str, Any]:
    """The YAML head of the README beside the draft, if there is one."""
    if source is None or not (source / "README.md").is_file():
        return {}
    from huggingface_hub import ModelCard

    return ModelCard.load(source / "README.md", ignore_metadata_errors=True).data.to_dict()


def _folder_name(source: Path | None, target: str) -> str:
    return source.resolve().name if source is not None else f"{target.split('/')[-1]}-{SUFFIX}"


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value
