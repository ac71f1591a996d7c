"""The pair of models that a command runs: the arguments that name it, and loading it, with words for mistakes."""

from __future__ import annotations

import argparse
import json
import os
import reprlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")


@dataclass
class Pair:
    """A target, its tokenizer, and a draft for it (`None`: the target alone)."""

    target: Any
    tokenizer: Any
    draft: Any
    target_name: str
    draft_name: str | None


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """`--target`, `--draft`, `--dtype` and `--device`."""
    models = parser.add_argument_group("models")
    models.add_argument("--target", metavar="NAME", help="folder or Hub name (default: the embedded SmolLM2-135M)")
    models.add_argument("--draft", metavar="NAME", help="folder or Hub name, any published format (default: its own)")
    models.add_argument("--dtype", default="auto", help=f"{', '.join(DTYPES)} (default: auto, as in the file)")
    models.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")


def load_pair(args: argparse.Namespace, with_draft: bool = True) -> Pair:
    """Load what the arguments name, saying on standard error what is being loaded.

    Raises:
        ValueError: If a name, dtype or device is unknown, a file is damaged, or target and draft do not pair.
        OSError: If a folder, a repository or a file is missing.
    """
    device = pick_device(args.device)
    dtype = pick_dtype(args.dtype)
    if args.target is not None and args.draft is None and with_draft:
        raise ValueError(
            f"--target is {args.target} but no --draft is named, and a draft fits one target only; name the draft "
            "that was trained for it, or leave --target out to use the embedded pair."
        )
    source = draft_source(args.draft) if with_draft else None  # before the target is loaded, which takes longer
    target, tokenizer, target_name = load_target(args.target, dtype, device)
    if source is None:
        return Pair(target, tokenizer, None, target_name, None)
    return Pair(target, tokenizer, load_draft_for(target, source), target_name, args.draft or Path(source).name)


def load_target(name: str | None, dtype: Any, device: str, role: str = "target") -> tuple[Any, Any, str]:
    """A target in evaluation mode, its tokenizer and its name; the embedded one where none is named."""
    from ..embedded import TARGET_NAME, embedded_target_path

    source = str(embedded_target_path()) if name is None else existing_folder(role, name)
    shown = name if name is not None else TARGET_NAME
    with announced(f"{role} {shown}"):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = readable(shown, lambda: AutoTokenizer.from_pretrained(source))
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise ValueError(f"The tokenizer of {shown} knows no words; put the model's tokenizer files beside it.")
        target = readable(shown, lambda: AutoModelForCausalLM.from_pretrained(source, dtype=dtype))
        return target.to(device).eval(), tokenizer, shown


def draft_source(name: str | None) -> str:
    """The folder or Hub name of the draft that was named, or of the default one.

    Raises:
        ValueError: If the folder is not there.
    """
    from ..embedded import default_draft_path

    return str(default_draft_path()) if name is None else existing_folder("draft", name)


def existing_folder(role: str, name: str) -> str:
    """A name that is a folder's by its looks, expanded; any other name as it is.

    Raises:
        ValueError: If the folder is not there.
    """
    folder = os.path.expanduser(name)
    if name.startswith((".", "/", "~")) and not Path(folder).is_dir():
        raise ValueError(f"The {role} folder {name} does not exist; name one that does, or a model of the Hub.")
    return folder


def load_draft_for(target: Any, source: str) -> Any:
    """A draft that pairs with the target, in its dtype and on its device."""
    from ..checkpoints.loading import load_draft

    with announced(f"draft {source}"):
        return readable(source, lambda: load_draft(source, target=target)).eval()


def readable(name: str, load: Callable[[], Any]) -> Any:
    """What `load()` returns; damaged files become a `ValueError` that names them."""
    from safetensors import SafetensorError

    try:
        return load()
    except SafetensorError as error:
        raise ValueError(f"The weights of {name} cannot be read ({error}); download them again.") from error
    except OSError as error:
        if name in str(error):
            raise
        raise OSError(f"{name} cannot be loaded: {error}") from error
    except Exception as error:  # a damaged JSON file comes as a dozen types, from wherever its content is first used
        if isinstance(error, ValueError) and not isinstance(error, (json.JSONDecodeError, UnicodeError)):
            raise  # in words already
        raise ValueError(
            f"The files of {name} cannot be loaded ({reason(error)}); mend them, or download them again."
        ) from error


def reason(error: BaseException) -> str:
    """Type and message of another library's error, short enough for a sentence."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


@contextmanager
def announced(what: str) -> Iterator[None]:
    """Say on standard error what is being loaded, then how long it took."""
    start = time.perf_counter()
    print(f"Loading the {what} ...", file=sys.stderr, flush=True)
    yield
    print(f"Loaded in {time.perf_counter() - start:.1f} s.", file=sys.stderr, flush=True)


def pick_dtype(name: str) -> Any:
    """A torch dtype by name, or "auto".

    Raises:
        ValueError: If there is no such dtype.
    """
    if name not in DTYPES:
        raise ValueError(f"--dtype is {name!r}, which is none of {', '.join(DTYPES)}; choose one of them.")
    if name == "auto":
        return name
    import torch

    return getattr(torch, name)


def pick_device(name: str) -> str:
    """A device that is there; "auto" is a GPU where there is one.

    Raises:
        ValueError: If there is no such device.
    """
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).item()  # "meta" gives tensors, but not what is in them
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(
            f"--device {name!r} cannot be used ({reason(error)}); choose cpu, or a device that is there."
        ) from None
    return name


def encode_chat(
    tokenizer: Any, messages: list[dict[str, str]], template_kwargs: dict[str, Any] | None = None
) -> list[int]:
    """Token ids of a conversation up to where the answer begins; its bare text where the tokenizer has no template.

    Raises:
        ValueError: If a message cannot be encoded, or the chat template fails on the conversation.
    """
    for message in messages:
        check_text("The prompt", message["content"])
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"])
    try:
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, **(template_kwargs or {})
        )
    except Exception as error:  # a template is a program of somebody else's, and may fail in any way
        raise ValueError(
            f"The chat template of the target fails ({reason(error)}); mend it in the tokenizer's files."
        ) from error
    return list(encoded["input_ids"])


def check_text(name: str, text: str) -> None:
    """Refuse text that no tokenizer can read: Python marks bytes that are not UTF-8 by halves of surrogate pairs.

    Raises:
        ValueError: By the name of the text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is {reprlib.repr(text)}, whose character {error.start} is no Unicode text; write it in UTF-8."
        ) from None


def check_length(target: Any, prompt_length: int, max_new_tokens: int, asked: str | None = None) -> None:
    """Refuse a generation that has nothing to start from, or that the target has no positions for.

    Args:
        target: The model.
        prompt_length: In tokens.
        max_new_tokens: How many are to follow.
        asked: What asked for so many, in words (default: `--max-new-tokens`).

    Raises:
        ValueError: If there is no prompt, or prompt and new tokens are together longer than the target's context.
    """
    if prompt_length < 1:
        raise ValueError("The prompt has 0 tokens, and the target continues at least 1; write something to ask.")
    if max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens is {max_new_tokens}; it must be at least 1.")
    asked = asked or f"--max-new-tokens is {max_new_tokens}"
    context = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if context is not None and prompt_length + max_new_tokens > context:
        raise ValueError(
            f"The prompt has {prompt_length} tokens and {asked}, together more than the target's context of {context} "
            "(`max_position_embeddings`); shorten one of them."
        )


__all__ = [
    "Pair",
    "add_pair_arguments",
    "check_length",
    "check_text",
    "encode_chat",
    "load_pair",
    "pick_device",
    "pick_dtype",
]
