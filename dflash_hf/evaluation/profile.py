"""`dflash-hf profile`: where a round's time goes on this machine, and how fast drafting could be at best."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bare import bare_forwards, clock_of, mean_over
from .explain import check_arguments as check_plot
from .generate_command import DEFAULT_PROMPT
from .methods import METHODS, PLAIN, Runner, knobs_set, parse_method
from .models import Pair, add_pair_arguments, check_length, encode_chat, load_pair
from .runnable import is_ours

if TYPE_CHECKING:
    from .stopwatch import Stopwatch


def add_parser(subparsers: Any) -> None:
    """Declare the sub-command."""
    parser = subparsers.add_parser(
        "profile",
        help="where the time of a round goes, and how fast it could be",
        description="Time the parts of a round, and the bare forward passes that set the best possible speed-up.",
    )
    parser.add_argument("prompt", nargs="?", default=DEFAULT_PROMPT, metavar="PROMPT", help="what to ask")
    drafting = ", ".join(name for name, method in METHODS.items() if is_ours(method))
    parser.add_argument(
        "--method", default="dflash", metavar="NAME", help=f"one that drafts with the draft: {drafting}"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the time line of a typical round")
    add_pair_arguments(parser)


@dataclass
class Profile:
    """What was measured, in seconds; all of a round's figures are means over rounds, so that they fit together.

    Attributes:
        acceptance_lengths: Tokens that each round committed.
        plain_step: Of plain `generate`, per token.
        bare_step: A bare forward of one token.
        bare_verification: A bare forward, the mean over the widths that the rounds verified.
        speedup: Measured without the stopwatch.
    """

    stopwatch: Stopwatch
    acceptance_lengths: list[int]
    plain_step: float
    bare_step: float
    bare_verification: float
    speedup: float

    @property
    def acceptance_length(self) -> float:
        """Tokens a round commits."""
        return statistics.mean(self.acceptance_lengths)

    @property
    def passes(self) -> float:
        """Draft, head and verification as bare forward passes."""
        parts = self.stopwatch.means()
        return parts["draft forward"] + parts["head"] + self.bare_verification

    @property
    def best_speedup(self) -> float:
        """Acceptance length x plain step / the bare forward passes of a round."""
        return self.acceptance_length * self.plain_step / self.passes

    @property
    def overhead(self) -> float:
        """The share of a round outside the forward passes that happen in it."""
        from .stopwatch import FORWARDS

        parts = self.stopwatch.means()
        return 1 - sum(parts[name] for name in FORWARDS) / sum(parts.values())


def run(args: argparse.Namespace) -> int:
    """Profile and report."""
    check_plot(argparse.Namespace(rounds=1, plot=args.plot))
    method = parse_method(args.method, "--method")
    if not is_ours(method):
        ours = ", ".join(name for name, each in METHODS.items() if is_ours(each))
        raise ValueError(f"--method is {args.method!r}, whose rounds are not this package's; choose one of {ours}.")
    pair = load_pair(args)
    prompt_ids = encode_chat(pair.tokenizer, [{"role": "user", "content": args.prompt}])
    check_length(pair.target, len(prompt_ids), args.max_new_tokens)
    with knobs_set(pair.draft.generation_config, method.draft_settings):
        profile = measure(pair, prompt_ids, args.max_new_tokens)
    print("\n".join(report(profile)))
    if args.plot is not None:
        draw_round(profile, args.plot)
        print(f"\nDrew a typical round in {args.plot}.")
    return 0


def measure(pair: Pair, prompt_ids: list[int], max_new_tokens: int) -> Profile:
    """Generate watched, unwatched and alone, and time bare forward passes at the widths that were verified."""
    from .stopwatch import Stopwatch
    from .trace import loops_watched

    drafted = timed(pair, "dflash", prompt_ids, 8)  # warm both up
    plain = timed(pair, PLAIN, prompt_ids, 8)
    stopwatch = Stopwatch(clock_of(pair.target))
    with loops_watched(pair.draft, stopwatch.watching):
        rounds = timed(pair, "dflash", prompt_ids, max_new_tokens).rounds
    if not stopwatch.rounds:
        raise ValueError(
            "The target ended its answer with the first token, so there is no round to profile; ask else."
        )
    drafted = timed(pair, "dflash", prompt_ids, max_new_tokens)
    plain = timed(pair, PLAIN, prompt_ids, max_new_tokens)
    plain_step, drafted_step = (each.decode / each.decoded_tokens for each in (plain, drafted))
    widths = [each.width for each in stopwatch.rounds]
    bare = bare_forwards(pair.target, prompt_ids, [1, *widths])
    return Profile(
        stopwatch=stopwatch,
        acceptance_lengths=rounds,
        plain_step=plain_step,
        bare_step=bare[1],
        bare_verification=mean_over(widths, bare),
        speedup=plain_step / drafted_step,
    )


def timed(pair: Pair, method: str, prompt_ids: list[int], max_new_tokens: int) -> Any:
    """One greedy generation as a benchmark measures it. The draft's knobs are those set on it."""
    import copy

    from .measure import Measurer
    from .methods import Method
    from .timing import clock_for

    config = copy.deepcopy(pair.target.generation_config)
    config.do_sample, config.temperature, config.top_p, config.top_k = False, None, None, None
    config.max_new_tokens, config.max_length = max_new_tokens, None
    chosen = Method(METHODS[method].assistant, name=method)
    measurer = Measurer(Runner(pair), [chosen], config, clock_for(pair.target.device))
    return measurer.run(chosen, prompt_ids, config)


def report(profile: Profile) -> list[str]:
    """The profile in words."""
    parts = profile.stopwatch.means()
    total = sum(parts.values())
    bars = [
        f"  {name:<22} {1000 * seconds:8.2f} ms  {seconds / total:5.1%}  {'#' * round(50 * seconds / total)}"
        for name, seconds in parts.items()
    ]
    width = width_in_words([each.width for each in profile.stopwatch.rounds])
    return [
        f"A round takes {1000 * total:.1f} ms and commits {profile.acceptance_length:.2f} tokens "
        f"(means of {len(profile.acceptance_lengths)} rounds, {width} verified in each):",
        *bars,
        "",
        f"Outside the forward passes: {profile.overhead:.1%} of the round.",
        f"Plain generate takes {ms(profile.plain_step)} ms a token; its bare forward {ms(profile.bare_step)} ms, and "
        f"one of {width} {ms(profile.bare_verification)} ms.",
        f"Best possible speed-up: {profile.acceptance_length:.2f} x {ms(profile.plain_step)} / "
        f"({ms(parts['draft forward'])} + {ms(parts['head'])} + {ms(profile.bare_verification)}) = "
        f"{profile.best_speedup:.2f}; measured {profile.speedup:.2f}, "
        f"{profile.speedup / profile.best_speedup:.0%} of it.",
        limit(profile, parts, total),
    ]


def width_in_words(widths: list[int]) -> str:
    """How many tokens the rounds verified."""
    least, most = min(widths), max(widths)
    return (
        f"{least} tokens" if least == most else f"{least} to {most} tokens ({statistics.fmean(widths):.1f} on average)"
    )


def ms(seconds: float) -> str:
    """Milliseconds, as text."""
    return f"{1000 * seconds:.2f}"


def limit(profile: Profile, parts: dict[str, float], total: float) -> str:
    """What to change first."""
    even = profile.passes / profile.plain_step
    if profile.acceptance_length < even:
        return (
            f"A round costs {even:.2f} plain steps in forward passes alone, more than the "
            f"{profile.acceptance_length:.2f} tokens it commits: only a draft that is accepted further can gain here."
        )
    largest = max(parts, key=lambda name: parts[name])
    advice = {
        "verification forward": "a higher acceptance length pays most, then verifying fewer tokens a round",
        "draft forward": "a smaller draft pays most",
        "head": "a draft with a reduced vocabulary pays most",
    }
    said = advice.get(largest, "the loop around the models pays most")
    return f"The {largest} is {parts[largest] / total:.0%} of a round: {said}."


def draw_round(profile: Profile, path: Path) -> None:
    """The time line of a typical round as a PNG.

    Raises:
        ValueError: If Matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs Matplotlib; run `pip install matplotlib`.") from error
    from .stopwatch import PARTS

    typical = profile.stopwatch.typical()
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    for row, part in enumerate(reversed(PARTS)):
        slices = [(1000 * start, 1000 * (end - start)) for name, start, end in typical.slices if name == part]
        axes.broken_barh(slices, (row - 0.4, 0.8), color=f"C{row}")
    axes.set_yticks(range(len(PARTS)), list(reversed(PARTS)), fontsize=8)
    axes.set_xlabel("milliseconds from the start of the round")
    axes.set_title(f"A round of median length, {typical.width} tokens verified", fontsize=10)
    axes.set_xlim(0, 1000 * typical.total)
    figure.savefig(path, dpi=130, metadata={"Software": None})


__all__ = ["Profile", "add_parser", "report", "run"]
