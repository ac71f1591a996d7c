"""Answers from an OpenAI-compatible server over real HTTP: exact ids, bounded requests, refusals, its death."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_helpers import (
    EOS,
    TEXTS,
    ChatServer,
    chat_server,
    failures_of,
    manifest_of,
    read_output,
    run_data,
    save_chat_target,
    write_jsonl,
)
from dflash_hf.training import server
from dflash_hf.training.prompts import Failure, Prompt
from dflash_hf.training.responses import Response, Sampling
from evaluation_helpers import tiny_tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_chat_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": text} for text in TEXTS[:10]])


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client waits up to 8 s between two attempts; a test does not."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.02)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(lambda: ChatServer(), id="server that returns token ids"),
        pytest.param(lambda: ChatServer(gives_ids=False), id="server that ignores the wish for them"),
        pytest.param(
            lambda: ChatServer(gives_ids=False, known_fields=frozenset({"chat_template_kwargs"})),
            id="server that refuses unknown fields",
        ),
    ],
)
def test_server_and_local_target_give_the_same_dataset(
    settings: Callable[[], ChatServer], prompts: str, target: str, tmp_path: Path
) -> None:
    run_data(prompts, target, tmp_path / "local")
    with chat_server(settings()) as serving:
        run_data(prompts, target, tmp_path / "served", "--server", serving.url)
    assert read_output(tmp_path / "served") == read_output(tmp_path / "local")
    assert failures_of(tmp_path / "served") == failures_of(tmp_path / "local")
    assert {row["finish_reason"] for row in read_output(tmp_path / "served")} == {"stop", "length"}
    assert manifest_of(tmp_path / "served")["generation"] == manifest_of(tmp_path / "local")["generation"]


def test_run_begun_locally_continues_on_a_server(prompts: str, target: str, tmp_path: Path) -> None:
    run_data(prompts, target, tmp_path / "out")
    expected = read_output(tmp_path / "out")
    (tmp_path / "out" / "shard-00001.parquet").unlink()
    with chat_server(ChatServer()) as serving:
        run_data(prompts, target, tmp_path / "out", "--server", serving.url)
    assert read_output(tmp_path / "out") == expected
    assert {request["messages"][0]["content"] for request in serving.requests} == set(TEXTS[4:8])


def test_requests_at_a_time_reach_the_bound_and_stay_within(prompts: str, target: str, tmp_path: Path) -> None:
    # Every request waits at the barrier for two others: fewer at a time would time out, more are counted.
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": text} for text in TEXTS[:12]])
    with chat_server(ChatServer(hold=threading.Barrier(3))) as serving:
        run_data(source, target, tmp_path / "out", "--server", serving.url, "--concurrency", "3")
    assert serving.most_at_once == 3
    assert len(serving.requests) == 12


def test_request_says_everything_about_sampling(target: str, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "w8 w20"}])
    more = ["--temperature", "0.7", "--top-p", "0.9", "--top-k", "5", "--server-extra", '{"y": 1}']
    known = frozenset({"return_token_ids", "chat_template_kwargs", "top_k", "y"})
    with chat_server(ChatServer(known_fields=known, models=("a", "b"))) as serving:
        run_data(source, target, tmp_path / "out", "--server", serving.url, "--server-model", "b", *more)
    (request,) = serving.requests
    assert {name: request[name] for name in ("temperature", "top_p", "top_k", "max_tokens", "model", "y")} == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "max_tokens": 20,
        "model": "b",
        "y": 1,
    }
    assert request["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize("row", [0, 3])
def test_row_that_the_server_cannot_answer_is_set_aside_alone(
    status: int, row: int, prompts: str, target: str, tmp_path: Path
) -> None:
    def refuse(request: dict[str, Any]) -> int:
        return status if request["messages"][0]["content"] == TEXTS[row] else 0

    run_data(prompts, target, tmp_path / "local")
    with chat_server(ChatServer(refuse=refuse)) as serving:
        run_data(prompts, target, tmp_path / "out", "--server", serving.url, "--concurrency", "1")
    assert f"refused with {status}" in failures_of(tmp_path / "out")[row]
    expected = [answer for answer in read_output(tmp_path / "local") if answer["row"] != row]
    assert read_output(tmp_path / "out") == expected
    # One refusal does not talk the client out of asking for token ids.
    others = [request for request in serving.requests if request["messages"][0]["content"] in TEXTS[4:]]
    assert others and all(request.get("return_token_ids") for request in others)


def test_busy_server_is_asked_again(prompts: str, target: str, tmp_path: Path) -> None:
    run_data(prompts, target, tmp_path / "local")
    seen: list[int] = []

    def refuse(request: dict[str, Any]) -> int:
        seen.append(1)
        return 503 if len(seen) % 2 else 0

    with chat_server(ChatServer(refuse=refuse)) as serving:
        run_data(prompts, target, tmp_path / "out", "--server", serving.url, "--concurrency", "1")
    assert read_output(tmp_path / "out") == read_output(tmp_path / "local")
    assert len(serving.requests) > 10


@pytest.mark.parametrize("status", [401, 404, 429, 503])
def test_server_that_stops_answering_ends_the_run_and_loses_no_row(status: int, target: str, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": text} for text in TEXTS])
    run_data(source, target, tmp_path / "local")
    seen: list[int] = []

    def refuse(request: dict[str, Any]) -> int:
        seen.append(1)
        return status if len(seen) > 12 else 0

    with (
        chat_server(ChatServer(refuse=refuse)) as serving,
        pytest.raises(ValueError, match=r"stopped answering .* continues"),
    ):
        run_data(source, target, tmp_path / "out", "--server", serving.url, "--concurrency", "2")
    assert 0 < len(read_output(tmp_path / "out")) < len(read_output(tmp_path / "local"))
    with chat_server(ChatServer()) as serving:
        run_data(source, target, tmp_path / "out", "--server", serving.url)
    assert read_output(tmp_path / "out") == read_output(tmp_path / "local")
    assert failures_of(tmp_path / "out") == failures_of(tmp_path / "local")


def test_server_that_is_not_there_is_named(prompts: str, target: str, tmp_path: Path) -> None:
    with chat_server(ChatServer()) as serving:
        gone = serving.url
    with pytest.raises(ValueError, match=f"{gone} does not list its models .* is it running"):
        run_data(prompts, target, tmp_path / "out", "--server", gone)


def test_choice_among_several_models_is_left_to_the_user(prompts: str, target: str, tmp_path: Path) -> None:
    with chat_server(ChatServer(models=("a", "b"))) as serving, pytest.raises(ValueError, match="--server-model"):
        run_data(prompts, target, tmp_path / "out", "--server", serving.url)


def test_other_template_on_the_server_is_noticed(target: str, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "w8 w20"}])
    with chat_server(ChatServer(template_suffix=(33,))) as serving:
        run_data(source, target, tmp_path / "out", "--server", serving.url)
    assert "different templates" in failures_of(tmp_path / "out")[0]


def test_template_arguments_that_a_server_refuses_are_left_out_only_if_they_change_nothing(
    target: str, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "w8 w20"}])
    strict = frozenset[str]()
    with chat_server(ChatServer(gives_ids=False, known_fields=strict)) as serving:
        with pytest.raises(ValueError, match=r"refuses chat_template_kwargs=.*--thinking unset"):
            run_data(source, target, tmp_path / "out", "--server", serving.url)
        more = ["--thinking", "unset", "--chat-template-kwargs", '{"unused": 1}']
        run_data(source, target, tmp_path / "unset", "--server", serving.url, *more)
    run_data(source, target, tmp_path / "local", *more)
    assert read_output(tmp_path / "unset") == read_output(tmp_path / "local")


class Completion:
    """What a client returns, without a server."""

    def __init__(self, text: str, finish_reason: str = "length", **fields: Any) -> None:
        message = type("Message", (), {"content": text})()
        self.choices = [type("Choice", (), {"message": message, "finish_reason": finish_reason, **fields})()]


def checked(completion: Any) -> Response | Failure:
    sampling = Sampling(max_new_tokens=8, loop_repeats=0)
    responder = server.ServerResponder(
        "http://127.0.0.1:1/v1", tiny_tokenizer(), sampling, {}, eos_ids=[EOS, 6], model="tiny"
    )
    return responder._checked(Prompt(4, [], [9]), completion)


def test_text_that_does_not_survive_tokenisation_is_set_aside() -> None:
    answer = checked(Completion("w8 hello"))
    assert isinstance(answer, Failure) and "does not survive tokenisation" in answer.reason


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (Completion("w8 w9", "stop"), [8, 9, EOS]),
        (Completion("w8 w9", "length"), [8, 9]),
        (Completion("w8 w9", "stop", token_ids=[8, 9]), [8, 9, EOS]),
        (Completion("w8 w9", "stop", token_ids=[8, 9, 6]), [8, 9, 6]),
    ],
)
def test_end_token_is_added_where_the_server_left_it_out(completion: Completion, expected: list[int]) -> None:
    answer = checked(completion)
    assert isinstance(answer, Response) and answer.token_ids == expected
