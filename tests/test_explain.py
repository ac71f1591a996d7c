"""`dflash-hf explain`: what it shows is what happened, and it changes nothing of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_hf.cli import main
from dflash_hf.evaluation.explain import Explanation, trace_rounds
from dflash_hf.evaluation.models import Pair
from evaluation_helpers import save_tiny_pair, tiny_tokenizer
from helpers import greedy, random_prompt, tiny_draft, tiny_target
from oracle import oracle_draft

LENGTH, BLOCK = 9, 4


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target("qwen3")


def pair_with(target: Any, depth: Any, **settings: Any) -> Pair:
    draft = oracle_draft(target, random_prompt(LENGTH), 30, depth, block_size=BLOCK, **settings)
    return Pair(target, tiny_tokenizer(), draft, "tiny", "oracle")


def test_what_is_committed_is_the_targets_own_text_at_the_depths_drafted(target: Any) -> None:
    prompt = random_prompt(LENGTH)
    pair = pair_with(target, lambda position: position % 3)
    trace = trace_rounds(pair, prompt[0].tolist(), 3)
    committed = [trace.first_token, *[token for each in trace.rounds for token in each.committed]]
    assert committed == greedy(target, prompt, len(committed))[0, LENGTH:].tolist()
    position = LENGTH
    for each in trace.rounds[:3]:
        assert len(each.committed) == position % 3 + 1
        position += len(each.committed)


def test_shapes_positions_and_cache_lengths_are_those_of_the_method(target: Any) -> None:
    """By the bookkeeping of the paper, section 3: context up to the anchor, block from it on."""
    depths = [2, 0, 3]
    starts = [LENGTH, LENGTH + 3, LENGTH + 4]  # the anchors' positions: each round moves on by its depth + 1
    pair = pair_with(target, lambda position: dict(zip(starts, depths, strict=True)).get(position, 0))
    trace = trace_rounds(pair, random_prompt(LENGTH)[0].tolist(), 3)
    read = 0
    for each, start, depth in zip(trace.rounds, starts, depths, strict=False):
        new = start - read  # context that the draft has not read before
        assert each.taps == (1, new, 2 * 32) and each.context == (1, new, 32)
        assert each.new_positions == (read, start - 1) and each.block_positions == (start, start + BLOCK - 1)
        assert each.block_embeds == (1, BLOCK, 32) and each.queries == (1, BLOCK, 4, 8)
        assert each.projected_keys == (1, new + BLOCK, 2, 8) and each.keys == (1, 2, start + BLOCK, 8)
        assert each.layouts == [(list(range(start)), list(range(start, start + BLOCK)))] * 2
        assert each.logits.shape == (BLOCK - 1, 64) and each.target_logits.shape == (BLOCK, 64)
        assert each.target_length == start + depth + 1 and each.draft_length == start
        read = start


def test_words_name_the_source_of_every_key_row(target: Any) -> None:
    pair = pair_with(target, 1)
    trace = trace_rounds(pair, random_prompt(LENGTH)[0].tolist(), 2)
    second = "\n".join(Explanation(pair, trace, 2).lines()).split("Round 2")[1]
    assert "9 from the target features, cached in earlier rounds: positions 0..8\n" in second
    assert "2 from the target features, new in this round: positions 9..10\n" in second
    assert "4 from the block: positions 11..14\n" in second
    assert "queries are rotated at positions 11..14" in second
    assert re.search(r"^ +12 +'w\d+' \d+% +'w\d+' \d+% +accepted$", second, re.M)
    assert re.search(r"^ +13 .* refused, the target's own instead$", second, re.M)
    assert "Accept 1 of 3" in second and "The round commits 2." in second
    assert "the target's keeps positions 0..12 and drops 2; the draft's holds the context of 0..10" in second


@pytest.mark.parametrize(
    ("depth", "accepted", "sentence"),
    [
        (2, 2, "Accept 2 of 3: {0} {1}; the last of them ends the text, so no token of the target's own follows. The"),
        (1, 1, "Accept 1 of 3: {0}; the target's own {1} follows and ends the text. The"),
    ],
)
def test_last_round_says_what_ended_the_text(depth: int, accepted: int, sentence: str) -> None:
    ending = tiny_target("qwen3")
    pair = pair_with(ending, depth)
    tokens = greedy(ending, random_prompt(LENGTH), 3)[0, LENGTH:].tolist()
    assert tokens.count(tokens[2]) == 1  # it ends the text where it stands, and not before
    ending.generation_config.eos_token_id = tokens[2]
    trace = trace_rounds(pair, random_prompt(LENGTH)[0].tolist(), 2)
    assert [each.committed for each in trace.rounds] == [tokens[1:]]
    text = "\n".join(Explanation(pair, trace, 2).lines())
    words = [repr(pair.tokenizer.decode([token])) for token in tokens[1:]]
    assert f"{sentence.format(*words)} round commits 2." in text
    rows = re.findall(r"^ +\d+ .*% +(accepted|refused.*|not asked|own)$", text, re.M)
    refused = ["refused, the target's own instead"] * (depth == 1)
    assert rows == ["accepted"] * accepted + refused + ["not asked"] * 2


def test_drafts_own_settings_do_not_shorten_the_blocks_shown(target: Any) -> None:
    pair = pair_with(target, 1)
    pair.draft.generation_config.num_assistant_tokens = 0
    pair.draft.generation_config.assistant_confidence_threshold = 1.0
    trace = trace_rounds(pair, random_prompt(LENGTH)[0].tolist(), 2)
    assert [len(each.candidates) for each in trace.rounds[:2]] == [BLOCK - 1] * 2


def test_a_draft_that_proposes_from_its_anchor_too_has_room_for_all_of_it(target: Any) -> None:
    pair = pair_with(target, BLOCK, slots_predict_next=True)
    trace = trace_rounds(pair, random_prompt(LENGTH)[0].tolist(), 2)
    assert [len(each.committed) for each in trace.rounds[:2]] == [BLOCK + 1] * 2
    text = "\n".join(Explanation(pair, trace, 2).lines())
    assert text.count("Head over slots 0 to 3: logits (1, 4, 64) = (B, K, V); each slot proposes the token") == 2
    assert text.count("Accept 4 of 4") == 2 and "ends the text" not in text


def test_tracing_leaves_the_draft_as_it_was(target: Any) -> None:
    pair = pair_with(target, 1)
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in pair.draft.modules())
    trace_rounds(pair, random_prompt(LENGTH)[0].tolist(), 1)
    assert "decode" not in vars(pair.draft)
    assert hooks == sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in pair.draft.modules())


def test_attention_is_kept_for_every_layer_and_sums_to_one(target: Any) -> None:
    pair = Pair(target, tiny_tokenizer(), tiny_draft(target), "tiny", "random")
    trace = trace_rounds(pair, random_prompt(LENGTH)[0].tolist(), 1, with_attention=True)
    assert [tuple(weights.shape) for weights in trace.rounds[0].attention] == [(4, 4, LENGTH + 4)] * 2
    for weights in trace.rounds[0].attention:
        torch.testing.assert_close(weights.sum(-1), torch.ones(4, 4))


@pytest.mark.parametrize("window", [None, 5])
def test_command_prints_the_rounds_and_draws_the_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture, window: int | None
) -> None:
    sliding = {"sliding_window": window, "layer_types": ["sliding_attention", "full_attention"], "is_causal": False}
    draft = tiny_draft(tiny_target("qwen3", dtype=torch.float32), **(sliding if window else {}))
    target, folder = save_tiny_pair(tmp_path, draft=draft)
    plot = tmp_path / "attention.png"
    command = ["explain", "w7 w8 w9 w10", "--target", target, "--draft", folder, "--rounds", "3", "--device", "cpu"]
    assert main([*command, "--plot", str(plot), "--plot-layer", "0"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^Round (\d)$", out, re.M) == ["1", "2", "3"]
    assert "taps: the outputs of the target's layers 0, 2; L = 2" in out
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds is 0; it must be at least 1."),
        (
            ["--rounds", "1000000"],
            "has 3 tokens and --rounds is 1000000 (up to 4000001 tokens), together more than the",
        ),
        (["--plot", "picture.svg"], "--plot is picture.svg, but the plot is a PNG"),
        (["--plot", "/no/such/folder/a.png"], "the folder /no/such/folder does not exist"),
        (["--plot-layer", "7"], "--plot-layer is 7 but the draft has 2 layers, 0 to 1."),
    ],
)
def test_a_mistake_gives_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture, arguments: list[str], message: str
) -> None:
    target, draft = save_tiny_pair(tmp_path)
    assert main(["explain", "w7", "--target", target, "--draft", draft, *arguments]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
