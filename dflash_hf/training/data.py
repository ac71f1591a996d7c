"""``dflash-hf data``: prompts in, a dataset of the target's own answers out (DFlash, training data).

A draft learns to predict one target, so the text it trains on is that target's. Token ids, the prompt's length and the
exact arguments of the chat template are stored, so training never tokenises again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import shards
from .prompts import Failure, Prompt, fingerprint, load_rows, tokenize_row
from .responses import LocalResponder, Responder, Response, Sampling

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

FORMAT = 1
THINKING = {"on": {"enable_thinking": True}, "off": {"enable_thinking": False}, "unset": {}}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``data`` to the command line's sub-commands."""
    parser = subparsers.add_parser("data", help="make training data: the target's own answers to prompts")
    _add_arguments(parser)
    parser.set_defaults(run=run)
    return parser


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", help="JSONL/Parquet file or `datasets` name with a column 'prompt' or 'messages'")
    parser.add_argument("--output", type=Path, required=True, help="folder for shards and manifest; run again to resume")
    parser.add_argument("--split", default="train", help="split of a named dataset (default: train)")
    parser.add_argument("--config", help="configuration of a named dataset")
    parser.add_argument("--limit", type=int, help="take only the first rows")
    parser.add_argument("--target", help="target model, folder or Hub name (default: the embedded SmolLM2-135M-Instruct)")
    parser.add_argument("--revision", help="revision of a target on the Hub")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the local target (default: bfloat16)")
    parser.add_argument("--device", default="cpu", help="device of the local target, or 'auto' (default: cpu)")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--max-prompt-tokens", type=int, default=1024, help="longer prompts are set aside")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0, help="0 cuts nothing off (default)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--thinking", choices=sorted(THINKING), default="off", help="the template's enable_thinking")
    parser.add_argument("--chat-template-kwargs", type=json.loads, default={}, help="more template arguments, as JSON")
    parser.add_argument("--loop-ngram", type=int, default=8, help="cut an answer where this n-gram ...")
    parser.add_argument("--loop-repeats", type=int, default=4, help="... has occurred so often; 0 never cuts")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--shard-size", type=int, default=512, help="rows of a shard: what a kill loses at most")
    parser.add_argument("--server", help="base URL of an OpenAI-compatible server, e.g. http://localhost:8000/v1")
    parser.add_argument("--server-model", help="the model's name there (default: the only one it serves)")
    parser.add_argument("--concurrency", type=int, default=32, help="requests to the server at a time")


def run(args: argparse.Namespace) -> int:
    """Answer every row of the input that has no shard yet.

    Raises:
        ValueError: bad arguments or input, or an output folder begun with other settings.
    """
    rows = load_rows(args.input, args.split, args.config)
    rows = rows.select(range(min(args.limit, len(rows)))) if args.limit else rows
    args.output.mkdir(parents=True, exist_ok=True)
    from filelock import FileLock, Timeout

    try:
        with FileLock(args.output / shards.LOCK_NAME, timeout=0):
            return _run_locked(args, rows)
    except Timeout:
        raise ValueError(f"another run is writing to {args.output}: wait for it, or name another --output") from None


def _run_locked(args: argparse.Namespace, rows: Dataset) -> int:
    tokenizer, target_facts, make_responder = _open_target(args)
    template_kwargs = THINKING[args.thinking] | args.chat_template_kwargs
    sampling = Sampling(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        loop_ngram=args.loop_ngram,
        loop_repeats=args.loop_repeats,
    )
    manifest = {
        "format": FORMAT,
        "target": target_facts | {"chat_template_sha256": _template_hash(tokenizer)},
        "input": {"source": args.input, "rows": len(rows), "sha256": fingerprint(rows), "shard_size": args.shard_size},
        "generation": vars(sampling)
        | {
            "max_prompt_tokens": args.max_prompt_tokens,
            "thinking": args.thinking,
            "chat_template_kwargs": template_kwargs,
        },
    }
    if (stored := shards.read_manifest(args.output)) is not None:
        shards.check_same_run(args.output, stored, manifest)
    number = -(-len(rows) // args.shard_size)
    missing = [index for index in range(number) if not shards.shard_path(args.output, index).is_file()]
    manifest |= {"counts": shards.total_counts(args.output, number), "complete": not missing}
    shards.write_manifest(args.output, manifest)
    if missing:
        with Progress(args, len(rows), manifest["counts"]) as progress:
            responder = make_responder(tokenizer, sampling, progress.answered)
            for index, answers in _answered_shards(args, rows, tokenizer, template_kwargs, responder, missing):
                shards.write_shard(args.output, index, answers)
                manifest |= {"counts": shards.total_counts(args.output, number)}
                shards.write_manifest(args.output, manifest)
        shards.write_manifest(args.output, manifest | {"complete": True})
    print(f"{args.output}: {json.dumps(manifest['counts'])}", file=sys.stderr)
    return 0


def _answered_shards(
    args: argparse.Namespace,
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: dict[str, Any],
    responder: Responder,
    missing: list[int],
) -> Iterator[tuple[int, list[Response | Failure]]]:
    """Yield the missing shards in order; one shard ahead is begun, so that a server never waits for the slowest row."""
    begun: deque[tuple[int, list[Prompt | Failure], Any]] = deque()
    for index in [*missing, None]:
        if index is not None:
            first = index * args.shard_size
            chunk = range(first, min(first + args.shard_size, len(rows)))
            read = [tokenize_row(n, rows[n], tokenizer, template_kwargs, args.max_prompt_tokens) for n in chunk]
            prompts = [prompt for prompt in read if isinstance(prompt, Prompt)]
            begun.append((index, read, responder.start(prompts, args.seed + index)))
        if len(begun) > 1 or index is None:
            while begun and (len(begun) > 1 or index is None):
                done, read, wait = begun.popleft()
                failures = [row for row in read if isinstance(row, Failure)]
                yield done, failures + wait()


class Progress:
    """A bar over rows, with tokens per second and the time that is left."""

    def __init__(self, args: argparse.Namespace, rows: int, counts: dict[str, int]) -> None:
        from tqdm.auto import tqdm

        done = counts.get("sequences", 0) + counts.get("failures", 0)
        self.bar = tqdm(total=rows, initial=done, unit="row", desc="answers", dynamic_ncols=True)
        self.tokens = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def answered(self, rows: int, tokens: int) -> None:
        self.tokens += tokens
        elapsed = max(self.bar.format_dict["elapsed"], 1e-9)
        self.bar.set_postfix_str(f"{self.tokens / elapsed:.0f} tokens/s", refresh=False)
        self.bar.update(rows)


def _template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.chat_template
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()


def _open_target(args: argparse.Namespace) -> tuple[PreTrainedTokenizerBase, dict[str, Any], Any]:
    """The tokenizer, what the manifest says of the target, and how to make the responder (the model loads only then)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..embedded import GGUF_SHA256, TARGET_NAME, embedded_target_path

    name = args.target or embedded_target_path()
    tokenizer = AutoTokenizer.from_pretrained(name, revision=args.revision)
    if not tokenizer.chat_template:
        raise ValueError(f"the target {name} has no chat template: name an instruction-tuned target with --target")
    facts = {"name": args.target or TARGET_NAME, "revision": args.revision if args.target else GGUF_SHA256}

    def make_local(tokenizer: Any, sampling: Sampling, progress: Any) -> LocalResponder:
        model = AutoModelForCausalLM.from_pretrained(name, revision=args.revision, dtype=args.dtype)
        model = model.to(args.device).eval()
        return LocalResponder(model, tokenizer, sampling, args.batch_size, progress=progress)

    return tokenizer, facts | {"dtype": args.dtype}, make_local


def main() -> int:
    parser = argparse.ArgumentParser(prog="dflash-hf data", description=__doc__)
    _add_arguments(parser)
    args = parser.parse_args()
    try:
        return run(args)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    sys.exit(main())
