"""One prompt, all methods in turn: generate, time, and hold the output to plain `generate`'s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .bare import REPEATS_BESIDE, bare_forwards
from .environment import peak_memory
from .methods import PLAIN, Method, Runner
from .near_tie import compare
from .repetition import is_repetitive
from .timing import Recorder


@dataclass
class Measured:
    """One method on one prompt. Seconds; see `Timing`.

    Attributes:
        tokens: The new tokens.
        rounds: Tokens that each round after the prefill committed; empty where nothing drafts.
        widths: Tokens of each forward of the target after the prefill.
        comparison: With plain `generate`'s tokens; `None` when sampling, where two runs may differ.
        repetitive: Whether the tokens are a loop.
    """

    tokens: list[int]
    prefill: float
    decode: float
    parts: dict[str, float]
    first_tokens: int
    decoded_tokens: int
    rounds: list[int]
    peak_memory_mib: float | None
    widths: list[int]
    comparison: dict[str, Any] | None = None
    repetitive: bool = False


class Measurer:
    """Measures prompts, methods taking turns: each prompt starts with another one, so that none is always first.

    Args:
        runner: Runs the methods.
        methods: What to measure; plain `generate` is among them.
        generation_config: For all of them.
        clock: See `timing.clock_for`.
        seed: Of sampling, set before each run.
    """

    def __init__(self, runner: Runner, methods: Sequence[Method], generation_config: Any, clock: Any, seed: int = 0):
        self.runner = runner
        self.methods = list(methods)
        self.generation_config = generation_config
        self.clock = clock
        self.seed = seed
        self.is_warm = False

    def warm_up(self, prompt_ids: list[int], max_new_tokens: int) -> None:
        """Run each method briefly: the first forwards of a process are slower."""
        import copy

        config = copy.deepcopy(self.generation_config)
        config.max_new_tokens = max_new_tokens
        for method in self.methods:
            self.run(method, prompt_ids, config)
        self.is_warm = True

    def prompt(self, prompt_ids: list[int], turn: int) -> dict[str, Any]:
        """All methods on one prompt: `results` by method, `bare` passes, and whether plain's is `repetitive`."""
        start = turn % len(self.methods)
        found = {
            method.name: self.run(method, prompt_ids, self.generation_config)
            for method in self.methods[start:] + self.methods[:start]
        }
        plain = found[PLAIN].tokens
        if not self.generation_config.do_sample:
            for measured in found.values():
                measured.comparison = self._compare(prompt_ids, plain, measured.tokens)
        return {
            "repetitive": found[PLAIN].repetitive,
            "results": {method.name: asdict(found[method.name]) for method in self.methods},
            "bare": self._bare(prompt_ids, found),
        }

    def run(self, method: Method, prompt_ids: list[int], generation_config: Any) -> Measured:
        """One method once."""
        import torch

        torch.manual_seed(self.seed)
        target = self.runner.pair.target
        input_ids = torch.tensor([prompt_ids], device=target.device)
        recorder = Recorder(self.clock, self.runner.watched(method))
        with peak_memory(target.device) as peak, recorder:
            output = self.runner.run(method, input_ids, generation_config, recorder)
        timing = recorder.timing(len(output.tokens))
        drafts = method.assistant is not None or method.generate_settings
        rounds = output.rounds if output.rounds is not None else timing.deliveries if drafts else []
        return Measured(
            tokens=output.tokens,
            prefill=timing.prefill,
            decode=timing.decode,
            parts=timing.parts,
            first_tokens=timing.first_tokens,
            decoded_tokens=timing.decoded_tokens,
            rounds=rounds,
            peak_memory_mib=peak.mib,
            widths=[width for name, _, _, width in timing.spans if name == "target"],
            repetitive=is_repetitive(output.tokens),
        )

    def _bare(self, prompt_ids: list[int], found: dict[str, Measured]) -> dict[int, float]:
        """Seconds of the target's bare forward by the widths of all rounds, behind half of plain's answer."""
        widths = {width for measured in found.values() if measured.rounds for width in measured.widths}
        if not widths:
            return {}
        answer = found[PLAIN].tokens
        text = [*prompt_ids, *answer[: len(answer) // 2]]
        return bare_forwards(self.runner.pair.target, text, widths, REPEATS_BESIDE)

    def _compare(self, prompt_ids: list[int], plain: list[int], tokens: list[int]) -> dict[str, Any]:
        import torch

        target = self.runner.pair.target
        input_ids = torch.tensor([prompt_ids], device=target.device)
        return compare(target, input_ids, plain, tokens, generation_config=self.generation_config).as_dict()


__all__ = ["Measured", "Measurer"]
