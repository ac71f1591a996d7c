"""`dflash-hf convert`: a draft in one published format written in another."""

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import CONFIG_NAME, MASK_EMBEDDING_NAME, WEIGHTS_NAME, find_folder, read_config
from .formats import NATIVE, OWN, SPECULATORS, ZLAB

if TYPE_CHECKING:
    import torch

    from ..configuration_dflash import DFlashConfig

FORMATS = (OWN, ZLAB, SPECULATORS, NATIVE)


def convert(source: str | Path, destination: str | Path, to: str, target: str | None = None, **hub_kwargs: Any) -> str:
    """Read a draft in any format, write it in the format `to`, and return the one it was in. Tensors keep their bits.

    Args:
        source: Repository of the Hub, or folder.
        destination: Folder to make; it must not exist, or be empty.
        to: `dflash` (this package's own, a complete Hub repository), `zlab`, `speculators` or `native`.
        target: Name or path of the target: the speculators format records it, z-lab's its number of layers, and it has
            the vocabulary and the embedding's scale that some formats do not state.
        hub_kwargs: `revision`, `token`, ... of `snapshot_download`.

    Raises:
        OSError: If a file is missing, or the destination is in use.
        ValueError: If the source cannot be read, or `to` cannot express what the draft does.
    """
    from .exporting import export_draft
    from .fields import states_vocabulary
    from .importing import read_draft
    from .targets import text_config

    destination = Path(destination).resolve()  # `.` and links name a folder, too
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise OSError(f"{destination} is in use; name a folder that does not exist yet, or an empty one.")
    folder = find_folder(source, **hub_kwargs)
    vocabulary_known = states_vocabulary(read_config(folder))
    vocab_size = None if vocabulary_known or target is None else text_config(target).vocab_size
    found, config, tensors = read_draft(folder, vocab_size)
    if to != OWN:
        fields, tensors = export_draft(config, tensors, to, target)
    if not vocabulary_known and vocab_size is None:
        if to != NATIVE:
            raise ValueError(
                f"`vocab_size` is not in the draft's config, and the format {to!r} states it; name the target "
                "(--target), whose vocabulary it is."
            )
        del fields["vocab_size"]  # what was read in its place is a guess
    with _folder_to_fill(destination) as aside:
        if to == OWN:
            _write_own(config, tensors, aside)
        else:
            _write_export(fields, tensors, aside)
    return found


@contextmanager
def _folder_to_fill(destination: Path) -> Iterator[Path]:
    """A folder aside whose content becomes the destination's once the block is through; nothing is left otherwise.

    An empty folder that is there is filled, not replaced: a shell may stand in it.
    """
    is_there = destination.is_dir()
    beside = destination if is_there else destination.parent
    beside.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=beside))
    try:
        content = aside / "content"  # with the permissions that the user gives new folders; `mkdtemp`'s are private
        content.mkdir()
        yield content
        if is_there:
            for path in content.iterdir():
                os.replace(path, destination / path.name)
        else:
            os.replace(content, destination)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_own(config: "DFlashConfig", tensors: "dict[str, torch.Tensor]", folder: Path) -> None:
    import torch

    from ..modeling_dflash import Qwen3DFlashForDraft

    with torch.device("meta"):
        draft = Qwen3DFlashForDraft(config)
    draft.load_state_dict(tensors, assign=True)  # not `from_pretrained`, which would give all tensors one dtype
    draft.save_pretrained(folder)


def _write_export(fields: dict[str, Any], tensors: "dict[str, torch.Tensor]", folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import __version__

    mask_embedding = tensors.pop("mask_embedding", None)
    if mask_embedding is not None:
        mask_token_id = fields["dflash_config"]["mask_token_id"]
        torch.save({"mask_token_id": mask_token_id, "embedding": mask_embedding}, folder / MASK_EMBEDDING_NAME)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    content = json.dumps(fields | {"transformers_version": __version__}, indent=2, sort_keys=True)
    (folder / CONFIG_NAME).write_text(content + "\n", encoding="utf-8")


def add_parser(subparsers: Any) -> None:
    """Declare `dflash-hf convert`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "convert",
        help="write a draft in another published format",
        description="Read a draft in any published format, told from its config and tensors, and write it in another. "
        "vLLM and SGLang read zlab, vLLM reads speculators, Transformers' own DFlash path reads native.",
    )
    parser.add_argument("source", metavar="SRC", help="folder of the draft, or its repository on the Hub")
    parser.add_argument("destination", metavar="DST", help="folder to make")
    parser.add_argument("--to", required=True, choices=FORMATS, help="format to write")
    parser.add_argument("--target", help="the draft's target; some formats need facts of it, and say which")
    parser.add_argument("--revision", help="branch, tag or commit of SRC on the Hub")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert, and say what was read and written."""
    hub_kwargs = {} if args.revision is None else {"revision": args.revision}
    found = convert(args.source, args.destination, args.to, args.target, **hub_kwargs)
    print(f"{args.source} ({found}) -> {args.destination} ({args.to})")
    return 0
