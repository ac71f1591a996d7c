"""Making `model_type: dflash` known to `AutoConfig` and `AutoModel`, without loading the model's code yet."""

from typing import Any

from transformers import AutoConfig, AutoModel

from .configuration_dflash import DFlashConfig


class DraftOnFirstUse:
    """Stands for `Qwen3DFlashForDraft` in `AutoModel`'s table until a draft is made.

    The model's module loads Transformers' generation and Qwen3 code, over a second of imports; the table needs a name.
    """

    config_class = DFlashConfig

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """`Qwen3DFlashForDraft.from_pretrained`."""
        return cls._model_class().from_pretrained(*args, **kwargs)

    @classmethod
    def _from_config(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._model_class()._from_config(*args, **kwargs)

    @staticmethod
    def _model_class() -> Any:
        from .modeling_dflash import Qwen3DFlashForDraft

        AutoModel.register(DFlashConfig, Qwen3DFlashForDraft, exist_ok=True)
        return Qwen3DFlashForDraft


def register() -> None:
    """Make drafts known to `AutoConfig` and `AutoModel`. The import of the package does it."""
    AutoConfig.register(DFlashConfig.model_type, DFlashConfig, exist_ok=True)
    AutoModel.register(DFlashConfig, DraftOnFirstUse, exist_ok=True)


__all__ = ["register"]
