"""The command line `dflash-hf`: collects the sub-commands, runs one, and words its errors.

A sub-command is a module with `add_parser(subparsers)`, which declares its arguments, and `run(args)`, which does the
work. The first must stay light (no torch, no Transformers at its import), so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from dflash_hf import __version__, register

SUBCOMMANDS = {
    "generate": "dflash_hf.evaluation.generate_command",
    "explain": "dflash_hf.evaluation.explain",
    "data": "dflash_hf.training.data",
    "train": "dflash_hf.training.train_command",
    "convert": "dflash_hf.checkpoints.convert",
    "upload": "dflash_hf.publishing.upload_command",
    "benchmark": "dflash_hf.evaluation.benchmark",
    "profile": "dflash_hf.evaluation.profile",
}


def build_parser(subcommands: dict[str, ModuleType]) -> argparse.ArgumentParser:
    """The whole parser; the chosen sub-command's name ends up in the attribute `subcommand`."""
    parser = argparse.ArgumentParser(
        prog="dflash-hf",
        description="DFlash speculative decoding for Hugging Face Transformers: run, measure, train, publish drafts.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="subcommand", metavar="COMMAND", required=True)
    for module in subcommands.values():
        module.add_parser(subparsers)
    return parser


def load_subcommands() -> dict[str, ModuleType]:
    """Import the modules of all sub-commands, in the order of the help page."""
    return {name: importlib.import_module(module) for name, module in SUBCOMMANDS.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command and return the exit status: 0, 2 for a mistake of the user's, 130 when interrupted.

    ValueError and OSError are how this package words such mistakes: they become one line on standard error.
    `DFLASH_HF_TRACEBACK=1` shows where they came from.
    """
    escape_what_the_terminal_lacks()
    try:
        return run_subcommand(argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `dflash-hf ... | head`: the reader has left; keep the interpreter's last flush quiet
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        if os.environ.get("DFLASH_HF_TRACEBACK"):
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2


def run_subcommand(argv: Sequence[str] | None) -> int:
    """Parse, run, and hand everything printed over to the reader, so that a reader who has left is noticed here."""
    try:
        subcommands = load_subcommands()
        args = build_parser(subcommands).parse_args(argv)
        register()
        status = subcommands[args.subcommand].run(args) or 0
    except SystemExit:  # argparse has printed a help page
        print(end="", flush=True)
        raise
    print(end="", flush=True)
    return status


def escape_what_the_terminal_lacks() -> None:
    """Let standard output write characters beyond its encoding as escapes: text of a model holds all of Unicode."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def one_line(error: BaseException) -> str:
    """The message of an error on one line; its type where it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
