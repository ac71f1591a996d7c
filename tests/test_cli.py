"""The frame of the command line: interrupted, left by its reader, or before a terminal that lacks characters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_hf import cli
from helpers import ROOT

# A program with one sub-command, run as the installed script has it: nothing heavy is imported before `main`.
PROGRAM = """
import sys
sys.path.insert(0, {root!r})
sys.argv[0] = "/somewhere/bin/dflash-hf"
from dflash_hf import cli
class Command:
    def add_parser(subparsers):
        subparsers.add_parser("say")
    def run(args):
        {body}
cli.register = lambda: None
{setup}
sys.exit(cli.main())
"""
SAY = "cli.load_subcommands = lambda: {'say': Command}"


def start(body: str, *arguments: str, setup: str = SAY, **environment: str) -> subprocess.Popen[str]:
    program = PROGRAM.format(root=str(ROOT), body=body, setup=setup)
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | environment,
    )


@pytest.mark.parametrize(
    "setup",
    [
        "cli.load_subcommands = wait",
        SAY + "; cli.register = wait",
    ],
)
def test_an_interrupt_while_packages_are_imported_ends_in_one_word(setup: str, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    wait = f"import time; wait = lambda: (open({str(ready)!r}, 'w').close(), time.sleep(60)); {setup}"
    process = start("pass", "say", setup=wait)
    while not ready.exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (err, process.returncode) == ("interrupted\n", 130)


def test_characters_beyond_the_terminals_encoding_are_escaped() -> None:
    process = start("print('caf\\u00e9 \\u4e2d \\ud800')", "say", PYTHONIOENCODING="ascii")
    out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == ("caf\\xe9 \\u4e2d \\ud800\n", "", 0)


@pytest.mark.parametrize("arguments", [["say"], ["--help"]])
def test_a_reader_that_leaves_before_the_last_flush_is_no_error(arguments: list[str]) -> None:
    process = start("print('text')", *arguments)
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=60)
    assert (err, process.returncode) == ("", 0)


def test_a_mistake_is_one_line_and_exit_status_2(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    class Command:
        @staticmethod
        def add_parser(subparsers: Any) -> None:
            subparsers.add_parser("say")

        @staticmethod
        def run(args: Any) -> int:
            raise ValueError("first\nsecond")

    monkeypatch.setattr(cli, "load_subcommands", lambda: {"say": Command})
    assert cli.main(["say"]) == 2
    assert capsys.readouterr().err == "error: first second\n"
