"""How the cost of drafting grows: with the context, the length of the answer, and the batch.

    python benchmarks/scaling.py --output benchmarks/results/scaling

All points, and at each of them plain `generate` and the draft, take turns on random prompts, with the end of sequence
switched off so that lengths agree. Reported are the share of decoding outside both models' forwards, the speed-up, and
the peak of what is allocated for tensors above plain `generate`'s, in a run apart of at most 64 new tokens; beside it,
what the draft's cache and the prompt's tapped states take. Writes `scaling.json` and `scaling.md` after every turn.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dflash_hf.evaluation.environment import commit, hardware, now, peak_memory, versions
from dflash_hf.evaluation.models import add_pair_arguments, load_pair
from dflash_hf.evaluation.record import write_text
from dflash_hf.evaluation.timing import Recorder, clock_for

CONTEXTS, NEW_TOKENS, BATCHES = (128, 512, 2048, 8192), (64, 256, 1024, 2048), (1, 4, 16)
TOKENS_OF_MEMORY = 64  # new tokens of the run that memory is measured in; a profiler keeps every operation


def points(args: argparse.Namespace) -> list[dict[str, int]]:
    """One axis at a time, from the base point."""
    base = {"context": args.contexts[0], "new_tokens": args.new_tokens[0], "batch": args.batches[0]}
    axes = {"context": args.contexts, "new_tokens": args.new_tokens, "batch": args.batches}
    found = [base | {axis: value} for axis, values in axes.items() for value in values]
    return [point for i, point in enumerate(found) if point not in found[:i]]


def prompt_length(pair: Any, point: dict[str, int]) -> int:
    """The point's context, as far as the target's positions leave room for the answer."""
    limit = pair.target.config.get_text_config().max_position_embeddings
    return min(point["context"], limit - point["new_tokens"])


def generate(pair: Any, point: dict[str, int], with_draft: bool, seed: int) -> None:
    """One generation at a point."""
    target = pair.target
    generator = torch.Generator().manual_seed(seed)
    vocabulary = target.config.get_text_config().vocab_size
    size = (point["batch"], prompt_length(pair, point))
    ids = torch.randint(100, vocabulary, size, generator=generator).to(target.device)
    config = copy.deepcopy(target.generation_config)
    config.do_sample, config.temperature, config.top_p, config.top_k = False, None, None, None
    config.max_new_tokens, config.max_length = point["new_tokens"], None
    assistant = {"assistant_model": pair.draft} if with_draft else {}
    target.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **assistant)


def run(pair: Any, point: dict[str, int], with_draft: bool, seed: int) -> dict[str, float]:
    """One generation at a point, timed."""
    target = pair.target
    modules = {"target": target} | (
        {"draft": pair.draft, "head": target.get_output_embeddings()} if with_draft else {}
    )
    recorder = Recorder(clock_for(target.device), modules)
    with recorder:
        generate(pair, point, with_draft, seed)
    timing = recorder.timing(point["new_tokens"])
    return {
        "decode": timing.decode,
        "prefill": timing.prefill,
        "elsewhere": timing.parts["elsewhere"] / timing.decode,
    }


def peak_allocated(device: torch.device, call: Callable[[], None]) -> float:
    """The peak of what a call allocates for tensors, above what was there before, MiB.

    A process's resident memory also holds what its allocator keeps for later, which depends on all that ran before.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        with peak_memory(device) as peak:
            call()
        return peak.mib - before / 2**20
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(held, default=0) / 2**20


def expected_memory(pair: Any, point: dict[str, int]) -> float:
    """What the draft's cache and the tapped states of the longest round, the prompt's, take, MiB."""
    config, size = pair.draft.config, pair.draft.dtype.itemsize
    tokens = point["batch"] * prompt_length(pair, point)
    taps = len(config.target_layer_ids) * pair.target.config.get_text_config().hidden_size
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return tokens * (taps + cache) * size / 2**20


def measure_memory(pair: Any, point: dict[str, int]) -> dict[str, float]:
    """Peaks of a short generation at a point, MiB: plain, and what the draft adds, measured and expected."""
    short = point | {"new_tokens": min(point["new_tokens"], TOKENS_OF_MEMORY)}
    without, with_it = (
        peak_allocated(pair.target.device, lambda with_draft=with_draft: generate(pair, short, with_draft, 0))
        for with_draft in (False, True)
    )
    return {
        "plain_peak_mib": without,
        "extra_memory_mib": with_it - without,
        "expected_memory_mib": expected_memory(pair, short),
    }


def summary(plain: list[dict[str, float]], drafted: list[dict[str, float]]) -> dict[str, float]:
    """Medians over the turns of a point."""
    middle = {
        f"{name}_{field}": statistics.median(each[field] for each in runs)
        for name, runs in (("plain", plain), ("draft", drafted))
        for field in ("decode", "prefill", "elsewhere")
    }
    speedups = [a["decode"] / b["decode"] for a, b in zip(plain, drafted, strict=True)]
    return {**middle, "speedup": statistics.median(speedups), "turns": len(plain)}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    head = "| context | new tokens | batch | overhead | speed-up | extra memory, MiB | draft's cache and taps, MiB |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    lines += [
        f"| {r['context']} | {r['new_tokens']} | {r['batch']} | {r['draft_elsewhere']:.1%} | {r['speedup']:.2f} | "
        f"{r['extra_memory_mib']:.0f} | {r['expected_memory_mib']:.0f} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="N")
    parser.add_argument("--new-tokens", type=int, nargs="+", default=NEW_TOKENS, metavar="N")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, metavar="N")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("scaling"), metavar="DIR")
    add_pair_arguments(parser)
    args = parser.parse_args()
    pair = load_pair(args)
    pair.target.generation_config.eos_token_id = None
    pair.draft.generation_config.draft_tree_budget = 0
    pair.draft.generation_config.num_assistant_tokens_schedule = "constant"
    run(pair, {"context": 32, "new_tokens": 8, "batch": 1}, True, 0)  # warm up
    chosen = points(args)
    memory = [measure_memory(pair, point) for point in chosen]
    runs: list[tuple[list[dict[str, float]], list[dict[str, float]]]] = [([], []) for _ in chosen]
    device = pair.target.device
    conditions = {"date": now(), "commit": commit(), "hardware": hardware(device), "versions": versions()}
    for seed in range(args.repeats):
        for point, (plain, drafted) in zip(tqdm(chosen, f"turn {seed + 1} of {args.repeats}"), runs, strict=True):
            plain.append(run(pair, point, False, seed))
            drafted.append(run(pair, point, True, seed))
        rows = [{**point, **summary(*own), **peaks} for point, own, peaks in zip(chosen, runs, memory, strict=True)]
        record = {**conditions, "target": pair.target_name, "draft": pair.draft_name, "rows": rows}
        write_text(args.output / "scaling.json", json.dumps(record, indent=2) + "\n")
        write_text(args.output / "scaling.md", table(rows) + f"\n\n{conditions}\n")
    print(table(rows))


if __name__ == "__main__":
    main()
