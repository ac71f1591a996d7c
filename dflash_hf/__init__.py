"""DFlash speculative decoding for Hugging Face `generate`: the same tokens, sooner (arXiv 2602.06036).

    import dflash_hf
    from transformers import AutoModel

    draft = AutoModel.from_pretrained("path/of/a/draft")
    target.generate(**inputs, assistant_model=draft)

Importing the package makes drafts known to `AutoConfig` and `AutoModel`; the first
draft that is made hooks `generate`.
"""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoints.loading import load_draft
    from .configuration_dflash import DFlashConfig
    from .generation import DFlashCandidateGenerator
    from .modeling_dflash import Qwen3DFlashForDraft

__version__ = "0.1.0"

_MODULES = {
    "DFlashCandidateGenerator": ".generation",
    "DFlashConfig": ".configuration_dflash",
    "Qwen3DFlashForDraft": ".modeling_dflash",
    "load_draft": ".checkpoints.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name], __name__), name)
    return value


def register() -> None:
    """Make `model_type: dflash` known to `AutoConfig` and `AutoModel`. The import of the package does it."""
    importlib.import_module(".registration", __name__).register()


# The command line answers `--help` before torch is loaded; it registers when it runs a command.
if Path(next(iter(sys.argv), "")).stem != "dflash-hf":
    register()

__all__ = ["DFlashCandidateGenerator", "DFlashConfig", "Qwen3DFlashForDraft", "load_draft", "register"]
