"""A tiny pair on disk, with a tokenizer and a chat template, for the commands that load what they are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers import VOCABULARY, tiny_draft, tiny_target

TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] + '] ' + message['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is defined %} w9{% endif %}{% endif %}"
)
WORDS = ["[pad]", "[bos]", "[user]", "[assistant]", "[unk]", *(f"w{i}" for i in range(5, VOCABULARY))]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A word for each of the 64 ids, `w5` to `w63` behind five special ones."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[unk]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[unk]", pad_token="[pad]", bos_token="[bos]")
    fast.chat_template = TEMPLATE
    return fast


def save_tiny_pair(folder: Path, *, draft: Any = None, dtype: torch.dtype = torch.float32) -> tuple[str, str]:
    """A target with its tokenizer, and a draft, saved as a user would have them: two folders."""
    target = tiny_target("qwen3", dtype=dtype)
    target.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    (draft or tiny_draft(target)).save_pretrained(folder / "draft")
    return str(folder / "target"), str(folder / "draft")
