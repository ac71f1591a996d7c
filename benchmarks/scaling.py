"""How the cost of drafting grows: with the context, the length of the answer, and the batch.

    python benchmarks/scaling.py --output benchmarks/results/scaling

For every point, plain `generate` and the draft take turns on the same random prompts, with the end of sequence
switched off so that lengths agree. Reported are the share of decoding outside both models' forwards, the speed-up, and
the peak memory above plain `generate`'s. Writes `scaling.json` and `scaling.md`.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from dflash_hf.evaluation.environment import commit, hardware, now, peak_memory, versions
from dflash_hf.evaluation.models import add_pair_arguments, load_pair
from dflash_hf.evaluation.record import write_text
from dflash_hf.evaluation.timing import Recorder, clock_for

CONTEXTS, NEW_TOKENS, BATCHES = (128, 512, 2048, 8192), (64, 256, 1024, 2048), (1, 4, 16)


def points(args: argparse.Namespace) -> list[dict[str, int]]:
    """One axis at a time, from the base point."""
    base = {"context": args.contexts[0], "new_tokens": args.new_tokens[0], "batch": args.batches[0]}
    axes = {"context": args.contexts, "new_tokens": args.new_tokens, "batch": args.batches}
    found = [base | {axis: value} for axis, values in axes.items() for value in values]
    return [point for i, point in enumerate(found) if point not in found[:i]]


def run(pair: Any, point: dict[str, int], with_draft: bool, seed: int) -> dict[str, float]:
    """One generation at a point, timed."""
    target = pair.target
    generator = torch.Generator().manual_seed(seed)
    limit = target.config.get_text_config().max_position_embeddings
    length = min(point["context"], limit - point["new_tokens"])
    vocabulary = target.config.get_text_config().vocab_size
    ids = torch.randint(100, vocabulary, (point["batch"], length), generator=generator).to(target.device)
    config = copy.deepcopy(target.generation_config)
    config.do_sample, config.temperature, config.top_p, config.top_k = False, None, None, None
    config.max_new_tokens, config.max_length = point["new_tokens"], None
    modules = {"target": target} | (
        {"draft": pair.draft, "head": target.get_output_embeddings()} if with_draft else {}
    )
    recorder = Recorder(clock_for(target.device), modules)
    with peak_memory(target.device) as peak, recorder:
        target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            **({"assistant_model": pair.draft} if with_draft else {}),
        )
    timing = recorder.timing(point["new_tokens"])
    return {
        "decode": timing.decode,
        "prefill": timing.prefill,
        "elsewhere": timing.parts["elsewhere"] / timing.decode,
        "peak_mib": peak.mib or 0.0,
    }


def measure(pair: Any, point: dict[str, int], repeats: int) -> dict[str, Any]:
    """Medians over repeats, the two taking turns."""
    plain, drafted = [], []
    for seed in range(repeats):
        plain.append(run(pair, point, False, seed))
        drafted.append(run(pair, point, True, seed))
    middle = {
        f"{name}_{field}": statistics.median(each[field] for each in runs)
        for name, runs in (("plain", plain), ("draft", drafted))
        for field in ("decode", "prefill", "elsewhere", "peak_mib")
    }
    speedup = statistics.median(a["decode"] / b["decode"] for a, b in zip(plain, drafted, strict=True))
    memory = middle["draft_peak_mib"] - middle["plain_peak_mib"]
    return {**point, **middle, "speedup": speedup, "extra_memory_mib": memory}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| context | new tokens | batch | overhead | speed-up | extra memory, MiB |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {r['context']} | {r['new_tokens']} | {r['batch']} | {r['draft_elsewhere']:.1%} | {r['speedup']:.2f} | "
        f"{r['extra_memory_mib']:.0f} |"
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
    rows = []
    for point in points(args):
        rows.append(measure(pair, point, args.repeats))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
        device = pair.target.device
        conditions = {"date": now(), "commit": commit(), "hardware": hardware(device), "versions": versions()}
        record = {**conditions, "target": pair.target_name, "draft": pair.draft_name, "rows": rows}
        write_text(args.output / "scaling.json", json.dumps(record, indent=2) + "\n")
        write_text(args.output / "scaling.md", table(rows) + f"\n\n{conditions}\n")


if __name__ == "__main__":
    main()
