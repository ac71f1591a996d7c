"""Published checkpoint formats: reading all of them, writing the ones that serving engines read."""

from typing import Any

__all__ = ["convert", "load_draft", "read_draft"]


def __getattr__(name: str) -> Any:
    # On first use: the command line imports this package for its parser, and must not wait for torch.
    if name == "load_draft":
        from .loading import load_draft

        return load_draft
    if name == "read_draft":
        from .importing import read_draft

        return read_draft
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
