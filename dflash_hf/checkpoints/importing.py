"""Published drafts into this package's terms: config fields by `fields`, tensors renamed, split and checked."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..configuration_dflash import DFlashConfig
from .fields import check_mask_token, import_fields, nested_fields, refuse_unknown
from .files import MASK_EMBEDDING_NAME, read_config, read_mask_embedding, read_tensors
from .formats import OWN, detect_format, model_name

if TYPE_CHECKING:
    import torch

Fields = dict[str, Any]
Tensors = dict[str, "torch.Tensor"]


def read_draft(folder: Path, vocab_size: int | None = None) -> tuple[str, DFlashConfig, Tensors]:
    """Read a draft of any format: the format, its config, and its tensors under the model's names.

    Args:
        folder: Holds config.json and safetensors files.
        vocab_size: The target's, for formats that do not state it.

    Raises:
        OSError: If a file is missing.
        ValueError: If a file is damaged, the format is unknown, a field that matters is not understood, or a tensor
            has no place in the model, or the model's has none in the file.
    """
    raw_config, raw_tensors = read_config(folder), read_tensors(folder)
    mask_token_id, mask_embedding = read_mask_embedding(folder)
    draft_format = detect_format(raw_config, raw_tensors)
    if mask_embedding is not None:
        raw_tensors[MASK_EMBEDDING_NAME] = mask_embedding
    tensors = rename_tensors(raw_tensors)
    if draft_format == OWN:
        refuse_unknown(raw_config, nested_fields(raw_config))
        config = DFlashConfig.from_dict(raw_config)
        check_mask_token(config.mask_token_id, mask_token_id)
    else:
        fields = import_fields(draft_format, raw_config, tensors, mask_token_id)
        if "vocab_size" not in fields:
            fields["vocab_size"] = vocab_size or fields["mask_token_id"] + 1
        split_fused_projections(tensors, fields)
        import_vocabulary_map(tensors, fields)
        config = DFlashConfig.from_dict(fields)
    check_tensors(config, tensors)
    return draft_format, config, tensors


def rename_tensors(raw: Mapping[str, "torch.Tensor"]) -> Tensors:
    """The draft's tensors under the model's names, without the target's copies.

    Raises:
        ValueError: If two tensors of the file have the same place in the model.
    """
    tensors: Tensors = {}
    origins: dict[str, str] = {}
    for name, tensor in raw.items():
        ours = model_name(name)
        if ours is None:
            continue
        if ours in tensors:
            raise ValueError(f"{origins[ours]!r} and {name!r} in the draft's weights have the same place, {ours!r}.")
        tensors[ours], origins[ours] = tensor, name
    return tensors


def split_fused_projections(tensors: Tensors, fields: Fields) -> None:
    """Split every `qkv_proj` into `q_proj`, `k_proj` and `v_proj`, in place."""
    head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    queries, keys = fields["num_attention_heads"] * head_dim, fields["num_key_value_heads"] * head_dim
    for name in [name for name in tensors if ".self_attn.qkv_proj." in name]:
        fused = tensors.pop(name)
        if fused.shape[0] != queries + 2 * keys:
            raise ValueError(
                f"{name!r} has {fused.shape[0]} rows, but the config's heads need {queries} + 2 * {keys}; the file "
                "and its config do not belong together."
            )
        for part, rows in zip("qkv", fused.split([queries, keys, keys]), strict=True):
            tensors[name.replace("qkv_proj", f"{part}_proj")] = rows.contiguous()


def import_vocabulary_map(tensors: Tensors, fields: Fields) -> None:
    """`d2t` holds offsets, target id minus draft id; the model keeps the target ids themselves.

    Raises:
        ValueError: If an id has no place in the target's vocabulary, or `t2d` marks other tokens than `d2t` names.
    """
    import torch

    offsets, marks = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if offsets is None:
        if marks is not None:
            raise ValueError("The draft's weights hold 't2d' without 'd2t', which says what its own head's rows mean.")
        if fields.get("draft_vocab_size") is not None and fields["own_head"]:
            raise ValueError(
                f"`draft_vocab_size` is {fields['draft_vocab_size']} but `vocab_size` {fields['vocab_size']}, and the "
                "draft's weights lack 'd2t', which says what its own head's rows mean; the file is incomplete."
            )
        return
    if offsets.dim() != 1 or not len(offsets) or offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise ValueError(
            f"'d2t' is of shape {tuple(offsets.shape)} and dtype {offsets.dtype}, where a whole number for each token "
            "of the draft is expected; the file is damaged."
        )
    token_ids = torch.arange(len(offsets)) + offsets.long()
    vocab_size = fields["vocab_size"]
    if len(offsets) == vocab_size and not offsets.any():
        return
    if token_ids.min() < 0 or token_ids.max() >= vocab_size or len(token_ids.unique()) != len(token_ids):
        raise ValueError(
            f"'d2t' maps the draft's {len(offsets)} tokens to ids from {int(token_ids.min())} to "
            f"{int(token_ids.max())}, which are not distinct tokens of a vocabulary of {vocab_size}; the file is "
            "damaged."
        )
    if marks is not None and (len(marks) != vocab_size or not torch.equal(marks.nonzero()[:, 0], token_ids.sort()[0])):
        raise ValueError("'t2d' marks other target tokens than 'd2t' names; the file is damaged.")
    tensors["draft_token_ids"] = token_ids


def check_tensors(config: DFlashConfig, tensors: Mapping[str, "torch.Tensor"]) -> None:
    """Every tensor has a place in the model that `config` describes, of its shape, and every place a tensor.

    Raises:
        ValueError: Naming the first that does not fit.
    """
    import torch

    from ..modeling_dflash import Qwen3DFlashForDraft

    try:
        with torch.device("meta"):
            places = Qwen3DFlashForDraft(config).state_dict()
    except Exception as error:  # whatever Transformers' modules make of a value that its config class lets through
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"The draft's config describes no model that can be built ({reason}); correct it.") from error
    for name, tensor in tensors.items():
        if name not in places:
            raise ValueError(
                f"The draft's weights hold {name!r}, which has no place in the model that its config describes; the "
                "draft is of a kind that is not supported here, or its config.json lacks a field."
            )
        if tensor.shape != places[name].shape:
            raise ValueError(
                f"{name!r} is of shape {tuple(tensor.shape)} in the draft's weights, but its config asks for "
                f"{tuple(places[name].shape)}; the two do not belong together."
            )
    missing = [name for name in places if name not in tensors]
    if missing:
        raise ValueError(
            f"The draft's weights lack {missing[0]!r} ({len(missing)} missing in all), which its config asks for; the "
            "file is incomplete."
        )
