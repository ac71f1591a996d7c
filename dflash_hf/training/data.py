"""`dflash-hf data`: prompts in, a dataset of the target's own answers out (arXiv 2602.06036, training data).

A draft learns to predict one target, so the text it trains on is that target's. Token ids, the prompt's length and the
exact arguments of the chat template are stored, so training never tokenises again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import shards
from .prompts import Failure, Prompt, fingerprint, load_rows, tokenize_row
from .responses import LocalResponder, Progress, Responder, Response, Sampling, eos_ids_of
from .server import ServerResponder

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

FORMAT = 1
THINKING: dict[str, dict[str, Any]] = {"on": {"enable_thinking": True}, "off": {"enable_thinking": False}, "unset": {}}
# So many prompts that all fail for one reason are not bad prompts.
MIN_TO_BLAME_THE_SETUP = 16


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `data` to the command line's sub-commands."""
    parser = subparsers.add_parser("data", help="make training data: the target's own answers to prompts")
    _add_arguments(parser)
    return parser


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("input", help="JSONL/Parquet file or `datasets` name with a column 'prompt' or 'messages'")
    add("--output", type=Path, required=True, help="folder for shards and manifest; the same command continues it")
    add("--split", default="train", help="split of a named dataset (default: %(default)s)")
    add("--config", help="configuration of a named dataset")
    add("--limit", type=int, help="take only the first rows")
    add("--shard-size", type=int, default=512, help="rows of a shard: what a kill costs (default: %(default)s)")

    target = parser.add_argument_group("target")
    target.add_argument("--target", help="folder or Hub name (default: the embedded SmolLM2-135M-Instruct)")
    target.add_argument("--revision", help="revision of a target on the Hub")
    target.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    target.add_argument("--device", default="auto", help="cpu, cuda, ... (default: a GPU if there is one)")
    target.add_argument(
        "--batch-size", type=int, default=32, help="rows that are answered at a time, without --server"
    )

    answers = parser.add_argument_group("answers")
    answers.add_argument("--max-new-tokens", type=int, default=256, help="default: %(default)s")
    answers.add_argument("--max-prompt-tokens", type=int, default=1024, help="longer prompts are set aside")
    answers.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    answers.add_argument("--top-p", type=float, default=1.0, help="1 cuts nothing off (default)")
    answers.add_argument("--top-k", type=int, default=0, help="0 cuts nothing off (default)")
    answers.add_argument("--seed", type=int, default=0)
    answers.add_argument("--thinking", choices=sorted(THINKING), default="off", help="the template's enable_thinking")
    answers.add_argument("--chat-template-kwargs", default="{}", metavar="JSON", help="more template arguments")
    answers.add_argument("--loop-ngram", type=int, default=8, help="an answer is cut where so many tokens ...")
    answers.add_argument("--loop-repeats", type=int, default=4, help="... have come so often; 0 never cuts")

    server = parser.add_argument_group("server")
    server.add_argument("--server", metavar="URL", help="an OpenAI-compatible server's, e.g. http://localhost:8000/v1")
    server.add_argument("--server-model", metavar="NAME", help="the target's name there (default: the only one)")
    server.add_argument("--server-extra", default="{}", metavar="JSON", help="more fields of each request")
    server.add_argument("--concurrency", type=int, default=32, help="requests at a time (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Answer every row of the input that has no shard yet.

    Raises:
        ValueError: If an argument or the input is wrong, another run writes to the folder, the folder was begun with
            other settings, or the server stops answering. What is written stays, and the same command continues it.
    """
    _check_arguments(args)
    try:
        from filelock import FileLock, Timeout

        rows = load_rows(args.input, args.split, args.config)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"this command needs the package {error.name!r}: run `pip install 'dflash-hf[data]'`"
        ) from error
    rows = rows.select(range(min(args.limit, len(rows)))) if args.limit else rows
    target = open_target(args)
    args.output.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(args.output / shards.LOCK_NAME, timeout=0):
            write_dataset(args, rows, target)
    except Timeout:
        raise ValueError(f"another run is writing to {args.output}: wait for it, or name another --output") from None
    return 0


def _check_arguments(args: argparse.Namespace) -> None:
    for name in ("limit", "shard_size", "batch_size", "concurrency", "max_new_tokens", "max_prompt_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}: give at least 1")
    if args.temperature < 0:
        raise ValueError(f"--temperature is {args.temperature}: give 0 for greedy answers, or more")
    if not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p is {args.top_p}: give a share above 0 and at most 1")
    for name in ("chat_template_kwargs", "server_extra"):
        given, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        try:
            value = json.loads(given)
        except ValueError as error:
            raise ValueError(f"{flag} is no JSON ({error}): {given}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{flag} is a {type(value).__name__}: give a JSON object")


@dataclass(frozen=True)
class Target:
    """What a run needs of its target; the weights load only when there is something to answer."""

    tokenizer: PreTrainedTokenizerBase
    facts: dict[str, Any]
    template_kwargs: dict[str, Any]
    max_prompt_tokens: int
    make_responder: Callable[[Sampling, Progress], Responder]


def open_target(args: argparse.Namespace) -> Target:
    """The target that the arguments name.

    Raises:
        ValueError: If it has no chat template, or its context leaves no room for a prompt.
        OSError: If there is no such model.
    """
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    from ..embedded import GGUF_SHA256, TARGET_NAME, embedded_target_path

    name = args.target if args.target is not None else str(embedded_target_path())
    tokenizer = AutoTokenizer.from_pretrained(name, revision=args.revision)
    if not tokenizer.chat_template:
        raise ValueError(f"the target {name} has no chat template: name an instruction-tuned model with --target")
    config = AutoConfig.from_pretrained(name, revision=args.revision)
    facts = {
        "name": args.target if args.target is not None else TARGET_NAME,
        "revision": _revision(name, config) if args.target is not None else GGUF_SHA256,
        "chat_template_sha256": hashlib.sha256(
            json.dumps(tokenizer.chat_template, sort_keys=True).encode()
        ).hexdigest(),
        "dtype": "as served" if args.server else args.dtype,
    }
    kwargs = THINKING[args.thinking] | json.loads(args.chat_template_kwargs)

    def make_responder(sampling: Sampling, progress: Progress) -> Responder:
        if not args.server:
            return LocalResponder(_load_model(args, name), tokenizer, sampling, args.batch_size, progress=progress)
        try:
            generation_config = GenerationConfig.from_pretrained(name, revision=args.revision)
        except OSError:  # a model may have none
            generation_config = None
        return ServerResponder(
            args.server,
            tokenizer,
            sampling,
            kwargs,
            eos_ids=eos_ids_of(generation_config, tokenizer),
            model=args.server_model,
            concurrency=args.concurrency,
            extra=json.loads(args.server_extra),
            progress=progress,
        )

    return Target(tokenizer, facts, kwargs, _room_for_prompt(args, config), make_responder)


def _load_model(args: argparse.Namespace, name: str) -> Any:
    from transformers import AutoModelForCausalLM

    from ..evaluation.models import announced, pick_device, pick_dtype

    device, dtype = pick_device(args.device), pick_dtype(args.dtype)
    with announced(f"target {name}"):
        return AutoModelForCausalLM.from_pretrained(name, revision=args.revision, dtype=dtype).to(device).eval()


def _room_for_prompt(args: argparse.Namespace, config: Any) -> int:
    context = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if context is None:
        return args.max_prompt_tokens
    if context <= args.max_new_tokens:
        raise ValueError(
            f"--max-new-tokens is {args.max_new_tokens} and the target's context (max_position_embeddings) has "
            f"{context} positions: leave room for the prompt"
        )
    return min(args.max_prompt_tokens, context - args.max_new_tokens)


def _revision(name: str, config: Any) -> str:
    """The commit of a target from the Hub; of a folder, a hash of its configuration and weights."""
    folder = Path(name)
    if not folder.is_dir():
        return str(getattr(config, "_commit_hash", None))
    from ..embedded import sha256_of

    files = sorted(path for path in folder.iterdir() if path.name == "config.json" or path.suffix == ".safetensors")
    return hashlib.sha256("".join(f"{path.name} {sha256_of(path)}\n" for path in files).encode()).hexdigest()


def write_dataset(args: argparse.Namespace, rows: Dataset, target: Target) -> None:
    """Write the shards that are missing, and the manifest after each of them."""
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "loop_ngram", "loop_repeats")
    sampling = Sampling(**{name: getattr(args, name) for name in names})
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "target": target.facts,
        "input": {"source": args.input, "rows": len(rows), "sha256": fingerprint(rows), "shard_size": args.shard_size},
        "generation": asdict(sampling)
        | {
            "max_prompt_tokens": target.max_prompt_tokens,
            "thinking": args.thinking,
            "chat_template_kwargs": target.template_kwargs,
        },
        "written_by": _versions(args),
    }
    if (stored := shards.read_manifest(args.output)) is not None:
        shards.check_same_run(args.output, stored, manifest)
    number = -(-len(rows) // args.shard_size)
    missing = [index for index in range(number) if not shards.shard_path(args.output, index).is_file()]

    def note_counts(missing: int) -> dict[str, int]:
        counts = shards.total_counts(args.output, number)
        shards.write_manifest(args.output, manifest | {"counts": counts, "complete": missing == 0})
        return counts

    counts = note_counts(len(missing))
    if missing:
        with ProgressBar(len(rows), counts) as bar:
            answered = _answered_shards(args, rows, target, sampling, bar.answered, missing)
            for left, (index, answers) in zip(reversed(range(len(missing))), answered, strict=True):
                shards.write_shard(args.output, index, answers)
                counts = note_counts(left)
    print(f"{args.output}: " + ", ".join(f"{value} {name}" for name, value in counts.items()), file=sys.stderr)


def _versions(args: argparse.Namespace) -> dict[str, Any]:
    import transformers

    import dflash_hf

    versions: dict[str, Any] = {"dflash_hf": dflash_hf.__version__, "transformers": transformers.__version__}
    if not args.server:
        return versions | {"answers_from": "generate"}
    return versions | {"answers_from": "an OpenAI-compatible server", "server_extra": json.loads(args.server_extra)}


def _answered_shards(
    args: argparse.Namespace,
    rows: Dataset,
    target: Target,
    sampling: Sampling,
    progress: Progress,
    missing: Iterable[int],
) -> Iterator[tuple[int, list[Response | Failure]]]:
    """The missing shards in order; one ahead is begun, so that no server waits for a shard's slowest row."""
    responder = target.make_responder(sampling, progress)
    begun: deque[tuple[int, list[Failure], Callable[[], list[Response | Failure]]]] = deque()
    try:
        for index in missing:
            chunk = range(index * args.shard_size, min((index + 1) * args.shard_size, len(rows)))
            read = [
                tokenize_row(n, rows[n], target.tokenizer, target.template_kwargs, target.max_prompt_tokens)
                for n in chunk
            ]
            prompts = [row for row in read if isinstance(row, Prompt)]
            failures = [row for row in read if isinstance(row, Failure)]
            progress(len(failures), 0)
            begun.append((index, failures, responder.start(prompts, args.seed + index)))
            if len(begun) > 1:
                yield _finished(*begun.popleft())
        while begun:
            yield _finished(*begun.popleft())
    finally:
        responder.close()


def _finished(
    index: int, failures: list[Failure], wait: Callable[[], list[Response | Failure]]
) -> tuple[int, list[Response | Failure]]:
    answers = wait()
    reasons = {answer.reason if isinstance(answer, Failure) else None for answer in answers}
    if len(answers) >= MIN_TO_BLAME_THE_SETUP and len(reasons) == 1 and None not in reasons:
        raise ValueError(f"all {len(answers)} prompts of shard {index} fail: {reasons.pop()}")
    return index, [*failures, *answers]


class ProgressBar:
    """A bar over rows, with tokens per second and the time that is left."""

    def __init__(self, rows: int, counts: dict[str, int]) -> None:
        from tqdm.auto import tqdm

        done = counts.get("sequences", 0) + counts.get("failures", 0)
        self.bar = tqdm(total=rows, initial=done, unit="row", desc="answers", dynamic_ncols=True)
        self.tokens = 0
        self.lock = threading.Lock()  # a server's answers come from many threads

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def answered(self, rows: int, tokens: int) -> None:
        with self.lock:
            self.tokens += tokens
            elapsed = max(self.bar.format_dict["elapsed"], 1e-9)
            self.bar.set_postfix_str(f"{self.tokens / elapsed:.0f} tokens/s", refresh=False)
            self.bar.update(rows)


def main() -> int:
    """`python -m dflash_hf.training.data`: this sub-command alone."""
    parser = argparse.ArgumentParser(prog="dflash-hf data", description=__doc__)
    _add_arguments(parser)
    try:
        return run(parser.parse_args())
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {' '.join(str(error).split())}\n")


if __name__ == "__main__":
    sys.exit(main())
