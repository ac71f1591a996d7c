"""`dflash-hf generate "PROMPT"`: a target and its draft answer a prompt, and say how fast they were."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .models import Pair, add_pair_arguments, check_length, check_text, encode_chat, load_pair

if TYPE_CHECKING:
    from .timing import Timing

DEFAULT_PROMPT = "Explain in a few sentences why the sky is blue."
MIN_TEMPERATURE = 1e-6  # logits are divided by it; much smaller ones would leave the range of float32


def add_parser(subparsers: Any) -> None:
    """Declare the sub-command."""
    parser = subparsers.add_parser(
        "generate",
        help="answer a prompt with a target and its draft",
        description="Answer a prompt through the target's chat template, stream the text, and report the speed.",
    )
    parser.add_argument("prompt", nargs="?", default=DEFAULT_PROMPT, metavar="PROMPT", help="what to ask")
    add_pair_arguments(parser)
    add_generation_arguments(parser)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--no-draft", action="store_true", help="the target alone")
    mode.add_argument(
        "--compare", action="store_true", help="also the target alone: speed-up, and are tokens the same"
    )


def add_generation_arguments(parser: argparse.ArgumentParser, max_new_tokens: int = 256) -> None:
    """`--max-new-tokens`, sampling, and the chat template's switches."""
    generation = parser.add_argument_group("generation")
    generation.add_argument(
        "--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help=f"default: {max_new_tokens}"
    )
    generation.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    generation.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default: 1, all")
    generation.add_argument("--top-k", type=int, default=0, metavar="K", help="default: 0, all")
    generation.add_argument("--seed", type=int, default=0, help="of sampling (default: 0)")


@dataclass
class Answer:
    """What one run gave."""

    tokens: list[int]
    timing: Timing
    acceptance_lengths: list[int]


def run(args: argparse.Namespace) -> int:
    """Answer, then report. Exit status 1 if `--compare` finds an output that rounding cannot explain."""
    check_sampling(args)
    check_text("PROMPT", args.prompt)
    pair = load_pair(args, with_draft=not args.no_draft)
    prompt_ids = encode_chat(pair.tokenizer, [{"role": "user", "content": args.prompt}])
    check_length(pair.target, len(prompt_ids), args.max_new_tokens)
    if args.compare:
        warm_up(pair, prompt_ids, args)
    answer = generate(pair, prompt_ids, args, stream_to(pair.tokenizer))
    print(f"\n{summary(answer, pair.draft is not None)}")
    return compare_with_target_alone(pair, prompt_ids, args, answer) if args.compare else 0


def check_sampling(args: argparse.Namespace) -> None:
    """Refuse sampling settings out of range, by the names of the flags.

    Raises:
        ValueError: For the first one that is.
    """
    is_temperature = args.temperature == 0 or MIN_TEMPERATURE <= args.temperature < math.inf
    for flag, value, is_right, rule in (
        ("--temperature", args.temperature, is_temperature, f"0 (greedy), or a number from {MIN_TEMPERATURE} up"),
        ("--top-p", args.top_p, 0 < args.top_p <= 1, "above 0, and at most 1"),
        ("--top-k", args.top_k, args.top_k >= 0, "0 (all) or above"),
        ("--seed", args.seed, -(2**63) <= args.seed < 2**64, "from -2**63 up, and below 2**64"),
    ):
        if not is_right:
            raise ValueError(f"{flag} is {value}; it must be {rule}.")


def generation_config_for(target: Any, args: argparse.Namespace) -> Any:
    """The target's own generation config with the arguments' sampling settings."""
    import copy

    config = copy.deepcopy(target.generation_config)
    config.do_sample = args.temperature > 0
    sampling = (args.temperature, args.top_p, args.top_k) if config.do_sample else (None, None, None)
    config.temperature, config.top_p, config.top_k = sampling
    config.max_new_tokens, config.max_length = args.max_new_tokens, None
    config.return_dict_in_generate = True
    return config


def stream_to(tokenizer: Any) -> Any:
    """A streamer that prints the answer as it comes."""
    from transformers import TextStreamer

    return TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def generate(pair: Pair, prompt_ids: list[int], args: argparse.Namespace, streamer: Any = None) -> Answer:
    """One answer, timed. The draft assists where the pair has one."""
    import torch

    from .timing import Recorder, clock_for

    torch.manual_seed(args.seed)
    input_ids = torch.tensor([prompt_ids], device=pair.target.device)
    modules = {"target": pair.target} | ({} if pair.draft is None else {"draft": pair.draft})
    recorder = Recorder(clock_for(pair.target.device), modules, streamer)
    with recorder:
        output = pair.target.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=generation_config_for(pair.target, args),
            streamer=recorder,
            **({} if pair.draft is None else {"assistant_model": pair.draft}),
        )
    tokens = output.sequences[0, len(prompt_ids) :].tolist()
    rounds = getattr(output, "acceptance_lengths", None) or [[]]
    return Answer(tokens, recorder.timing(len(tokens)), rounds[0])


def warm_up(pair: Pair, prompt_ids: list[int], args: argparse.Namespace) -> None:
    """A few tokens of either kind: the first forwards of a process are slower, and --compare runs one kind first."""
    few = argparse.Namespace(**{**vars(args), "max_new_tokens": min(8, args.max_new_tokens)})
    for one in (pair, target_alone(pair)):
        generate(one, prompt_ids, few)


def target_alone(pair: Pair) -> Pair:
    """The pair without its draft."""
    return Pair(pair.target, pair.tokenizer, None, pair.target_name, None)


def summary(answer: Answer, has_draft: bool) -> str:
    """One line: tokens, speed, and how the drafting went."""
    parts = [f"{len(answer.tokens)} tokens in {answer.timing.prefill + answer.timing.decode:.2f} s"]
    if answer.timing.tokens_per_second is not None:
        parts.append(f"{answer.timing.tokens_per_second:.1f} tokens/s while decoding")
    parts.append(f"{answer.timing.prefill * 1000:.0f} ms to the first")
    if has_draft:
        rounds = answer.acceptance_lengths
        mean = f"{sum(rounds) / len(rounds):.2f}" if rounds else "-"
        parts.append(f"mean acceptance length {mean} over {len(rounds)} round{'s' * (len(rounds) != 1)}")
    return ", ".join(parts)


def compare_with_target_alone(pair: Pair, prompt_ids: list[int], args: argparse.Namespace, answer: Answer) -> int:
    """Run the target alone; print its speed, the speed-up, and whether the tokens are the same."""
    import torch

    from .near_tie import WRONG, compare, describe

    print("Running the target alone ...", file=sys.stderr, flush=True)
    alone = generate(target_alone(pair), prompt_ids, args)
    print(f"target alone: {summary(alone, False)}")
    if answer.timing.tokens_per_second and alone.timing.tokens_per_second:
        print(f"speed-up: {answer.timing.tokens_per_second / alone.timing.tokens_per_second:.2f}x")
    if args.temperature > 0:
        print(
            "tokens: sampled, so two runs differ; their distribution is the target's (use --temperature 0 to compare)"
        )
        return 0
    input_ids = torch.tensor([prompt_ids], device=pair.target.device)
    config = generation_config_for(pair.target, args)
    comparison = compare(pair.target, input_ids, alone.tokens, answer.tokens, generation_config=config)
    print(f"tokens: {describe(comparison, pair.tokenizer)}")
    return int(comparison.verdict == WRONG)


__all__ = ["add_generation_arguments", "add_parser", "check_sampling", "generation_config_for", "run"]
