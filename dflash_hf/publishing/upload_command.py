"""`dflash-hf upload` and `hub_upload.py`: stage a draft's Hub repository, check it, upload it."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .stage import Stage

DESCRIPTION = """Stage a draft as a Hub repository, check it as a stranger would, and upload it in one commit.

The staged folder holds the weights, the flat code, the config, a model card and the licence. Before anything is sent,
a clean subprocess without this package loads it by remote code, offline; its result must be the draft's own."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments, for the sub-command and for the script alike."""
    parser.add_argument("draft", metavar="DRAFT", help="a folder or a Hub name, in any format that load_draft opens")
    parser.add_argument("--repo-id", metavar="ORG/NAME", help="where to publish; else --stage or --dry-run")
    facts = parser.add_argument_group("what the card says")
    facts.add_argument("--base-model", metavar="ORG/NAME", help="the target, where the draft does not name it")
    facts.add_argument("--license", metavar="ID", help="such as apache-2.0, where the draft does not state it")
    facts.add_argument("--license-file", type=Path, metavar="FILE", help="the licence's text")
    facts.add_argument(
        "--training", type=Path, metavar="JSON", help="how it was made (default: training.json in DRAFT)"
    )
    facts.add_argument(
        "--benchmark", type=Path, metavar="JSON", help="what was measured (default: benchmark.json in DRAFT)"
    )
    staging = parser.add_argument_group("staging and checking")
    staging.add_argument("--stage", type=Path, metavar="DIR", help="keep the staged repository in this folder")
    staging.add_argument(
        "--dtype", default="auto", metavar="DTYPE", help="of the published weights (default: auto, as in DRAFT)"
    )
    staging.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one weight file (default: 5GB)")
    staging.add_argument(
        "--check-target",
        metavar="NAME",
        help="a target (folder or Hub name) to generate with, with the draft and alone",
    )
    upload = parser.add_argument_group("uploading")
    upload.add_argument("--private", action="store_true", help="create the repository as a private one")
    upload.add_argument(
        "--revision", metavar="BRANCH", help="the branch to commit to, created if missing (default: main)"
    )
    upload.add_argument("--create-pr", action="store_true", help="open a pull request instead of committing to main")
    upload.add_argument("--message", metavar="TEXT", help="the commit's message")
    upload.add_argument("--dry-run", action="store_true", help="list files, sizes, hashes and the card; send nothing")


def add_parser(subparsers: Any) -> None:
    """Declare `dflash-hf upload`."""
    parser = subparsers.add_parser(
        "upload",
        help="publish a draft on the Hub",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Stage, check, upload; returns the exit status.

    Raises:
        ValueError: For whatever stands in the way, in one sentence.
    """
    if not args.repo_id and not args.stage and not args.dry_run:
        raise ValueError(
            "There is nothing to do without a destination; name --repo-id ORG/NAME, --stage DIR or --dry-run."
        )
    if args.repo_id and args.repo_id.count("/") != 1:
        raise ValueError(f"--repo-id {args.repo_id} is not of the form ORG/NAME; add the user or organisation.")
    if args.create_pr and args.revision not in (None, "main"):
        raise ValueError(
            f"--create-pr opens its pull request against main, so it cannot take --revision {args.revision}; drop one."
        )
    with tempfile.TemporaryDirectory() as scratch:
        return stage_check_upload(args, args.stage or Path(scratch) / "stage")


def stage_check_upload(args: argparse.Namespace, folder: Path) -> int:
    """The whole command, in a staging folder; the exit status."""
    from .check import check_stage
    from .facts import collect_facts
    from .stage import stage_draft

    draft, source = open_draft(args.draft, args.dtype)
    records = {"training": args.training, "benchmark": args.benchmark}
    facts = collect_facts(
        draft,
        source,
        name=args.stage.resolve().name if args.stage else None,
        repo_id=args.repo_id,
        base_model=args.base_model,
        license=args.license,
        **records,
    )
    if args.create_pr:  # the tag that the card would pin is set on the commit, which a pull request only proposes
        facts.revision = "main"
    say(f"staging {args.draft} ...")
    stage = stage_draft(
        draft,
        facts,
        folder,
        source=source,
        license_file=args.license_file,
        max_shard_size=args.max_shard_size,
        **records,
    )
    say(f"checking {len(stage.files)} files in a clean process without this package ...")
    check_stage(stage, draft, target_folder(args.check_target))
    if args.dry_run:
        print_listing(stage)
    elif args.repo_id:
        upload(args, stage, facts.revision)
    else:
        print(f"staged and checked: {stage.folder}")
    return 0


def open_draft(name: str, dtype: str = "auto") -> tuple[Any, Path | None]:
    """The draft in a dtype, by default its own, and its folder where it has one."""
    from dflash_hf import load_draft

    from ..evaluation.models import pick_dtype

    picked = pick_dtype(dtype)
    draft = load_draft(name)
    return draft if picked == "auto" else draft.to(picked), Path(name) if Path(name).is_dir() else None


def target_folder(name: str | None) -> Path | None:
    """A folder with the target's files: the one named, or a snapshot of the Hub repository named."""
    if name is None or Path(name).is_dir():
        return Path(name) if name else None
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"The target {name} is no folder and could not be downloaded ({reason}).") from error


def print_listing(stage: Stage) -> None:
    """What would be uploaded."""
    for file in stage.files:
        print(f"{file.sha256}  {file.size:>12,}  {file.path}")
    print(f"{len(stage.files)} files, {sum(file.size for file in stage.files):,} bytes; nothing was sent\n")
    print(stage.card)


def upload(args: argparse.Namespace, stage: Stage, tag: str | None) -> None:
    """Publish what has been staged and checked, and say where it is."""
    from .upload import publish

    done = publish(
        stage,
        args.repo_id,
        tag=tag,
        private=args.private,
        revision=args.revision,
        create_pr=args.create_pr,
        message=args.message,
    )
    print(f"published: {done.pull_request or done.commit_url}")
    if done.tag:
        print(
            f'load it with: AutoModel.from_pretrained("{args.repo_id}", revision="{done.tag}", trust_remote_code=True)'
        )


def say(text: str) -> None:
    """Report progress on standard error."""
    print(text, file=sys.stderr, flush=True)
