"""`load_draft`: a draft of any published format as a `Qwen3DFlashForDraft`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import find_folder
from .formats import OWN
from .importing import read_draft

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..modeling_dflash import Qwen3DFlashForDraft

HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "endpoint")
READ_HERE = ("config", "state_dict")  # from the draft's folder
# A draft speaks its target's tokens. A text-generation pipeline compares these fields of both configs.
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_draft(
    name_or_path: str | Path, target: "PreTrainedModel | None" = None, **from_pretrained_kwargs: Any
) -> "Qwen3DFlashForDraft":
    """Load a DFlash draft from the Hub or a folder, in whichever format it was published.

    The format is told from the draft's config and tensors. z-lab's (DFlash and DFlash 2), ModelOpt's, SpecForge's,
    speculators', DeepSpec's, Transformers' own and this package's are read.

    Args:
        name_or_path: Repository of the Hub, or folder with config.json and safetensors files.
        target: Model the draft is for. The pair is checked, and the draft takes the target's dtype and device unless
            the arguments say otherwise, and its special tokens.
        from_pretrained_kwargs: Arguments of `PreTrainedModel.from_pretrained`: `dtype` (default: as in the file),
            `device_map`, `attn_implementation`, `revision`, `token`, `subfolder`, ...

    Raises:
        OSError: If the folder, the repository or a file of it is missing.
        ValueError: If a file is damaged, the draft is of no known format, has a field that matters and is not
            understood, lacks a tensor or holds one without a place, or does not fit the target.
    """
    from transformers import GenerationConfig

    from ..modeling_dflash import Qwen3DFlashForDraft

    kwargs = dict(from_pretrained_kwargs)
    if given := [name for name in READ_HERE if name in kwargs]:
        raise ValueError(
            f"`load_draft` reads `{given[0]}` from the draft's folder, but one was given; leave it out, or use "
            "`Qwen3DFlashForDraft.from_pretrained`."
        )
    folder = find_folder(name_or_path, **{name: kwargs.pop(name) for name in HUB_ARGUMENTS if name in kwargs})
    folder /= kwargs.pop("subfolder", None) or ""
    vocab_size = None if target is None else target.config.get_text_config().vocab_size
    found, config, tensors = read_draft(folder, vocab_size)
    if target is not None and not {"dtype", "torch_dtype", "device_map"} & kwargs.keys():
        kwargs["dtype"] = target.dtype
    kwargs.setdefault("dtype", kwargs.pop("torch_dtype", "auto"))
    config.name_or_path = str(name_or_path)
    draft = Qwen3DFlashForDraft.from_pretrained(None, config=config, state_dict=tensors, **kwargs)
    # Only a draft saved by this package has a generation config of its own beside the weights.
    if found == OWN and (folder / "generation_config.json").is_file():
        draft.generation_config = GenerationConfig.from_pretrained(folder)
    if target is not None:
        if "device_map" not in kwargs and target.device.type != "meta":  # meta: the target's weights are offloaded
            draft = draft.to(target.device)
        from ..generation.pairing import check_pair

        check_pair(target, draft)
        for name in SPECIAL_TOKENS:
            setattr(draft.config, name, getattr(target.config.get_text_config(), name, None))
    return draft
