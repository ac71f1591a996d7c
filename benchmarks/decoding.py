"""Trees, batches, adaptive width and compilation, timed on one pair: tables in Markdown, figures in JSON.

    python benchmarks/decoding.py --prompts 1 --new-tokens 32        # some minutes on two cores
    python benchmarks/decoding.py --sections tree auto --prompts 4

Everything is greedy, and no end token stops it, so all methods generate the same number of tokens. They take turns on
each prompt, each prompt starting with another one, and a figure is the median over prompts and repeats of new tokens
per second of the whole `generate` call, prefill included.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from dflash_hf.evaluation import environment, tasks
from dflash_hf.evaluation.bare import clock_of, time_forwards
from dflash_hf.evaluation.methods import knobs_set
from dflash_hf.evaluation.models import Pair, add_pair_arguments, encode_chat, load_pair
from dflash_hf.evaluation.record import write_text

BUDGETS = (8, 16, 32, 64, 128)
BATCHES = (1, 4, 8, 16)
AUTO_CHAIN = {"num_assistant_tokens_schedule": "auto"}
AUTO_TREE = {"draft_tree_budget": "auto"}
CONTEXT = 128  # tokens in the cache while a verification's cost is measured


@dataclass
class Method:
    """A way to generate: who drafts (nobody if `draft` is `None`), and with which knobs."""

    draft: Any = None
    knobs: dict[str, Any] = field(default_factory=dict)
    generate: dict[str, Any] = field(default_factory=dict)


@dataclass
class Figure:
    """A line of a table.

    Attributes:
        tokens_per_second: Median over prompts and repeats.
        speedup: Median of the ratio to plain `generate` on the same prompt, in the same turn.
        acceptance_length: Tokens committed a round, over all rounds; `None` where nothing drafts.
    """

    name: str
    tokens_per_second: float
    speedup: float
    acceptance_length: float | None


class Bench:
    """Runs methods in turn on one target."""

    def __init__(self, pair: Pair, args: argparse.Namespace):
        self.target, self.tokenizer, self.draft = pair.target, pair.tokenizer, pair.draft
        self.args = args
        self.now = clock_of(self.target)
        self.target.generation_config.eos_token_id = None  # a call's own config cannot take it away

    def prompts(self, task: str) -> list[list[int]]:
        """The first prompts of a task, as token ids."""
        samples = tasks.load_samples(task, self.args.prompts)
        return [encode_chat(self.tokenizer, [{"role": "user", "content": sample.turns[0]}]) for sample in samples]

    def run(self, method: Method, rows: list[list[int]]) -> tuple[float, list[list[int]]]:
        """Seconds of one call on left-padded rows, and its acceptance lengths."""
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=self.target.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=self.target.device)
        config = GenerationConfig(
            max_new_tokens=self.args.new_tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            **method.generate,
        )
        drafting = {} if method.draft is None else {"assistant_model": method.draft}
        with knobs_set(getattr(method.draft, "generation_config", config), method.knobs):
            start = self.now()
            output = self.target.generate(ids, attention_mask=mask, generation_config=config, **drafting)
            seconds = self.now() - start
        assert output.sequences.shape[1] == longest + self.args.new_tokens
        return seconds, getattr(output, "acceptance_lengths", None) or []

    def take_turns(self, methods: dict[str, Method], batches: list[list[list[int]]]) -> list[Figure]:
        """Every method on every batch of rows; `methods` holds "plain", which the others are held to."""
        names = list(methods)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        rounds: dict[str, list[int]] = {name: [] for name in names}
        for name in names:  # the first forwards of a process are slower
            self.run(methods[name], batches[0])
        for turn, rows in enumerate(batches * self.args.repeats):
            start = turn % len(names)
            for name in names[start:] + names[:start]:
                took, lengths = self.run(methods[name], rows)
                seconds[name].append(took)
                rounds[name] += [count for row in lengths for count in row]
        tokens = len(batches[0]) * self.args.new_tokens
        return [
            Figure(
                name,
                statistics.median(tokens / took for took in seconds[name]),
                statistics.median(p / took for p, took in zip(seconds["plain"], seconds[name], strict=True)),
                sum(rounds[name]) / len(rounds[name]) if rounds[name] else None,
            )
            for name in names
        ]

    def cost_curve(self, widths: Iterable[int]) -> dict[int, float]:
        """Median milliseconds of a target's forward of some tokens behind a filled cache, by width."""
        widths = list(widths)
        seconds = time_forwards(self.target, [1] * CONTEXT, widths)
        return {width: 1000 * each for width, each in zip(widths, seconds, strict=True)}


def chain(draft: Any, **knobs: Any) -> Method:
    """A fixed chain unless the knobs say otherwise."""
    return Method(draft, {"draft_tree_budget": 0, "num_assistant_tokens_schedule": None, **knobs})


def tree_section(bench: Bench) -> dict[str, Any]:
    """Trees of several budgets against the chain, and what the same acceptance would give where width is free."""
    methods = {"plain": Method(), "chain": chain(bench.draft)}
    methods |= {f"tree {budget}": chain(bench.draft, draft_tree_budget=budget) for budget in BUDGETS}
    kinds = tasks.expand(bench.args.tasks)
    prompts = [ids for kind in kinds for ids in bench.prompts(kind)]
    figures = bench.take_turns(methods, [[ids] for ids in prompts])
    curve = bench.cost_curve((1, 2, 4, bench.draft.config.block_size, *(budget + 1 for budget in BUDGETS)))
    drafting = _drafting_cost(bench, curve[1])
    free = {f.name: f.acceptance_length / (1 + drafting) for f in figures if f.acceptance_length is not None}
    return {
        "figures": [asdict(figure) for figure in figures],
        "verification_ms": curve,
        "drafting_cost": drafting,
        "speedup_if_width_were_free": free,
    }


def _drafting_cost(bench: Bench, one_ms: float) -> float:
    """Drafting one block, head included, in forwards of the target of one token."""
    draft, target = bench.draft, bench.target
    width = len(draft.config.target_layer_ids) * target.config.get_text_config().hidden_size
    states = torch.randn(1, 2, width, dtype=draft.dtype, device=draft.device)
    block = torch.full((1, draft.config.block_size), draft.config.mask_token_id, device=draft.device)
    times = []
    with torch.inference_mode():
        for _ in range(9):
            start = bench.now()
            embeds = draft.embed_block(block, target.get_input_embeddings())
            hidden = draft(noise_embeds=embeds, context_hidden_states=states).last_hidden_state
            draft.compute_logits(hidden, target.get_output_embeddings())
            times.append(1000 * (bench.now() - start))
    return statistics.median(times) / one_ms


def batch_section(bench: Bench) -> dict[str, Any]:
    """Batches against plain `generate` of the same batch."""
    kinds = tasks.expand(bench.args.tasks)
    needed = max(BATCHES)
    per_kind = argparse.Namespace(**{**vars(bench.args), "prompts": -(-needed // len(kinds))})
    source = Bench(Pair(bench.target, bench.tokenizer, bench.draft, "", ""), per_kind)
    pools = [source.prompts(kind) for kind in kinds]
    mixed = [ids for group in zip(*pools, strict=True) for ids in group]
    methods = {"plain": Method(), "chain": chain(bench.draft), "auto chain": chain(bench.draft, **AUTO_CHAIN)}
    return {
        str(size): [asdict(figure) for figure in bench.take_turns(methods, [mixed[:size]] * bench.args.prompts)]
        for size in BATCHES
    }


def auto_section(bench: Bench) -> dict[str, Any]:
    """`"auto"` against the best of the fixed settings, by kind of prompt."""
    most = bench.draft.config.num_proposals
    fixed = {f"chain of {n}": chain(bench.draft, num_assistant_tokens=n) for n in sorted({1, most // 2, most})}
    fixed |= {f"tree {budget}": chain(bench.draft, draft_tree_budget=budget) for budget in (16, 64)}
    autos = {"auto chain": chain(bench.draft, **AUTO_CHAIN), "auto tree": chain(bench.draft, **AUTO_TREE)}
    found = {}
    for kind in tasks.expand(bench.args.tasks):
        figures = bench.take_turns({"plain": Method(), **fixed, **autos}, [[ids] for ids in bench.prompts(kind)])
        speeds = {figure.name: figure.tokens_per_second for figure in figures}
        best = max(fixed, key=lambda name: speeds[name])
        found[kind] = {
            "figures": [asdict(figure) for figure in figures],
            "best_fixed": best,
            "auto_against_best_fixed": {name: speeds[name] / speeds[best] for name in autos},
        }
    return found


def useless_section(bench: Bench) -> dict[str, Any]:
    """A random draft of the same shape: what drafting costs at worst."""
    draft = copy.deepcopy(bench.draft)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
    methods = {"plain": Method(), "chain": chain(draft), "auto chain": chain(draft, **AUTO_CHAIN)}
    methods["auto tree"] = chain(draft, **AUTO_TREE)
    prompts = [ids for kind in tasks.expand(bench.args.tasks) for ids in bench.prompts(kind)]
    return {"figures": [asdict(figure) for figure in bench.take_turns(methods, [[ids] for ids in prompts])]}


def compile_section(bench: Bench) -> dict[str, Any]:
    """Static caches, as they are and with both forwards compiled."""
    static = {"cache_implementation": "static", "disable_compile": True}
    kinds = tasks.expand(bench.args.tasks)
    batches = [[ids] for ids in bench.prompts(kinds[0])]
    methods = {"plain": Method(), "chain": chain(bench.draft), "plain, static": Method(generate=static)}
    methods["chain, static"] = Method(bench.draft, {"draft_tree_budget": 0}, static)
    as_is = bench.take_turns(methods, batches)
    start = time.perf_counter()
    with compiled(bench.target), compiled(bench.draft):
        for name in ("plain, static", "chain, static"):
            for rows in batches:  # every length of prompt is a shape of its own
                bench.run(methods[name], rows)
        warm_up = time.perf_counter() - start
        both = {"plain": methods["plain, static"], "chain": methods["chain, static"]}
        after = bench.take_turns(both, batches)
    renamed = [{**asdict(figure), "name": f"{figure.name}, static, compiled"} for figure in after]
    by_name = {figure.name: figure.tokens_per_second for figure in as_is}
    gains = {f.name: f.tokens_per_second / by_name[f"{f.name}, static"] for f in after}
    return {
        "figures": [asdict(figure) for figure in as_is] + renamed,
        "compiled_against_not": gains,
        "warm_up_seconds": warm_up,
    }


@contextmanager
def compiled(model: Any) -> Any:
    """A model whose forward is compiled meanwhile."""
    model.forward = torch.compile(model.forward)
    try:
        yield
    finally:
        del model.forward
        torch._dynamo.reset()


SECTIONS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "tree": tree_section,
    "batch": batch_section,
    "auto": auto_section,
    "useless": useless_section,
    "compile": compile_section,
}


def table(figures: list[dict[str, Any]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = ["| method | tokens/s | against plain | acceptance length |", "|---|--:|--:|--:|"]
    for figure in figures:
        length = "" if figure["acceptance_length"] is None else f"{figure['acceptance_length']:.2f}"
        lines.append(f"| {figure['name']} | {figure['tokens_per_second']:.1f} | {figure['speedup']:.2f} | {length} |")
    return [*lines, ""]


def render(record: dict[str, Any]) -> str:
    """The record as Markdown: every table of figures under its heading, everything else as lists."""
    meta = record["environment"]
    hardware = meta["hardware"]
    lines = [
        "# Decoding: trees, batches, adaptive width, compilation",
        "",
        f"{meta['date']}, commit {meta['commit']}; {hardware['gpu'] or hardware['cpu']}, "
        f"{hardware['threads']} threads; "
        f"Transformers {meta['versions'].get('transformers')}, PyTorch {meta['versions'].get('torch')}; "
        f"{record['target']} in {record['dtype']} with {record['draft']}; "
        f"{record['prompts']} prompts a kind, {record['new_tokens']} new tokens, {record['repeats']} repeats.",
        "",
    ]
    for name, section in record["sections"].items():
        lines += [f"## {name}", ""]
        parts = {"": section} if "figures" in section else section
        for heading, part in parts.items():
            lines += [f"### {heading}", ""] if heading else []
            lines += table(part if isinstance(part, list) else part["figures"])
            others = {} if isinstance(part, list) else {k: v for k, v in part.items() if k != "figures"}
            lines += [f"* {key.replace('_', ' ')}: {_shown(value)}" for key, value in others.items()]
            lines += [""] if others else []
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_shown(item)}" for key, item in value.items())
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main(argv: list[str] | None = None) -> int:
    """Measure, write JSON and Markdown, print the Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_pair_arguments(parser)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--tasks", nargs="+", default=["embedded"], help="tasks of `dflash-hf benchmark`")
    parser.add_argument("--prompts", type=int, default=2, help="prompts of each task (default: 2)")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens to generate (default: 64)")
    parser.add_argument("--repeats", type=int, default=1, help="times that all of it is run (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/decoding"), help="without suffix")
    args = parser.parse_args(argv)
    if min(args.prompts, args.new_tokens - 1, args.repeats) < 1:
        parser.error("--prompts and --repeats must be at least 1, --new-tokens at least 2")
    try:
        pair = load_pair(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    record = {
        "environment": {
            "date": environment.now(),
            "commit": environment.commit(),
            "versions": environment.versions(),
            "hardware": environment.hardware(pair.target.device),
        },
        "target": pair.target_name,
        "draft": pair.draft_name,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "prompts": args.prompts,
        "new_tokens": args.new_tokens,
        "repeats": args.repeats,
        "sections": {},
    }
    bench = Bench(pair, args)
    for name in args.sections:
        print(f"Measuring {name} ...", file=sys.stderr, flush=True)
        record["sections"][name] = SECTIONS[name](bench)
        write_text(args.out.with_suffix(".json"), json.dumps(record, indent=2) + "\n")
        write_text(args.out.with_suffix(".md"), render(record))
    print(render(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
