"""Staging: the folder that a Hub repository will be, byte for byte the same each time it is made from the same draft.

It holds what `draft.save_pretrained` writes (weights, config with `auto_map`, flat code, generation config), the
licence, the records the card was made from, the card and its plots. It is built aside and renamed, so it is complete
or absent.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .card import CARD_FILE, FIGURES_FOLDER, render_card
from .facts import BENCHMARK_FILE, TRAINING_FILE, Facts
from .results import draw_plots

LICENSE_FILE = "LICENSE"
PROJECT_LICENSE = "apache-2.0"
MAX_SHARD_SIZE = "5GB"


@dataclass(frozen=True)
class StagedFile:
    """One file of a staged repository: its path in it, its size in bytes and its SHA-256."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Stage:
    """A staged repository."""

    folder: Path
    files: tuple[StagedFile, ...]

    def __getitem__(self, path: str) -> StagedFile:
        return next(file for file in self.files if file.path == path)

    @property
    def card(self) -> str:
        return (self.folder / CARD_FILE).read_text(encoding="utf-8")


def stage_draft(
    draft: Any,
    facts: Facts,
    folder: Path,
    *,
    source: Path | None = None,
    license_file: Path | None = None,
    training: Path | None = None,
    benchmark: Path | None = None,
    max_shard_size: str | int = MAX_SHARD_SIZE,
) -> Stage:
    """Write the repository of `draft` into `folder`, replacing an earlier staging of it.

    Raises:
        ValueError: If `folder` holds something else, or the licence's text is not found.
    """
    with replacing(folder) as aside:
        draft.config.target_name_or_path = facts.base_model
        draft.save_pretrained(aside, max_shard_size=max_shard_size)
        write_license(aside / LICENSE_FILE, facts.license, license_file, source)
        for name, given in ((TRAINING_FILE, training), (BENCHMARK_FILE, benchmark)):
            record = given or (source / name if source is not None else None)
            if record is not None and record.is_file():
                shutil.copyfile(record, aside / name)
        facts.code_files = sorted(path.name for path in aside.glob("*.py"))
        facts.weight_bytes = sum(path.stat().st_size for path in aside.glob("*.safetensors"))
        facts.revision = facts.revision or (content_tag(aside) if facts.repo_id else None)
        figures = draw_plots(facts.results, aside / FIGURES_FOLDER) if facts.results else {}
        (aside / CARD_FILE).write_text(render_card(facts, figures), encoding="utf-8")
    return read_stage(folder)


def read_stage(folder: Path) -> Stage:
    """The files of a staged folder, hashed."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = (StagedFile(path.relative_to(folder).as_posix(), path.stat().st_size, _sha256(path)) for path in paths)
    return Stage(folder, tuple(files))


def content_tag(folder: Path) -> str:
    """A name for these weights, this config and this code: what a reader pins. The card is no part of it."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.py"), *folder.glob("*.safetensors"), folder / "config.json"]):
        digest.update(f"{path.name} {_sha256(path)}\n".encode())
    return f"dflash-{digest.hexdigest()[:12]}"


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A fresh folder beside `folder` that takes its place when the block ends well and vanishes when it does not.

    Raises:
        ValueError: If `folder` exists and is neither empty nor a draft.
    """
    if folder.exists() and not _is_replaceable(folder):
        raise ValueError(f"{folder} holds something that is not a draft; name another folder, nothing was written.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside, old = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("new", "old"))
    for leftover in (aside, old):
        shutil.rmtree(leftover, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _is_replaceable(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    if not any(folder.iterdir()):
        return True
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] == "dflash"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_license(path: Path, license: str, given: Path | None, source: Path | None) -> None:
    """Put the licence's text at `path`: the one given, else the draft's own, else this project's if it is the same.

    Raises:
        ValueError: If none of them is there.
    """
    text = given
    if text is None and source is not None and (source / LICENSE_FILE).is_file():
        text = source / LICENSE_FILE
    if text is None and license == PROJECT_LICENSE:
        text = project_license()
    if text is None or not text.is_file():
        raise ValueError(f"No text of the licence {license!r} was found; name the file with --license-file.")
    shutil.copyfile(text, path)


def project_license() -> Path | None:
    """The licence file of this package: in the checkout, or in the installed distribution."""
    checkout = Path(__file__).resolve().parents[2] / LICENSE_FILE
    if checkout.is_file():
        return checkout
    try:
        listed = importlib.metadata.files("dflash-hf") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in listed if file.name == LICENSE_FILE), None)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
