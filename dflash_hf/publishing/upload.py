"""The upload: one commit through the Hub's own client, or nothing; run again, it goes on where it was.

Large files travel first and the Hub keeps them under their checksums, so a second run sends only what is missing.
The commit names the state it was prepared against: if somebody else commits in between, the Hub refuses it.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .card import CARD_FILE, merge_cards
from .stage import Stage

# What an earlier upload may have left and this one does not replace: old shards, modules, plots; weights that pickle.
STALE = ("*.py", "*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.pkl", "figures/*")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx")
QUOTA_WORDS = ("quota", "storage limit", "storage space", "exceeded", "billing")
UPLOADING = "uploading"
TOKENS_URL = "https://huggingface.co/settings/tokens"


@dataclass(frozen=True)
class Published:
    """What an upload led to."""

    commit_url: str
    oid: str
    pull_request: str | None
    tag: str | None


@dataclass(frozen=True)
class Remote:
    """A repository on the Hub before the upload: its head, its files, its card."""

    oid: str
    files: tuple[str, ...]
    card: str | None


class UploadError(ValueError):
    """An upload that did not happen, in one sentence."""


def publish(
    stage: Stage,
    repo_id: str,
    *,
    tag: str | None = None,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    message: str | None = None,
    api: Any = None,
) -> Published:
    """Upload a staged repository in one commit.

    Args:
        tag: Name given to the commit, which the card pins. A tag that exists is left where it is.
        api: A `huggingface_hub.HfApi`; by default one with the token and endpoint of the usual places.

    Raises:
        UploadError: If the Hub refuses or cannot be reached. Nothing is published then, and the same call goes on.
        ValueError: If `create_pr` and a `revision` other than main are asked for together.
    """
    from huggingface_hub import HfApi

    if create_pr and revision not in (None, "main"):
        raise ValueError(
            f"--create-pr opens its pull request against main, so it cannot take --revision {revision}; drop one."
        )
    api = api or HfApi()
    branch = revision or "main"
    with worded(repo_id, "asking who you are"):
        user = check_token(api)
    remote = prepare_repository(api, repo_id, private, branch, user)
    operations = list(make_operations(stage, remote))
    with worded(repo_id, UPLOADING):
        commit = api.create_commit(
            repo_id=repo_id,
            operations=operations,
            commit_message=message or f"Upload {repo_id.split('/')[-1]}",
            revision=revision,
            create_pr=create_pr,
            parent_commit=remote.oid,
        )
    if tag and not create_pr:
        set_tag(api, repo_id, tag, commit)
    return Published(commit.commit_url, commit.oid, commit.pr_url, None if create_pr else tag)


def check_token(api: Any) -> str:
    """The user's name, if the token is there, valid and not read-only."""
    from huggingface_hub import get_token

    if api.token is None and get_token() is None:
        raise UploadError("No Hugging Face token was found; run `hf auth login` or set HF_TOKEN, then run this again.")
    user = api.whoami()
    role = ((user.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise UploadError(f"The token of {user['name']} may only read; make one that may write at {TOKENS_URL}.")
    return user["name"]


def prepare_repository(api: Any, repo_id: str, private: bool, branch: str, user: str) -> Remote:
    """The repository's present state; it is created, and so is the branch, where they are missing.

    Raises:
        UploadError: If the name is taken by something that is not a draft, or what exists is public and was asked to
            be private.
    """
    from huggingface_hub.errors import RepositoryNotFoundError

    with worded(repo_id, "looking the repository up"):
        try:
            info = api.model_info(repo_id)
        except RepositoryNotFoundError:
            create_repository(api, repo_id, private)
            info = api.model_info(repo_id)
        if private and info.private is False:
            raise UploadError(
                f"{repo_id} exists and is public, but --private was asked for; "
                "change it in its settings or choose another name."
            )
        if branch != "main":
            api.create_branch(repo_id, branch=branch, exist_ok=True)
            info = api.model_info(repo_id, revision=branch)
        files = tuple(sibling.rfilename for sibling in info.siblings or ())
        refuse_other_models(api, repo_id, info.sha, files)
        card = read_text(api, repo_id, info.sha, CARD_FILE) if CARD_FILE in files else None
    return Remote(info.sha, files, card)


def create_repository(api: Any, repo_id: str, private: bool) -> None:
    """Create the repository, unless it is there."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        api.create_repo(repo_id, private=private)
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code == 409:
            raise UploadError(
                f"The name {repo_id} is taken by a repository that this token cannot see; choose another --repo-id."
            ) from error
        raise


def refuse_other_models(api: Any, repo_id: str, oid: str, files: tuple[str, ...]) -> None:
    """A repository that holds another kind of model is not overwritten."""
    if "config.json" in files:
        try:
            kind = json.loads(read_text(api, repo_id, oid, "config.json")).get("model_type")
        except (ValueError, AttributeError):
            kind = None
        if kind != "dflash":
            raise UploadError(
                f"The name {repo_id} is taken: its config.json has model_type {kind!r}, not 'dflash'; "
                "choose another --repo-id."
            )
    elif weights := [name for name in files if any(fnmatch.fnmatch(name, pattern) for pattern in WEIGHTS)]:
        raise UploadError(
            f"The name {repo_id} is taken: it holds {weights[0]} and no draft's config.json; choose another --repo-id."
        )


def read_text(api: Any, repo_id: str, oid: str, name: str) -> str:
    """A text file of the repository as it was at commit `oid`."""
    path = api.hf_hub_download(repo_id, name, revision=oid)
    with open(path, encoding="utf-8") as file:
        return file.read()


def make_operations(stage: Stage, remote: Remote) -> Iterator[Any]:
    """Additions of every staged file, the card merged with the present one; deletions of what is stale."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    staged = {file.path for file in stage.files}
    for path in remote.files:
        if path not in staged and any(fnmatch.fnmatch(path, pattern) for pattern in STALE):
            yield CommitOperationDelete(path_in_repo=path)
    for path in sorted(staged):
        content: Any = stage.folder / path
        if path == CARD_FILE:
            content = merge_cards(stage.card, remote.card).encode()
        yield CommitOperationAdd(path_in_repo=path, path_or_fileobj=content)


def set_tag(api: Any, repo_id: str, tag: str, commit: Any) -> None:
    """Tag the commit.

    Raises:
        UploadError: If the Hub refuses; the commit stays published.
    """
    try:
        api.create_tag(repo_id, tag=tag, revision=commit.oid, exist_ok=True)
    except Exception as error:
        raise UploadError(
            f"{repo_id} is published at {commit.commit_url}, but the tag {tag}, which its card pins, could not be set "
            f"({_reason(error)}); run this again to set it."
        ) from error


@contextmanager
def worded(repo_id: str, doing: str) -> Iterator[None]:
    """Turn what the client raises while `doing` something into one `UploadError`."""
    try:
        yield
    except UploadError:
        raise
    except KeyboardInterrupt as error:
        raise UploadError(
            f"Interrupted while {doing}; {_outcome(repo_id, doing)}, run this again to go on."
        ) from error
    except Exception as error:
        sentence = explain(error, repo_id, doing)
        if sentence is None:
            raise
        raise UploadError(sentence) from error


def explain(error: BaseException, repo_id: str, doing: str) -> str | None:
    """One sentence for an error of the Hub or of the network; `None` for any other."""
    cause = _root(error)
    response = getattr(cause, "response", None)
    reason, after = _reason(cause), f"nothing was published in {repo_id}"
    again = f"{_outcome(repo_id, doing)}, run this again to go on."
    if response is None:
        if type(cause).__name__ == "XetAuthenticationError":
            return f"The Hub's storage refused the token ({reason}); {after}, make one that may write at {TOKENS_URL}."
        # The Xet client words some failures of its transfer as a plain RuntimeError.
        if not _is_network(cause) and not isinstance(cause, RuntimeError):
            return None
        return f"The connection to the Hub failed while {doing} ({reason}); {again}"
    status = response.status_code
    if status in (402, 403, 413, 507) and any(word in reason.lower() for word in QUOTA_WORDS):
        elsewhere = "free space or choose another --repo-id."
        return f"The storage quota does not allow this upload to {repo_id} ({reason}); {after}, {elsewhere}"
    if status == 401:
        return f"The Hub refused the token ({reason}); {after}, make one that is valid and may write at {TOKENS_URL}."
    if status == 403:
        advice = "ask for write access or choose another --repo-id."
        return f"This token may not write to {repo_id} ({reason}); {after}, {advice}"
    if status in (409, 412):
        return f"Somebody else changed {repo_id} in the meantime ({reason}); {after}, run this again to go on."
    if status == 429:
        wait = response.headers.get("Retry-After")
        pause = f"wait {wait} seconds" if wait else "wait a while"
        return f"The Hub limits the rate of requests ({reason}); {after}, {pause} and run this again to go on."
    return f"The Hub answered {status} while {doing} ({reason}); {again}"


def _outcome(repo_id: str, doing: str) -> str:
    """What is published after a failure that was no refusal: the answer to a commit may be what was lost."""
    return f"{'all of it or nothing is' if doing == UPLOADING else 'nothing was'} published in {repo_id}"


def _root(error: BaseException) -> BaseException:
    """The client wraps what fails in a thread; the error of the Hub or the network is among the causes."""
    seen: BaseException | None = error
    while seen is not None:
        if getattr(seen, "response", None) is not None or _is_network(seen):
            return seen
        seen = seen.__cause__ or seen.__context__
    return error


def _is_network(error: BaseException) -> bool:
    """Whether this is a failure of the transport. The client's HTTP library differs between its versions."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    http_error = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
    return isinstance(
        error, (http_error, ConnectionError, TimeoutError, LocalEntryNotFoundError, OfflineModeIsEnabled)
    )


def _reason(error: BaseException) -> str:
    """What the server said, or the first line of what the client says."""
    server = getattr(error, "server_message", None)
    text = server or next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return " ".join(str(text).split()).rstrip(".")
