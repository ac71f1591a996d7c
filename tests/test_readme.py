"""The README is run: its Python as written (names made local), its commands parsed, its files found."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import torch

from dflash_hf.cli import build_parser, load_subcommands, main
from dflash_hf.embedded import DRAFT_NAME, default_draft_path, embedded_target_path
from helpers import ROOT, greedy

README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [line.strip() for line in README.splitlines() if line.startswith("    ")]


@pytest.mark.real
def test_python_of_the_readme_runs_as_written_and_gives_the_targets_own_text(capsys: pytest.CaptureFixture) -> None:
    target_path, draft_path = embedded_target_path(), default_draft_path()
    scope: dict = {"torch": torch}
    for block in PYTHON:
        code = block.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(target_path))
        code = code.replace("your-org/SmolLM2-135M-Instruct-DFlash", str(draft_path))
        code = re.sub(r"\n    revision=.*", "", code).replace('dtype="auto"', "dtype=torch.float32")
        exec(compile(code, "README.md", "exec"), scope)
    sequences = scope["output"].sequences
    assert sequences.equal(greedy(scope["target"], max_new_tokens=64, **scope["inputs"]))
    assert "[[" in capsys.readouterr().out


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("dflash-hf ")])
def test_command_of_the_readme_is_one_the_parser_takes(command: str, capsys: pytest.CaptureFixture) -> None:
    arguments = shlex.split(command, comments=True)[1:]
    if arguments[-1] == "--help":  # run, since `train` parses its arguments itself
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0 and f"usage: dflash-hf {arguments[0]}" in capsys.readouterr().out
    else:
        assert build_parser(load_subcommands()).parse_args(arguments).subcommand == arguments[0]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_make_target_of_the_readme_exists(command: str) -> None:
    name = command.split()[1]
    assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_packages_of_the_readme_are_those_that_are_read() -> None:
    (line,) = (command for command in COMMANDS if command.startswith("pip install --no-deps "))
    elsewhere = "".join(
        (ROOT / name).read_text(encoding="utf-8")
        for name in ("dflash_hf/embedded.py", "dflash_hf/evaluation/tasks.py", "dflash_hf/evaluation/methods.py")
    )
    assert all(package in elsewhere for package in line.split()[3:])


def test_files_the_readme_names_exist() -> None:
    linked = re.findall(r"\]\(([^)#:]+)\)", README)
    named = re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|md))`", README)
    folders = [ROOT, ROOT / "dflash_hf", ROOT / "dflash_hf" / "generation"]
    assert linked and named
    missing = [name for name in linked + named if not any((folder / name).exists() for folder in folders)]
    assert not missing


def test_figures_of_the_readme_are_those_of_the_drafts_record() -> None:
    record = json.loads((ROOT / "drafts" / DRAFT_NAME / "benchmark.json").read_text(encoding="utf-8"))
    measured = {(row["task"], row["method"]): row for row in record["rows"]}
    table = re.findall(r"^\| (embedded-\S+) \| (\S+) \| (\S+) \| (\S+) \|$", README, flags=re.MULTILINE)
    assert len(table) == 4
    for task, *shown in table:
        chain, auto = measured[task, "dflash"], measured[task, "dflash-auto"]
        assert shown == [f"{chain['acceptance_length']:.2f}", f"{chain['speedup']:.2f}", f"{auto['speedup']:.2f}"]
        assert chain["samples"] >= 9
