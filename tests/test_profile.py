"""`dflash-hf profile`: every moment of a round has an owner, and the formula is the formula."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dflash_hf.cli import main
from dflash_hf.evaluation import bare
from dflash_hf.evaluation.bare import mean_over
from dflash_hf.evaluation.profile import Profile, width_in_words
from dflash_hf.evaluation.stopwatch import PARTS, PYTHON, RoundTime, Stopwatch
from dflash_hf.evaluation.trace import loops_watched
from evaluation_helpers import save_tiny_pair
from helpers import random_prompt, tiny_target
from oracle import oracle_draft

PROMPT, NEW, BLOCK, DEPTH = 9, 13, 4, 2
COSTS = {"draft forward": 2.0, "head": 1.0, "verification forward": 4.0, "acceptance": 0.5, "cache and states": 0.25}


class Hands:
    """A clock that is moved by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def watched_rounds(monkeypatch: pytest.MonkeyPatch) -> tuple[Stopwatch, Any]:
    """Rounds in which only the parts of `COSTS` take time, by a clock that stands still otherwise."""
    from dflash_hf.generation import decoding
    from dflash_hf.generation.target_runner import TargetRunner

    target = tiny_target("qwen3")
    draft = oracle_draft(target, random_prompt(PROMPT), NEW, DEPTH, block_size=BLOCK)
    clock = Hands()

    def slow(owner: Any, name: str, part: str) -> None:
        original = getattr(owner, name)

        def slower(*args: Any, **kwargs: Any) -> Any:
            clock.now += COSTS[part]
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, slower)

    slow(draft.norm, "forward", "draft forward")
    slow(draft, "compute_logits", "head")
    slow(target.model, "forward", "verification forward")
    slow(decoding, "accept_greedy", "acceptance")
    slow(TargetRunner, "keep", "cache and states")
    stopwatch = Stopwatch(clock)
    with loops_watched(draft, stopwatch.watching):
        target.generate(
            random_prompt(PROMPT), assistant_model=draft, max_new_tokens=NEW, do_sample=False, use_cache=True
        )
    return stopwatch, draft


def test_every_part_of_a_round_is_charged_to_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch, _ = watched_rounds(monkeypatch)
    assert len(stopwatch.rounds) == (NEW - 1) // (DEPTH + 1)
    assert stopwatch.means() == {part: COSTS.get(part, 0.0) for part in PARTS}


def test_slices_follow_each_other_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch, _ = watched_rounds(monkeypatch)
    for each in stopwatch.rounds:
        assert each.slices[0][0] == PYTHON and each.slices[0][1] == 0.0
        for (_, _, end), (_, start, _) in zip(each.slices, each.slices[1:], strict=False):
            assert end == start
        assert each.total == sum(COSTS.values())
    assert [each.width for each in stopwatch.rounds] == [BLOCK, BLOCK, BLOCK, BLOCK - 1]


def test_watching_leaves_draft_and_target_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    _, draft = watched_rounds(monkeypatch)
    assert "decode" not in vars(draft) and not draft._forward_hooks and not draft._forward_pre_hooks


def test_best_possible_speedup_is_the_formula() -> None:
    class Watch:
        def means(self) -> dict[str, float]:
            return dict.fromkeys(PARTS, 0.0) | {"draft forward": 1.0, "head": 0.5, "acceptance": 0.5} | {
                "verification forward": 3.0
            }  # fmt: skip

    profile = Profile(Watch(), [3, 5], plain_step=2.0, bare_step=1.8, bare_verification=2.5, speedup=1.5)  # type: ignore[arg-type]
    assert profile.best_speedup == pytest.approx(4.0 * 2.0 / (1.0 + 0.5 + 2.5))
    assert profile.overhead == pytest.approx(0.5 / 5.0)


def test_rounds_that_differ_are_averaged_over_all_of_them() -> None:
    drafting = RoundTime([("draft forward", 0.0, 2.0), ("verification forward", 2.0, 6.0)], width=16)
    plain = RoundTime([("verification forward", 0.0, 1.0)], width=2)
    stopwatch = Stopwatch()
    stopwatch.rounds = [drafting, plain, plain]
    parts = stopwatch.means()
    assert parts["draft forward"] == pytest.approx(2 / 3) and parts["verification forward"] == pytest.approx(2.0)
    assert sum(parts.values()) == pytest.approx(8 / 3)
    widths = [each.width for each in stopwatch.rounds]
    assert mean_over(widths, {16: 4.0, 2: 1.0}) == pytest.approx(2.0)
    assert width_in_words(widths) == "2 to 16 tokens (6.7 on average)" and width_in_words([4, 4]) == "4 tokens"


def test_few_of_many_widths_are_timed_and_the_others_lie_between(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []

    def by_width(target: Any, text_ids: list[int], widths: list[int], repeats: int) -> list[float]:
        timed.extend(widths)
        return [10.0 + width for width in widths]

    monkeypatch.setattr(bare, "time_forwards", by_width)
    seconds = bare.bare_forwards(tiny_target("qwen3"), [5, 6, 7], [*range(1, 65), 3])
    assert len(timed) == bare.MOST_WIDTHS and (timed[0], timed[-1]) == (1, 64)
    assert seconds == {width: pytest.approx(10.0 + width) for width in range(1, 65)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    target, draft = save_tiny_pair(tmp_path_factory.mktemp("pair"))
    return ["--target", target, "--draft", draft, "--device", "cpu", "--max-new-tokens", "20"]


@pytest.mark.parametrize("method", ["dflash", "dflash-tree:draft_tree_budget=6"])
def test_command_reports_parts_bare_passes_and_the_limit(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture, method: str
) -> None:
    plot = tmp_path / "round.png"
    assert main(["profile", "w7 w8", *pair, "--method", method, "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    shares = {name: float(share) for name, share in re.findall(r"^  ([A-Za-z ]+?) +[\d.]+ ms +([\d.]+)%", out, re.M)}
    assert list(shares) == list(PARTS) and sum(shares.values()) == pytest.approx(100, abs=1)
    width = 7 if "tree" in method else 4
    assert re.search(rf"\(means of \d+ rounds, \d to {width} tokens \([\d.]+ on average\) verified in each\):", out)
    assert re.search(r"Best possible speed-up: .* = [\d.]+; measured [\d.]+, \d+% of it\.", out)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "zlab"], "rounds are not this package's; choose one of dflash, dflash-tree, dflash-auto."),
        (["--method", "native"], "--method is 'native', whose rounds are not this package's"),
        (["--method", "assistant"], "--method is 'assistant', whose rounds are not this package's"),
        (["--method", "nonsense"], "--method names 'nonsense', which is none of"),
        (["--method", "dflash:xx=1"], "--method has 'dflash:xx=1', whose method has no knob 'xx'"),
        (["--plot", "a.pdf"], "the plot is a PNG"),
    ],
)
def test_a_mistake_gives_one_line(
    pair: list[str], capsys: pytest.CaptureFixture, arguments: list[str], message: str
) -> None:
    assert main(["profile", "w7", *pair, *arguments]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
