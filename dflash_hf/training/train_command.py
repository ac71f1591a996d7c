"""`dflash-hf train`: train a draft for a causal target, from a YAML file, from flags, or from both."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arguments import RunArguments
    from .trainer import DFlashTrainer, DFlashTrainingArguments


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``train`` to the command line's sub-commands. Its own arguments are parsed by `HfArgumentParser`."""
    # No prefix a shell can type, so that flags are arguments like any other here and reach the other parser untouched.
    parser = subparsers.add_parser(
        "train", help="train a draft for a causal target", add_help=False, prefix_chars="\0"
    )
    parser.add_argument("arguments", nargs="*", metavar="[CONFIG.yaml] [--flag value ...]")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Parse, build, resume where the output folder has a checkpoint, train, and save the draft.

    Raises:
        ValueError: A mistake in the arguments or the data, or a package that lacks, in one sentence.
    """
    try:
        run_args, training_args = parse(args.arguments)
        trainer = build_trainer(run_args, training_args)
    except ImportError as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"this command needs the packages of an extra, `pip install 'dflash-hf[train]'` ({first_line})"
        ) from error
    from transformers.trainer_utils import get_last_checkpoint

    checkpoint = training_args.resume_from_checkpoint
    if checkpoint is None and Path(training_args.output_dir).is_dir():
        checkpoint = get_last_checkpoint(training_args.output_dir)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.accelerator.end_training()  # a process group left open may abort a finished run at exit
    return 0


def parse(arguments: list[str]) -> tuple[RunArguments, DFlashTrainingArguments]:
    """Arguments of a run: a YAML file's first, flags on top of it.

    Raises:
        ValueError: If a field is unknown or missing.
    """
    from transformers import HfArgumentParser

    from .arguments import RunArguments
    from .trainer import DFlashTrainingArguments

    parser = HfArgumentParser((RunArguments, DFlashTrainingArguments), prog="dflash-hf train")
    if arguments and arguments[0].endswith((".yaml", ".yml")):
        arguments = [*flags_of_yaml(Path(arguments[0])), *arguments[1:]]
    run_args, training_args, unknown = parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
    if unknown:
        raise ValueError(f"{unknown[0]} is no argument of this command: see `dflash-hf train --help`")
    return run_args, training_args


def flags_of_yaml(path: Path) -> list[str]:
    """The fields of a YAML file as flags, so that flags given after them win.

    Raises:
        ValueError: If it is no mapping.
    """
    import json

    import yaml

    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold `field: value` lines, got a {type(content).__name__}")
    flags: list[str] = []
    for name, value in content.items():
        if value is None:
            continue
        flags.append(f"--{name}")
        if isinstance(value, list):
            flags += [str(entry) for entry in value]
        else:
            flags.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return flags


def build_trainer(run_args: RunArguments, training_args: DFlashTrainingArguments) -> DFlashTrainer:
    """Everything a run needs, in the order in which mistakes are cheapest to find: data, tokenizer, target, draft."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from ..embedded import embedded_target_path
    from .attention import BLOCKWISE
    from .sequences import SequenceCollator, load_sequences, usable_sequences
    from .state_cache import StateCache
    from .target import FrozenTarget, RestrictedHead
    from .trainer import DFlashTrainer

    name = run_args.target or str(embedded_target_path())
    revision = run_args.target_revision
    try:
        text = AutoConfig.from_pretrained(name, revision=revision).get_text_config(decoder=True)
    except OSError as error:
        raise ValueError(f"--target is {name}, which cannot be loaded ({error}): name a folder or a model") from error
    rows = load_sequences(run_args.train_data)
    train, skipped = usable_sequences(rows, run_args.max_length, text.vocab_size)
    report_skipped(run_args.train_data, len(train), skipped)
    if run_args.eval_data is None:
        held_out = min(run_args.eval_sequences, max(len(train) // 10, 1))
        evaluation = train.select(range(len(train) - held_out, len(train)))
        train = train.select(range(max(len(train) - held_out, 1)))
    else:
        evaluation, skipped = usable_sequences(
            load_sequences(run_args.eval_data), run_args.max_length, text.vocab_size
        )
        report_skipped(run_args.eval_data, len(evaluation), skipped)
        evaluation = evaluation.select(range(min(run_args.eval_sequences, len(evaluation))))
    tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    model = AutoModelForCausalLM.from_pretrained(name, revision=revision, dtype=run_args.target_dtype)
    model = model.to(training_args.device)
    draft = make_draft(run_args, model, tokenizer)
    draft.set_attn_implementation(
        run_args.attn_implementation or ("flex_attention" if torch.cuda.is_available() else BLOCKWISE)
    )
    target = FrozenTarget(model, draft.config.target_layer_ids)
    if run_args.shard_target:
        target.shard()
    head = None
    if run_args.restrict_vocabulary:
        token_ids = torch.unique(torch.cat([torch.tensor(ids) for ids in train["input_ids"]])).to(training_args.device)
        head = RestrictedHead(target.head, token_ids)
        print(f"training over {len(token_ids)} of {text.vocab_size} tokens", file=sys.stderr)
    collators = [SequenceCollator(), SequenceCollator()]
    if run_args.state_cache is not None:
        share = training_args.local_process_index, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        collators = [
            SequenceCollator(StateCache(run_args.state_cache, target, part, training_args.loss == "kl", share))
            for part in (train, evaluation)
        ]
    return DFlashTrainer(
        draft=draft,
        target=target,
        args=training_args,
        head=head,
        train_dataset=train,
        eval_dataset=evaluation,
        data_collator=collators[0],
        eval_collator=collators[1],
    )


def make_draft(run_args: RunArguments, target: Any, tokenizer: Any) -> Any:
    """The draft to train, in float32: an existing one, or a new one for the target."""
    from ..checkpoints import load_draft
    from ..modeling_dflash import Qwen3DFlashForDraft
    from . import draft_setup

    rows = target.get_input_embeddings().weight.shape[0]
    if run_args.draft is not None:
        draft = load_draft(run_args.draft).float()
        if run_args.block_size is not None:
            draft.config.block_size = run_args.block_size
            draft.generation_config.num_assistant_tokens = draft.config.num_proposals
        return draft
    mask = run_args.mask_token_id
    if mask is None:
        mask = draft_setup.pick_mask_token(tokenizer, rows)
    draft_setup.check_mask_token(mask, tokenizer, rows)
    fields: dict[str, Any] = {}
    if (scale := getattr(target.get_input_embeddings(), "embed_scale", None)) is not None:
        fields["input_embedding_scale"] = float(scale)  # said, since z-lab's loader reads the bare table
    if run_args.sliding_window is not None:
        fields["sliding_window"] = run_args.sliding_window
        fields["layer_types"] = ["sliding_attention"] * run_args.draft_layers
    config = draft_setup.draft_config_for(
        target.config, mask, run_args.block_size or 16, run_args.draft_layers, run_args.target_layer_ids, **fields
    )
    draft = Qwen3DFlashForDraft(config).float()
    if run_args.draft_init == "target_layers":
        draft_setup.start_from_target(draft, target)
    return draft


def report_skipped(source: str, used: int, skipped: dict[str, int]) -> None:
    """Say on standard error how many sequences are used, and why the others are not."""
    reasons = "".join(f", {count} skipped ({reason})" for reason, count in skipped.items())
    print(f"{source}: {used} sequences{reasons}", file=sys.stderr)


def main() -> int:
    """Run as a module, without the rest of the command line."""
    try:
        return run(argparse.Namespace(arguments=sys.argv[1:]))
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
