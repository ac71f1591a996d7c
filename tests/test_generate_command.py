"""`dflash-hf generate`, run as a user runs it, on a tiny pair on disk and on the real one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from dflash_hf.cli import main
from dflash_hf.evaluation.generate_command import MIN_TEMPERATURE
from evaluation_helpers import save_tiny_pair, tiny_tokenizer
from helpers import greedy, tiny_target

PROMPT = "w7 w8 w9"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    target, draft = save_tiny_pair(tmp_path_factory.mktemp("pair"))
    return ["--target", target, "--draft", draft, "--device", "cpu"]


def expected_text(max_new_tokens: int) -> str:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    tokens = greedy(tiny_target("qwen3", dtype=torch.float32), ids, max_new_tokens)[0, ids.shape[1] :]
    return tokenizer.decode(tokens, skip_special_tokens=True)


def test_text_is_the_targets_own_through_its_chat_template(pair: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(["generate", PROMPT, *pair, "--max-new-tokens", "12"]) == 0
    out, err = capsys.readouterr()
    text, report = out.strip().split("\n\n")
    assert text.split() == expected_text(12).split()
    found = re.match(r"12 tokens in [\d.]+ s, [\d.]+ tokens/s while decoding, \d+ ms to the first, ", report)
    assert found, report
    mean, rounds = re.search(r"mean acceptance length ([\d.]+) over (\d+) rounds?", report).groups()
    assert float(mean) * int(rounds) == pytest.approx(11, abs=0.01 * int(rounds))  # the first token is the prefill's
    assert "Loading the target" in err and "Loading the draft" in err


def test_no_draft_gives_the_same_text_and_no_rounds(pair: list[str], capsys: pytest.CaptureFixture) -> None:
    assert (
        main(["generate", PROMPT, "--target", pair[1], "--device", "cpu", "--no-draft", "--max-new-tokens", "9"]) == 0
    )
    out, err = capsys.readouterr()
    assert out.split("\n\n")[0].split() == expected_text(9).split()
    assert "acceptance" not in out and "draft" not in err


def test_compare_says_that_the_tokens_are_identical(pair: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(["generate", PROMPT, *pair, "--max-new-tokens", "12", "--compare"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^target alone: 12 tokens in ", out, re.M)
    assert re.search(r"^speed-up: [\d.]+x$", out, re.M)
    assert "tokens: identical to the target alone, token for token" in out


def test_compare_flags_a_broken_draft_loop(
    pair: list[str], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_hf.generation import decoding

    def accept_everything(candidates: torch.Tensor, scores: torch.Tensor) -> decoding.Verdict:
        own = scores[:, -1:].argmax(dim=-1)
        return decoding.Verdict(torch.cat([candidates, own], 1), torch.tensor([candidates.shape[1]]))

    monkeypatch.setattr(decoding, "accept_greedy", accept_everything)
    assert main(["generate", PROMPT, *pair, "--max-new-tokens", "12", "--compare"]) == 1
    assert "tokens: WRONG: they part at new token" in capsys.readouterr().out


def test_sampled_runs_are_not_compared_token_by_token(pair: list[str], capsys: pytest.CaptureFixture) -> None:
    sampling = ["--temperature", "0.8", "--top-p", "0.9", "--top-k", "20", "--max-new-tokens", "6", "--compare"]
    assert main(["generate", PROMPT, *pair, *sampling]) == 0
    assert "tokens: sampled, so two runs differ" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "int3"], "--dtype is 'int3', which is none of auto, bfloat16"),
        (["--device", "abacus"], "--device 'abacus' cannot be used"),
        *[(["--device", name], f"--device {name!r} cannot be used") for name in ("meta", "hpu", "privateuseone")],
        *[
            (
                ["--temperature", text],
                f"--temperature is {float(text)}; it must be 0 (greedy), or a number from 1e-06 up",
            )
            for text in ("-1", "1e-45", "inf", "nan")
        ],
        (["--seed", str(10**23)], f"--seed is {10**23}; it must be from -2**63 up, and below 2**64."),
        (["--top-p", "0"], "--top-p is 0.0; it must be above 0, and at most 1."),
        (["--top-k", "-2"], "--top-k is -2; it must be 0 (all) or above."),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0; it must be at least 1."),
        (["--max-new-tokens", "1022"], "The prompt has 5 tokens and --max-new-tokens is 1022, together more than"),
        (["--target", "/no/such/folder"], "The target folder /no/such/folder does not exist"),
        (["--draft", "/no/such/folder"], "The draft folder /no/such/folder does not exist; name one that does"),
    ],
)
def test_a_mistake_gives_one_line_and_exit_status_2(
    pair: list[str], capsys: pytest.CaptureFixture, arguments: list[str], message: str
) -> None:
    assert main(["generate", PROMPT, *pair, *arguments]) == 2
    out, err = capsys.readouterr()
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert out == "" and len(errors) == 1 and message in errors[0]


def test_lowest_temperature_samples_and_seeds_reach_both_ends(pair: list[str]) -> None:
    for seed in (-(2**63), 2**64 - 1):
        sampling = ["--temperature", str(MIN_TEMPERATURE), f"--seed={seed}", "--max-new-tokens", "5"]
        assert main(["generate", PROMPT, *pair, *sampling]) == 0


@pytest.mark.parametrize("command", ["generate", "explain"])
def test_a_prompt_of_other_bytes_than_utf_8_is_refused_before_loading(
    command: str, pair: list[str], capsys: pytest.CaptureFixture
) -> None:
    assert main([command, "w7 \udcff", *pair]) == 2
    assert capsys.readouterr().err.splitlines() == [
        r"error: PROMPT is 'w7 \udcff', whose character 3 is no Unicode text; write it in UTF-8."
    ]


def test_folders_below_the_home_folder_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    save_tiny_pair(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["generate", PROMPT, "--target", "~/target", "--draft", "~/draft", "--max-new-tokens", "2"]) == 0
    assert "Loading the target ~/target" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "[]", r"The files of \S+target cannot be loaded \(TypeError: "),
        ("generation_config.json", "[]", r"The files of \S+target cannot be loaded \(TypeError: "),
        ("tokenizer.json", "{}", r"The files of \S+target cannot be loaded \(KeyError: 'added_tokens'\)"),
        ("tokenizer_config.json", "{", r"The files of \S+target cannot be loaded \(JSONDecodeError: "),
        ("chat_template.jinja", "{% if %}", r"The chat template of the target fails \(TemplateSyntaxError: "),
        ("chat_template.jinja", "{{ raise_exception('no') }}", r"template of the target fails \(TemplateError: no\)"),
        ("chat_template.jinja", "{{ 1 + 'a' }}", r"The chat template of the target fails \(TypeError: "),
    ],
)
def test_damaged_files_of_the_target_are_refused_with_its_name(
    name: str, content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    target, draft = save_tiny_pair(tmp_path)
    (Path(target) / name).write_text(content)
    assert main(["generate", PROMPT, "--target", target, "--draft", draft, "--device", "cpu"]) == 2
    assert re.search(f"^error: .*{message}", capsys.readouterr().err, re.M)


def test_a_target_without_tokenizer_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    target, draft = save_tiny_pair(tmp_path)
    for file in Path(target).glob("tokenizer*"):
        file.unlink()
    assert main(["generate", PROMPT, "--target", target, "--draft", draft, "--device", "cpu"]) == 2
    assert f"error: The tokenizer of {target} knows no words" in capsys.readouterr().err


def test_a_target_without_its_draft_is_refused(pair: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(["generate", PROMPT, "--target", pair[1]]) == 2
    assert "no --draft is named, and a draft fits one target only" in capsys.readouterr().err


def test_empty_prompt_without_a_chat_template_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    target, draft = save_tiny_pair(tmp_path)
    (Path(target) / "chat_template.jinja").unlink()
    assert main(["generate", "", "--target", target, "--draft", draft, "--device", "cpu"]) == 2
    assert "error: The prompt has 0 tokens, and the target continues at least 1" in capsys.readouterr().err


def test_truncated_target_weights_are_refused_with_their_name(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    target, draft = save_tiny_pair(tmp_path)
    weights = Path(target) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert main(["generate", PROMPT, "--target", target, "--draft", draft]) == 2
    assert f"error: The weights of {target} cannot be read" in capsys.readouterr().err


@pytest.mark.real
def test_the_embedded_pair_answers_in_bf16_and_stands_the_comparison(capsys: pytest.CaptureFixture) -> None:
    assert main(["generate", "What is a lake?", "--compare", "--max-new-tokens", "16"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"tokens: (identical|they part .*: a near tie)", out), out
