"""What a run trains on: target, draft and data. How it trains is `DFlashTrainingArguments`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RunArguments:
    """Target, draft and data of `dflash-hf train`.

    Raises:
        ValueError: For a value out of its range.
    """

    train_data: str = field(metadata={"help": "folder of `dflash-hf data`, a Parquet/JSONL file, or a datasets name"})
    eval_data: str | None = field(
        default=None, metadata={"help": "held-out sequences; default: the last of train_data"}
    )
    eval_sequences: int = field(default=32, metadata={"help": "how many held-out sequences are walked"})
    max_length: int = field(default=3072, metadata={"help": "tokens of a sequence; longer ones are cut"})
    target: str | None = field(default=None, metadata={"help": "name or folder; default: the embedded SmolLM2"})
    target_revision: str | None = field(default=None, metadata={"help": "revision of a target on the Hub"})
    target_dtype: str = field(default="bfloat16", metadata={"help": "dtype the target runs in"})
    shard_target: bool = field(
        default=False, metadata={"help": "spread the target's layers over the processes (FSDP2)"}
    )
    draft: str | None = field(default=None, metadata={"help": "draft to continue from, in any published format"})
    draft_init: str = field(
        default="target_layers", metadata={"help": "start of a new draft: target_layers or random"}
    )
    draft_layers: int = field(default=5, metadata={"help": "layers of a new draft"})
    block_size: int | None = field(default=None, metadata={"help": "K; default: the draft's own, or 16 for a new one"})
    target_layer_ids: list[int] | None = field(
        default=None, metadata={"help": "taps; default: five by the paper's rule"}
    )
    mask_token_id: int | None = field(default=None, metadata={"help": "default: a reserved row of the target's table"})
    sliding_window: int | None = field(default=None, metadata={"help": "window of every layer of a new draft"})
    attn_implementation: str | None = field(
        default=None, metadata={"help": "default: flex_attention on a GPU, else blockwise; sdpa works, too"}
    )
    state_cache: str | None = field(
        default=None, metadata={"help": "folder for the target's states, made once and reused"}
    )
    restrict_vocabulary: bool = field(
        default=False, metadata={"help": "train over the tokens that occur in the data only"}
    )

    def __post_init__(self) -> None:
        if self.draft_init not in ("target_layers", "random"):
            raise ValueError(f"`draft_init` must be target_layers or random, got {self.draft_init!r}.")
        for name in ("eval_sequences", "draft_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if self.max_length < 2:
            raise ValueError(f"`max_length` must be at least 2, got {self.max_length}.")
        if self.shard_target and self.state_cache is not None:
            raise ValueError(
                f"`shard_target` is true and `state_cache` is {self.state_cache!r}; a sharded target runs in all "
                "processes at once, while each fills its own part of a cache: leave one of them out."
            )
