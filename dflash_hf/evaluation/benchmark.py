"""`dflash-hf benchmark`: what a draft is worth on this machine, against every other way to generate.

Writes `samples.jsonl` while it runs, then `benchmark.json` (its schema is in `record`), `benchmark.md` and plots. Run
again with the same settings, it resumes where it was stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import tasks
from .generate_command import add_generation_arguments, check_sampling, generation_config_for
from .methods import METHODS, parse_methods, say_what_is_left_out
from .models import Pair, add_pair_arguments, check_length, encode_chat, load_pair
from .record import read_record, write_record, write_text

if TYPE_CHECKING:
    from .measure import Measurer
    from .methods import Method, Runner
    from .sample_log import SampleLog

RECORD, REPORT, SAMPLES = "benchmark.json", "benchmark.md", "samples.jsonl"


def add_parser(subparsers: Any) -> None:
    """Declare the sub-command."""
    parser = subparsers.add_parser(
        "benchmark",
        help="measure a draft against other ways to generate",
        description="Measure methods side by side, taking turns prompt by prompt, every output checked.",
    )
    known = ", ".join([*tasks.TASKS, *tasks.GROUPS])
    parser.add_argument(
        "--tasks", nargs="+", default=["embedded"], metavar="NAME", help=f"{known}, or local:FILE.jsonl"
    )
    parser.add_argument(
        "--methods", nargs="+", metavar="NAME", help=f"{', '.join(METHODS)} (default: all that can run here)"
    )
    parser.add_argument("--max-samples", type=int, metavar="N", help="of each task (default: as many as the paper)")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="default: benchmark/; with --render, the record's own folder"
    )
    parser.add_argument("--assistant", metavar="NAME", help="an ordinary assistant model, for the method of that name")
    parser.add_argument(
        "--thinking", choices=("on", "off"), help="the template's switch (default: the template's own)"
    )
    parser.add_argument("--no-plots", action="store_true", help="write no PNG files")
    parser.add_argument("--warm-up-tokens", type=int, default=16, metavar="N", help="per method, first (default: 16)")
    parser.add_argument("--render", type=Path, metavar="JSON", help="only write report and plots of a finished record")
    add_pair_arguments(parser)
    add_generation_arguments(parser, max_new_tokens=2048)


def run(args: argparse.Namespace) -> int:
    """Measure, or resume, or render. Exit status 1 if an output was wrong."""
    from .sample_log import only_run

    if args.render is not None:
        record, folder = read_record(args.render), args.output or args.render.parent
        check_output(folder)
        folder.mkdir(parents=True, exist_ok=True)
        return render(record, folder, not args.no_plots)
    args.output = args.output or Path("benchmark")
    check_arguments(args)
    samples = [sample for name in tasks.expand(args.tasks) for sample in tasks.load_samples(name, args.max_samples)]
    parse_methods(args.methods, has_draft=True, has_assistant=args.assistant is not None)  # before loading anything
    measurer = prepare(load_pair(args), args)
    args.output.mkdir(parents=True, exist_ok=True)
    with only_run(args.output):
        record = measure(measurer, samples, args)
        write_record(args.output / RECORD, record)
        return render(read_record(args.output / RECORD), args.output, not args.no_plots)


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse what can be told before loading anything.

    Raises:
        ValueError: By the name of the flag.
    """
    from .report import check_plots

    check_sampling(args)
    if not args.no_plots:
        check_plots()
    for name, least in (("max_samples", 1), ("max_new_tokens", 1), ("warm_up_tokens", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}.")
    check_output(args.output)


def check_output(folder: Path) -> None:
    """Refuse an output folder that cannot be written to, and leave no trace of the trial.

    Raises:
        ValueError: If it is a file, or it, or the nearest folder above it that exists, cannot be written to.
    """
    import tempfile

    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output is {folder}, which is a file; name a folder.")
    nearest = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    try:
        tempfile.TemporaryDirectory(dir=nearest).cleanup()
    except OSError as error:
        raise ValueError(
            f"--output is {folder}, but nothing can be written to {nearest} ({error.strerror}); name another folder."
        ) from None


def prepare(pair: Pair, args: argparse.Namespace) -> Measurer:
    """What measures the methods that can run on the pair."""
    from .measure import Measurer
    from .methods import Runner
    from .runnable import runnable
    from .timing import clock_for

    chosen = parse_methods(args.methods, has_draft=True, has_assistant=args.assistant is not None)
    if args.methods is None:
        say_what_is_left_out(has_draft=True, has_assistant=args.assistant is not None)
    runner = Runner(pair, load_assistant(args, pair))
    config = generation_config_for(pair.target, args)
    methods = runnable(chosen, args.methods is not None, runner, config)
    return Measurer(runner, methods, config, clock_for(pair.target.device), args.seed)


def measure(measurer: Measurer, samples: list[tasks.Sample], args: argparse.Namespace) -> dict[str, Any]:
    """Measure what the log does not hold yet, and make the record of all of it."""
    from .sample_log import SampleLog

    log = SampleLog(args.output / SAMPLES, run_settings(measurer.runner, args, measurer.methods))
    measure_missing(measurer, log, samples, args)
    return build_record(measurer.runner.pair, log, samples, args)


def load_assistant(args: argparse.Namespace, pair: Pair) -> Any:
    """The ordinary assistant model, in the target's dtype."""
    if args.assistant is None:
        return None
    from .models import load_target

    return load_target(args.assistant, pair.target.dtype, str(pair.target.device), role="assistant")[0]


def run_settings(runner: Runner, args: argparse.Namespace, methods: list[Method]) -> dict[str, Any]:
    """Everything that two lines of one log must have in common."""
    from .environment import commit, hardware, versions
    from .fingerprint import fingerprint

    pair = runner.pair
    models = {"target": pair.target, "draft": pair.draft, "assistant": runner.assistant}
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "thinking", "assistant", "warm_up_tokens")
    return {
        "target": pair.target_name,
        "draft": pair.draft_name,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "device": str(pair.target.device),
        "attention": [model.config._attn_implementation for model in (pair.target, pair.draft)],
        "methods": {method.name: method.settings for method in methods},
        **{name: getattr(args, name) for name in names},
        # Behind what a user sets: where runs differ, the first difference is named.
        "fingerprints": {name: fingerprint(model) for name, model in models.items() if model is not None},
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware(pair.target.device),
    }


def measure_missing(measurer: Measurer, log: SampleLog, samples: list[tasks.Sample], args: argparse.Namespace) -> None:
    """Measure every prompt that has no line yet, under a progress bar."""
    from tqdm import tqdm

    turns = places(samples)
    done = sum(log.has(*turn) for turn in turns)  # they are no measure of the time left
    with tqdm(total=len(turns), initial=done, desc="prompts", unit="prompt", dynamic_ncols=True) as bar:
        for number, (sample, turn, prompt_ids) in enumerate(prompts(samples, measurer, log, args)):
            line = log.find(sample.task, sample.index, turn)
            if line is not None:
                log.check_same_prompt(line, prompt_ids)
            else:
                bar.set_postfix_str(sample.task)
                line = {"task": sample.task, "index": sample.index, "turn": turn, "prompt_tokens": len(prompt_ids)}
                log.add(line | {"prompt_ids": prompt_ids} | measure_prompt(measurer, prompt_ids, number, args))
                bar.update()
    if done == len(turns):
        print(f"Nothing new was measured: {log.path} holds all of these prompts.", file=sys.stderr)


def places(samples: list[tasks.Sample]) -> list[tuple[str, int, int]]:
    """Task, sample and turn of every prompt, as the log files it."""
    return [(sample.task, sample.index, turn) for sample in samples for turn in range(len(sample.turns))]


def measure_prompt(measurer: Measurer, prompt_ids: list[int], number: int, args: argparse.Namespace) -> dict[str, Any]:
    """What is logged of a prompt beside where it is from: figures and a date, or why it was skipped."""
    from .environment import now

    try:
        check_length(measurer.runner.pair.target, len(prompt_ids), args.max_new_tokens)
    except ValueError as error:
        return {"skipped": str(error)}
    if not measurer.is_warm and args.warm_up_tokens:
        measurer.warm_up(prompt_ids, min(args.warm_up_tokens, args.max_new_tokens))
    return {"date": now(), **measurer.prompt(prompt_ids, number)}


def prompts(
    samples: list[tasks.Sample], measurer: Measurer, log: SampleLog, args: argparse.Namespace
) -> Iterator[tuple[tasks.Sample, int, list[int]]]:
    """Every turn of every sample as token ids; answers to earlier turns are plain `generate`'s, for all methods."""
    tokenizer = measurer.runner.pair.tokenizer
    for sample in samples:
        messages: list[dict[str, str]] = []
        for turn, text in enumerate(sample.turns):
            messages.append({"role": "user", "content": text})
            yield sample, turn, encode_chat(tokenizer, messages, template_kwargs(args))
            line = log.find(sample.task, sample.index, turn)
            answer = line["results"]["plain"]["tokens"] if line and "results" in line else []
            messages.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})


def template_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    """What the chat template is told beside the messages."""
    return {} if args.thinking is None else {"enable_thinking": args.thinking == "on"}


def build_record(pair: Pair, log: SampleLog, samples: list[tasks.Sample], args: argparse.Namespace) -> dict[str, Any]:
    """The record of what the log holds of these samples; it may hold more, of earlier calls.

    Raises:
        ValueError: If every prompt was skipped.
    """
    from .limits import bare_verifications, best_possible
    from .summary import build_flags, build_rows

    found = [log.find(*turn) for turn in places(samples)]
    lines = [line for line in found if line is not None]
    measured = [line for line in lines if "results" in line]
    if not measured:
        reasons = " ".join(dict.fromkeys(line["skipped"] for line in lines))
        raise ValueError(f"Nothing was measured, as every prompt was skipped: {reasons}")
    conditions = ("commit", "dtype", "hardware", "versions")
    rows = build_rows(lines, log.run["methods"])
    verifications = bare_verifications(measured, list(log.run["methods"]))
    return {
        "date": max(line["date"] for line in measured),
        **{name: log.run[name] for name in conditions},
        "target": {"name": pair.target_name, "parameters": pair.target.num_parameters()},
        "draft": {
            "name": pair.draft_name,
            "parameters": pair.draft.num_parameters(),
            "block_size": pair.draft.config.block_size,
        },
        "settings": {"max_samples": args.max_samples}
        | {name: value for name, value in log.run.items() if name not in (*conditions, "target", "draft")},
        "prompts": first_prompts(measured, pair.tokenizer, args),
        "rows": rows,
        "best_possible": best_possible(rows, verifications),
        "flagged": build_flags(lines),
    }


def first_prompts(measured: list[dict[str, Any]], tokenizer: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Per task, how prompts went through the template: two tools that differ there measure different things."""
    found: dict[str, Any] = {}
    for line in measured:
        if line["task"] not in found:
            found[line["task"]] = {
                "template_kwargs": template_kwargs(args),
                "first_prompt_ids": line["prompt_ids"],
                "first_prompt": tokenizer.decode(line["prompt_ids"]),
            }
    return found


def render(record: dict[str, Any], folder: Path, with_plots: bool) -> int:
    """Write report and plots beside a record, and print the report."""
    from .report import draw_plots, markdown

    text = markdown(record) if with_plots else markdown(record).split("\n\n![")[0] + "\n"
    write_text(folder / REPORT, text)
    if with_plots:
        draw_plots(record, folder)
    print(text.split("\n\n![")[0])
    wrong = [f"{row['task']}, {row['method']}" for row in record["rows"] if row["correct"] is False]
    if wrong:
        print(f"WRONG output in {len(wrong)} rows: {'; '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


__all__ = ["add_parser", "run"]
