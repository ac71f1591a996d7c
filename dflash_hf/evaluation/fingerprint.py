"""A short name for what a model is, so that a run is not resumed with other weights at the same path."""

from __future__ import annotations

import hashlib
import json
from typing import Any

SAMPLES = 1024  # values of each tensor: trained weights differ everywhere, and a large model must not take minutes
DIGITS = 16
NOT_THE_MODEL = ("transformers_version", "_name_or_path", "_commit_hash")


def fingerprint(model: Any) -> str:
    """Hexadecimal digits that change with the config, the generation config, or the weights of a model.

    Of each tensor count its name, shape, dtype, and values at even distances.
    """
    digest = hashlib.sha256()
    for config in (model.config, model.generation_config):
        fields = {} if config is None else config.to_dict()
        kept = {name: value for name, value in fields.items() if name not in NOT_THE_MODEL}
        digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(_values(tensor))
    return digest.hexdigest()[:DIGITS]


def _values(tensor: Any) -> bytes:
    import torch

    if tensor.is_meta or tensor.numel() == 0:
        return b""
    values = tensor.detach().flatten()[:: max(1, tensor.numel() // SAMPLES)]
    return bytes(values.cpu().contiguous().view(torch.uint8).numpy().tobytes())


__all__ = ["fingerprint"]
