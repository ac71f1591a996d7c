"""`dflash-hf benchmark`: its record is true, wrong outputs are marked, and a killed run resumes."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_hf.cli import main
from dflash_hf.evaluation.methods import METHODS
from dflash_hf.evaluation.models import readable
from dflash_hf.evaluation.record import SCHEMA_VERSION, read_record
from dflash_hf.evaluation.sample_log import only_run
from evaluation_helpers import save_tiny_pair, tiny_tokenizer
from helpers import ROOT, greedy, tiny_draft, tiny_target
from hybrid_targets import hybrid_target

PROMPTS = [{"prompt": "w7 w8"}, {"turns": ["w9 w10 w11", "w12"]}, {"messages": [{"role": "user", "content": "w20"}]}]
NEW = 14
ALL = [
    "plain",
    "dflash",
    "dflash-tree:draft_tree_budget=8",
    "dflash-auto",
    "native",
    "prompt-lookup",
    "assistant",
    "zlab",
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return path


def command(
    pair: tuple[str, str], prompts: Path, output: Path, *more: str, methods: Any = ("plain", "dflash")
) -> list:
    target, draft = pair
    fixed = ["--device", "cpu", "--max-new-tokens", str(NEW), "--warm-up-tokens", "2", "--output", str(output)]
    models = ["--target", target, "--draft", draft]
    return ["benchmark", "--tasks", f"local:{prompts}", *models, *fixed, "--methods", *methods, *more]


@pytest.fixture(scope="module")
def finished(pair: tuple[str, str], prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run of every method."""
    output = tmp_path_factory.mktemp("finished")
    assert main(command(pair, prompts, output, "--assistant", pair[0], methods=ALL)) == 0
    return output


def samples(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()[1:]]


def test_every_method_gives_plain_generates_tokens(finished: Path) -> None:
    target = tiny_target("qwen3", dtype=torch.float32)
    lines = samples(finished)
    assert len(lines) == 4  # the turns of one prompt count
    for line in lines:
        prompt = torch.tensor([line["prompt_ids"]])
        expected = greedy(target, prompt, NEW)[0, prompt.shape[1] :].tolist()
        assert {name: result["tokens"] for name, result in line["results"].items()} == dict.fromkeys(ALL, expected)


def test_rounds_and_times_add_up_for_every_method(finished: Path) -> None:
    for line in samples(finished):
        for name, result in line["results"].items():
            assert result["first_tokens"] + result["decoded_tokens"] == len(result["tokens"])
            if name == "plain":
                assert result["rounds"] == []
            elif name in ("dflash", "dflash-tree:draft_tree_budget=8", "dflash-auto", "zlab"):
                assert sum(result["rounds"]) == NEW - 1
            else:  # rounds are read off what was delivered after the first round
                assert sum(result["rounds"]) == result["decoded_tokens"]
            assert sum(result["parts"].values()) == pytest.approx(result["decode"])
            assert min(result["parts"].values()) >= 0
            assert (result["parts"]["draft"] > 0) == (name not in ("plain", "prompt-lookup"))


def test_chain_reference_loop_and_native_path_accept_alike(finished: Path) -> None:
    for line in samples(finished):
        rounds = line["results"]["dflash"]["rounds"]
        assert rounds == line["results"]["zlab"]["rounds"] == line["results"]["native"]["rounds"]


def test_second_turn_continues_the_plain_answer(finished: Path) -> None:
    first, second = [line for line in samples(finished) if line["index"] == 1]
    tokenizer = tiny_tokenizer()
    answer = tokenizer.decode(first["results"]["plain"]["tokens"], skip_special_tokens=True)
    messages = [
        {"role": "user", "content": "w9 w10 w11"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "w12"},
    ]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert second["prompt_ids"] == ids


def test_record_states_what_a_figure_needs(finished: Path) -> None:
    record = read_record(finished / "benchmark.json")
    assert [row["method"] for row in record["rows"]] == ALL
    for field in ("date", "commit", "dtype", "hardware", "versions", "target", "draft", "settings"):
        assert record[field], field
    assert record["dtype"] == "float32" and record["versions"]["torch"] == torch.__version__
    (prompt,) = record["prompts"].values()
    assert prompt["first_prompt_ids"] == samples(finished)[0]["prompt_ids"] and prompt["template_kwargs"] == {}
    for row in record["rows"]:
        assert row["correct"] is True and row["samples"] == 4
        assert row["outputs"] == {"identical": 4, "near_tie": 0, "wrong": 0, "not_compared": 0}
        assert row["tokens_per_second"] > 0 and row["time_to_first_token"] > 0
    plain, chain = record["rows"][:2]
    assert plain["speedup"] == 1.0 and plain["acceptance_length"] is None
    rounds = [length for line in samples(finished) for length in line["results"]["dflash"]["rounds"]]
    assert chain["acceptance_length"] == pytest.approx(sum(rounds) / len(rounds))
    assert sum(chain["acceptance_histogram"]) == len(rounds)


def test_report_and_plots_stand_beside_the_record(finished: Path) -> None:
    report = (finished / "benchmark.md").read_text()
    for heading in ("## Speed", "## Acceptance", "## How fast it could be", "## Outputs"):
        assert heading in report
    plots = sorted(path.name for path in finished.glob("*.png"))
    assert plots == ["acceptance_by_place.png", "acceptance_by_position.png", "speedup.png", "time.png"]
    assert all((finished / name).read_bytes().startswith(b"\x89PNG") and f"({name})" in report for name in plots)


def test_card_reads_the_record(finished: Path) -> None:
    from dflash_hf.publishing.results import read_results

    record = finished / "benchmark.json"
    results = read_results(json.loads(record.read_text()), record)
    assert results.best_speedups() is not None and results.by_position()


def test_killed_run_resumes_where_it_stopped(
    pair: tuple[str, str], prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_hf.evaluation.measure import Measurer

    measured: list[list[int]] = []
    original = Measurer.prompt

    def interrupted(self: Measurer, prompt_ids: list[int], turn: int) -> dict[str, Any]:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(prompt_ids)
        return original(self, prompt_ids, turn)

    with monkeypatch.context() as patch:
        patch.setattr(Measurer, "prompt", interrupted)
        assert main(command(pair, prompts, tmp_path)) == 130
    log = tmp_path / "samples.jsonl"
    assert len(samples(tmp_path)) == 2 and not (tmp_path / "benchmark.json").exists()
    before = log.read_text()
    log.write_text(before + '{"task": "loc')  # killed while it wrote

    def counted(self: Measurer, prompt_ids: list[int], turn: int) -> dict[str, Any]:
        measured.append(prompt_ids)
        return original(self, prompt_ids, turn)

    monkeypatch.setattr(Measurer, "prompt", counted)
    assert main(command(pair, prompts, tmp_path)) == 0
    assert log.read_text().startswith(before)
    assert measured == [line["prompt_ids"] for line in samples(tmp_path)] and len(measured) == 4
    assert read_record(tmp_path / "benchmark.json")["rows"][0]["samples"] == 4


@pytest.mark.parametrize(
    ("change", "field"),
    [(["--max-new-tokens", "15"], "max_new_tokens"), (["--seed", "3"], "seed"), (["--dtype", "float64"], "dtype")],
)
def test_other_settings_do_not_resume_a_run(
    pair: tuple[str, str], finished: Path, prompts: Path, capsys: pytest.CaptureFixture, change: list[str], field: str
) -> None:
    before = (finished / "samples.jsonl").read_text()
    assert main(command(pair, prompts, finished, "--assistant", pair[0], *change, methods=ALL)) == 2
    assert f"holds a run whose `{field}` is" in capsys.readouterr().err.splitlines()[-1]
    assert (finished / "samples.jsonl").read_text() == before


def test_wrong_output_marks_the_row_and_the_exit_status(
    pair: tuple[str, str],
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dflash_hf.evaluation.methods import Output, Runner

    original = Runner.run

    def buggy(self: Runner, method: Any, *args: Any) -> Output:
        output = original(self, method, *args)
        if method.name == "dflash" and len(output.tokens) == NEW:  # not in the warm-up
            output.tokens[3] = (output.tokens[3] + 1) % 64
        return output

    monkeypatch.setattr(Runner, "run", buggy)
    assert main(command(pair, prompts, tmp_path, "--no-plots")) == 1
    out, err = capsys.readouterr()
    assert "**WRONG** dflash" in out and "WRONG output in 1 rows" in err.splitlines()[-1]
    record = read_record(tmp_path / "benchmark.json")
    assert [row["correct"] for row in record["rows"]] == [True, False]
    assert record["flagged"][0]["kind"] == "wrong" and record["flagged"][0]["position"] == 3


def test_sampled_outputs_are_not_compared(pair: tuple[str, str], prompts: Path, tmp_path: Path) -> None:
    assert main(command(pair, prompts, tmp_path, "--temperature", "1.0", "--no-plots")) == 0
    for row in read_record(tmp_path / "benchmark.json")["rows"]:
        assert row["correct"] is None and row["outputs"]["not_compared"] == 4


def test_two_thinking_modes_are_two_runs_that_state_their_prompts(
    pair: tuple[str, str], prompts: Path, tmp_path: Path
) -> None:
    one_prompt = ("--max-samples", "1", "--no-plots")
    assert main(command(pair, prompts, tmp_path / "default", *one_prompt)) == 0
    assert main(command(pair, prompts, tmp_path / "on", *one_prompt, "--thinking", "on")) == 0
    default, on = (
        next(iter(read_record(tmp_path / name / "benchmark.json")["prompts"].values())) for name in ("default", "on")
    )
    assert on["template_kwargs"] == {"enable_thinking": True}
    assert on["first_prompt_ids"] == [*default["first_prompt_ids"], 9]  # the tiny template says w9 when told to think


def test_prompt_beyond_the_context_is_skipped_and_reported(pair: tuple[str, str], tmp_path: Path) -> None:
    prompts = tmp_path / "own.jsonl"
    rows = [{"prompt": " ".join(["w7"] * 1020)}, {"prompt": "w8"}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(command(pair, prompts, tmp_path / "out", "--no-plots")) == 0
    record = read_record(tmp_path / "out" / "benchmark.json")
    assert record["rows"][0]["samples"] == 1
    assert [flag["kind"] for flag in record["flagged"]] == ["skipped"]


def test_render_needs_no_models(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    copy = tmp_path / "benchmark.json"
    copy.write_text((finished / "benchmark.json").read_text())
    assert main(["benchmark", "--render", str(copy)]) == 0
    assert (tmp_path / "benchmark.md").read_text() == (finished / "benchmark.md").read_text()
    assert (tmp_path / "speedup.png").exists()
    other = tmp_path / "new" / "folder"
    assert main(["benchmark", "--render", str(copy), "--output", str(other), "--no-plots"]) == 0
    assert [path.name for path in other.iterdir()] == ["benchmark.md"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"schema": "dflash-hf/benchmark", "schema_version": 0},
            f"but this dflash-hf reads and writes {SCHEMA_VERSION}",
        ),
        ({"schema": "other"}, "is not a benchmark record: its `schema` is 'other'"),
        ([1], "is not a benchmark record: it holds a list"),
        (None, "is not JSON"),
    ],
)
def test_record_of_another_version_gives_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture, content: Any, message: str
) -> None:
    path = tmp_path / "old.json"
    path.write_text("{" if content is None else json.dumps(content))
    assert main(["benchmark", "--render", str(path)]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_log_of_an_older_version_is_left_alone(
    pair: tuple[str, str], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    log = tmp_path / "samples.jsonl"
    log.write_text(json.dumps({"schema": "dflash-hf/benchmark", "schema_version": 0, "run": {}}) + "\n")
    before = log.read_text()
    assert main(command(pair, prompts, tmp_path)) == 2
    assert "has `schema_version` 0 but this dflash-hf" in capsys.readouterr().err.splitlines()[-1]
    assert log.read_text() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "gsm9k"], "--tasks names 'gsm9k', which is none of gsm8k, "),
        (["--methods", "magic"], f"--methods names 'magic', which is none of {', '.join(METHODS)}; choose"),
        (["--methods", "dflash:width"], "where 'width' is no KEY=VALUE"),
        (["--methods", "dflash", "dflash"], "--methods names one of dflash, dflash, plain twice"),
        (["--methods", "assistant"], "The method 'assistant' needs an ordinary assistant model"),
        (["--methods", "dflash:fooo=1"], "whose method has no knob 'fooo'; it has draft_tree_budget, "),
        (["--methods", "dflash:=5"], "whose method has no knob ''; it has draft_tree_budget, "),
        (["--methods", "dflash:num_assistant_tokens_schedule=foo"], "is 'foo'; it must be auto, constant, "),
        (["--methods", "dflash:num_assistant_tokens=9"], "`num_assistant_tokens` is 9 but the draft was trained with"),
        (["--methods", "zlab:draft_tree_budget=8"], "whose method has no knob 'draft_tree_budget'; it has none"),
        (["--methods", "plain:repetition_penalty=1.5"], "whose method has no knob 'repetition_penalty'; it has none"),
        (["--methods", "prompt-lookup:prompt_lookup_num_tokens=x"], "is 'x'; it must be a whole number from 1 up"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0; it must be at least 1."),
        (["--warm-up-tokens", "-1"], "--warm-up-tokens is -1; it must be at least 0."),
        (["--output", "/proc/no/such"], "--output is /proc/no/such, but nothing can be written to /proc"),
        (["--max-samples", "0"], "--max-samples is 0; it must be at least 1."),
        (["--tasks", "local:/no/such/file"], "The prompt file /no/such/file does not exist"),
        (["--temperature", "-1"], "--temperature is -1.0"),
        (["--render", "/no/such/record.json"], "/no/such/record.json does not exist"),
    ],
)
def test_a_mistake_gives_one_sentence_and_measures_nothing(
    pair: tuple[str, str],
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    arguments: list[str],
    message: str,
) -> None:
    assert main(command(pair, prompts, tmp_path / "out", *arguments)) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_plots_that_cannot_be_drawn_are_refused_before_anything_is_measured(
    pair: tuple[str, str],
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    assert main(command(pair, prompts, tmp_path / "out")) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: The plots need Matplotlib; run `pip install matplotlib`, or pass --no-plots."
    ]


def test_models_that_do_not_pair_are_refused_before_anything_is_written(
    pair: tuple[str, str], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    other = tiny_target("llama", dtype=torch.float32, hidden_size=48, head_dim=12)
    other.save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    assert main(command((str(tmp_path / "other"), pair[1]), prompts, tmp_path / "out")) == 2
    assert "`hidden_size` is 32 in the draft but 48 in the target" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def changed_target(pair: tuple[str, str], folder: Path, **settings: Any) -> tuple[str, str]:
    """The pair with a copy of the target whose generation config has more settings."""
    shutil.copytree(pair[0], folder)
    config = folder / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    return str(folder), pair[1]


def test_target_that_cannot_roll_back_leaves_the_methods_out_that_need_it(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    target = hybrid_target("qwen3_5")
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    tiny_draft(target).save_pretrained(tmp_path / "draft")
    hybrid = (str(tmp_path / "target"), str(tmp_path / "draft"))
    argv = command(hybrid, prompts, tmp_path / "out", "--no-plots", "--max-samples", "1")
    at = argv.index("--methods")
    defaults = argv[:at] + argv[at + 3 :]
    assert main(defaults) == 0
    rows = read_record(tmp_path / "out" / "benchmark.json")["rows"]
    assert [row["method"] for row in rows] == ["plain", "dflash", "dflash-tree", "dflash-auto"]
    err = capsys.readouterr().err
    assert "Left out the method assistant: it needs an ordinary assistant model" in err
    for method in ("native", "prompt-lookup"):
        assert f"Left out the method {method}: it cannot take back what the recurrent states of Qwen3_5" in err
    assert main([*defaults[:-3], "--output", str(tmp_path / "named"), "--methods", "native"]) == 2
    assert "The method 'native' cannot run here: it cannot take back" in capsys.readouterr().err.splitlines()[-1]


def test_zlab_is_left_out_where_logits_processors_are_set(
    pair: tuple[str, str], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    penalised = changed_target(pair, tmp_path / "target", repetition_penalty=1.3)
    assert main(command(penalised, prompts, tmp_path / "out", "--no-plots", methods=["dflash", "zlab"])) == 2
    assert "asks for RepetitionPenaltyLogitsProcessor" in capsys.readouterr().err.splitlines()[-1]


def test_zlab_is_left_out_where_its_format_cannot_express_the_draft(
    pair: tuple[str, str], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    target = tiny_target("qwen3", dtype=torch.float32)
    tiny_draft(target, own_head=True).save_pretrained(tmp_path / "draft")
    own_head = (pair[0], str(tmp_path / "draft"))
    assert main(command(own_head, prompts, tmp_path / "out", "--no-plots", methods=["zlab"])) == 2
    assert "The method 'zlab' cannot run here: z-lab's format cannot" in capsys.readouterr().err.splitlines()[-1]


def own_prompts(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def test_a_task_whose_prompts_have_changed_is_not_resumed(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    prompts = own_prompts(tmp_path / "own.jsonl", "w7", "w8")
    argv = command(pair, prompts, tmp_path / "out", "--no-plots")
    assert main(argv) == 0 and main(argv) == 0
    assert "Nothing new was measured: " in capsys.readouterr().err
    before = (tmp_path / "out" / "samples.jsonl").read_text()
    own_prompts(prompts, "w7", "w30")
    assert main(argv) == 2
    assert "holds prompt 1 of local:" in capsys.readouterr().err.splitlines()[-1]
    assert (tmp_path / "out" / "samples.jsonl").read_text() == before


def test_a_run_is_not_resumed_with_other_weights_at_the_same_path(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    shutil.copytree(pair[1], tmp_path / "draft")
    argv = command((pair[0], str(tmp_path / "draft")), own_prompts(tmp_path / "own.jsonl", "w7"), tmp_path / "out")
    assert main([*argv, "--no-plots"]) == 0
    weights = tmp_path / "draft" / "model.safetensors"
    tensors = {name: tensor + 0.01 for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    assert main([*argv, "--no-plots"]) == 2
    assert "holds a run whose `fingerprints` is" in capsys.readouterr().err.splitlines()[-1]


def test_two_runs_cannot_measure_into_one_folder(
    pair: tuple[str, str], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with only_run(tmp_path):
        assert main(command(pair, prompts, tmp_path)) == 2
    assert f"Another benchmark is measuring into {tmp_path}" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "samples.jsonl").exists()


def test_the_record_holds_the_samples_that_were_asked_for(pair: tuple[str, str], tmp_path: Path) -> None:
    prompts, output = own_prompts(tmp_path / "own.jsonl", "w7", "w8", "w9"), tmp_path / "out"
    argv = command(pair, prompts, output, "--no-plots")
    assert main(argv) == 0 and main([*argv, "--max-samples", "1"]) == 0
    record = read_record(output / "benchmark.json")
    assert record["settings"]["max_samples"] == 1 and [row["samples"] for row in record["rows"]] == [1, 1]
    other = own_prompts(tmp_path / "other.jsonl", "w10")
    assert main(command(pair, other, output, "--no-plots")) == 0
    assert {row["task"] for row in read_record(output / "benchmark.json")["rows"]} == {f"local:{other}"}


def test_bare_verifications_stand_beside_those_in_the_loop(finished: Path) -> None:
    record = read_record(finished / "benchmark.json")
    assert all(best["bare_verification"] > 0 for best in record["best_possible"])
    assert "verification as a bare forward pass" in (finished / "benchmark.md").read_text()
    for line in samples(finished):
        chain, tree = (line["results"][name]["widths"] for name in ALL[1:3])
        assert len(chain) == len(line["results"]["dflash"]["rounds"]) and max(chain) == 4 and max(tree) == 9
        assert set(line["results"]["plain"]["widths"]) == {1}
        assert max(line["results"]["zlab"]["widths"]) == 4


def test_record_of_the_default_draft_still_renders(tmp_path: Path) -> None:
    (record,) = (ROOT / "drafts").glob("*/benchmark.json")
    (tmp_path / "benchmark.json").write_text(record.read_text())
    assert main(["benchmark", "--render", str(tmp_path / "benchmark.json"), "--no-plots"]) == 0
    text = (tmp_path / "benchmark.md").read_text()
    measured_bare = "bare_verification" in json.loads(record.read_text())["best_possible"][0]
    assert ("all three as in the loop" in text) is not measured_bare


@pytest.mark.parametrize("name", ["$\\frac$.jsonl", "a|b.jsonl"])
def test_odd_task_names_break_neither_plots_nor_table(
    pair: tuple[str, str], tmp_path: Path, name: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(command(pair, own_prompts(tmp_path / name, "w7"), tmp_path / "out")) == 0
    assert (tmp_path / "out" / "speedup.png").exists()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| task", "| local:"))]
    columns = [len(re.findall(r"(?<!\\)\|", line)) for line in rows]
    assert columns[:3] == [columns[0]] * 3


def test_all_prompts_skipped_gives_the_reasons(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    prompts = own_prompts(tmp_path / "own.jsonl", " ".join(["w7"] * 1100))
    assert main(command(pair, prompts, tmp_path / "out")) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert "Nothing was measured, as every prompt was skipped: The prompt has" in err


@pytest.mark.parametrize(
    ("path", "named"),
    [
        (["rows"], "rows"),
        (["hardware", "gpu"], "hardware.gpu"),
        (["rows", 1, "seconds"], "rows[1].seconds"),
        (["rows", 0, "seconds", "head"], "rows[0].seconds.head"),
        (["best_possible", 0, "reached"], "best_possible[0].reached"),
    ],
)
def test_record_that_lacks_a_field_gives_one_sentence(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture, path: list[Any], named: str
) -> None:
    record = json.loads((finished / "benchmark.json").read_text())
    holder = record
    for step in path[:-1]:
        holder = holder[step]
    del holder[path[-1]]
    (tmp_path / "benchmark.json").write_text(json.dumps(record))
    assert main(["benchmark", "--render", str(tmp_path / "benchmark.json")]) == 2
    assert f"is damaged: it has no right `{named}`" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.real
def test_the_embedded_pair_in_bf16_is_never_wrong(tmp_path: Path) -> None:
    tasks = ["--tasks", "embedded-maths", "embedded-questions", "--max-samples", "1", "--max-new-tokens", "12"]
    methods = ["--methods", "plain", "dflash", "dflash-tree", "--warm-up-tokens", "2", "--output", str(tmp_path)]
    assert main(["benchmark", *tasks, *methods, "--dtype", "bfloat16", "--no-plots"]) == 0
    rows = read_record(tmp_path / "benchmark.json")["rows"]
    assert len(rows) == 6 and all(row["correct"] for row in rows)


def test_model_that_cannot_be_reached_is_named() -> None:
    def load() -> None:
        raise OSError("no connection to the Hub")

    with pytest.raises(OSError, match=r"^org/assistant cannot be loaded: no connection to the Hub$"):
        readable("org/assistant", load)


def test_resumed_run_is_told_what_the_user_changed(
    finished: Path, pair: tuple[str, str], prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not which models' weights differ, which follows from it."""
    assert main(command(pair, prompts, finished, methods=ALL[:1])) == 2
    assert 'holds a run whose `methods` is {"plain"' in capsys.readouterr().err
    log = json.loads((finished / "samples.jsonl").read_text().splitlines()[0])
    keys = list(log["run"])
    assert keys.index("assistant") < keys.index("fingerprints")


def test_time_left_is_judged_by_what_this_run_measures(
    pair: tuple[str, str], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts of an earlier run were there at once, and say nothing of how long the others take."""
    assert main(command(pair, prompts, tmp_path, methods=("plain",))) == 0
    log = tmp_path / "samples.jsonl"
    log.write_text("".join(line + "\n" for line in log.read_text().splitlines()[:-1]))
    capsys.readouterr()
    assert main(command(pair, prompts, tmp_path, methods=("plain",))) == 0
    first = re.search(r"prompts: [^/]*?(\d+)/(\d+) \[00:00<\?", capsys.readouterr().err)
    assert first is not None and int(first[1]) == int(first[2]) - 1
