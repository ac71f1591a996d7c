"""Drafting and verification, and the hook that lets `target.generate(assistant_model=draft)` reach them.

Three methods of [`~transformers.GenerationMixin`] are wrapped, once per process. Each wrapper asks the assistant: one
that speaks our protocol (it subclasses `DraftProtocol`) is called, any other goes to the original untouched. So the
logic lives with the draft, and drafts of different code revisions work side by side in one process.

One round, in the order of the files: `drafting` (propose), `target_runner` (verify, roll back), `verification`
(accept), `sequences` and `stopping` (commit), all driven by `decoding`.
"""

from functools import wraps
from typing import Any

from transformers.generation.utils import GenerationMixin

from .attention import install_attention, remove_attention
from .candidate_generator import DFlashCandidateGenerator
from .compat import CACHE_KEY
from .draft_cache import DraftCache
from .masks import to_attention_mask, visible_keys
from .protocol import DraftProtocol
from .repository import DraftRepository

_MARKER = "_dflash_originals"


def _draft_of(assistant: Any, generation_config: Any) -> Any:
    """The assistant if it speaks our protocol and Transformers' own DFlash path was not asked for, else `None`."""
    if getattr(assistant, "dflash_protocol", None) is None:
        return None
    return None if getattr(generation_config, "speculation_type", None) == "dflash" else assistant


def _wrap_validation(original: Any) -> Any:
    @wraps(original)
    def _validate_generation_mode(self: Any, generation_mode: Any, generation_config: Any, mode_kwargs: Any) -> None:
        draft = _draft_of(mode_kwargs.get("assistant_model"), generation_config)
        if draft is None:
            return original(self, generation_mode, generation_config, mode_kwargs)
        return draft.validate_generation(self, generation_config, mode_kwargs)

    return _validate_generation_mode


def _wrap_candidate_generator(original: Any) -> Any:
    @wraps(original)
    def _get_candidate_generator(self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        draft = _draft_of(kwargs.get("assistant_model"), generation_config)
        if draft is None:
            return original(self, generation_config, *args, **kwargs)
        return draft.get_candidate_generator(self, generation_config, kwargs.get("logits_processor"))

    return _get_candidate_generator


def _wrap_decoding(original: Any) -> Any:
    @wraps(original)
    def _assisted_decoding(self: Any, *args: Any, **kwargs: Any) -> Any:
        draft = _draft_of(kwargs.get("assistant_model"), kwargs.get("generation_config"))
        if draft is None:
            return original(self, *args, **kwargs)
        return draft.decode(self, *args, **{key: value for key, value in kwargs.items() if key != "assistant_model"})

    return _assisted_decoding


_WRAPPERS = {
    "_validate_generation_mode": _wrap_validation,
    "_get_candidate_generator": _wrap_candidate_generator,
    "_assisted_decoding": _wrap_decoding,
}


def install_hook() -> None:
    """Wrap the three methods, unless this or another copy of this module has done so in this process.

    And install the attention of verifications, see `attention`.
    """
    install_attention()
    if hasattr(GenerationMixin, _MARKER):
        return
    originals = {name: getattr(GenerationMixin, name) for name in _WRAPPERS}
    for name, wrap in _WRAPPERS.items():
        setattr(GenerationMixin, name, wrap(originals[name]))
    setattr(GenerationMixin, _MARKER, originals)


def remove_hook() -> None:
    """Put the original methods and attention back; drafts stay loaded but `generate` no longer knows them."""
    for name, original in getattr(GenerationMixin, _MARKER, {}).items():
        setattr(GenerationMixin, name, original)
    if hasattr(GenerationMixin, _MARKER):
        delattr(GenerationMixin, _MARKER)
    remove_attention()


__all__ = [
    "CACHE_KEY",
    "DFlashCandidateGenerator",
    "DraftCache",
    "DraftProtocol",
    "DraftRepository",
    "install_hook",
    "remove_hook",
    "to_attention_mask",
    "visible_keys",
]
