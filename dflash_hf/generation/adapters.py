"""Adapters that PEFT picks row by row, or token by token, for the length of one `generate` call.

PEFT hands them to its layers by forward hooks that were told the batch of the call: `adapter_names` names one adapter
per row and fails once rows leave; `alora_offsets` counts back from the last token of every forward, which one-by-one
decoding makes the newest, and a verification the last candidate.
"""

from functools import partial
from typing import Any


def why_not_with_adapters(target: Any, batch_size: int) -> str | None:
    """Why a call cannot be drafted because of such adapters; `None` if it can."""
    arguments = {
        name
        for module in target.modules()
        for hook in list(module._forward_pre_hooks.values())
        if isinstance(hook, partial) and getattr(hook.func, "__module__", "").startswith("peft.")
        for name in hook.keywords
    }
    if "alora_offsets" in arguments:
        return "an activated LoRA (`alora_offsets`) counts from the end of every forward, candidates included"
    if "adapter_names" in arguments and batch_size > 1:
        return "`adapter_names` names an adapter for every row of a batch, and finished rows leave a drafted batch"
    return None


__all__ = ["why_not_with_adapters"]
