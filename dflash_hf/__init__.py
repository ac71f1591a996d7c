"""DFlash speculative decoding for Hugging Face `generate`."""

__version__ = "0.1.0"
