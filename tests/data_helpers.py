"""What the tests of `dflash-hf data` share: a tiny target on disk, prompts, running the command, a chat server.

The server is a real one: HTTP, OpenAI's chat API, the tiny target behind it.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from dflash_hf.training import data
from evaluation_helpers import tiny_tokenizer
from helpers import tiny_target

EOS = 7
TEXTS = [" ".join(f"w{8 + (3 * i + j) % 50}" for j in range(1 + i % 5)) for i in range(40)]


def chat_target(**overrides: Any) -> Any:
    """A tiny float64 target of which some greedy answers end early and some do not."""
    target = tiny_target("llama", **overrides)
    target.generation_config.eos_token_id = EOS
    return target


def save_chat_target(folder: Path) -> str:
    chat_target().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    data.add_parser(parser.add_subparsers())
    return parser.parse_args(["data", *given])


def command(source: str, target: str, output: Path, *more: str) -> list[str]:
    """Arguments of a small run: float64, 20 new tokens, shards of 4 rows, loops kept."""
    small = [
        "--dtype",
        "float64",
        "--max-new-tokens",
        "20",
        "--shard-size",
        "4",
        "--batch-size",
        "3",
        "--loop-repeats",
        "0",
    ]
    return [source, "--target", target, "--output", str(output), *small, *more]


def run_data(source: str, target: str, output: Path, *more: str) -> None:
    assert data.run(arguments(*command(source, target, output, *more))) == 0


def read_output(folder: Path) -> list[dict[str, Any]]:
    """All rows of all shards, in the shards' order."""
    return [row for path in sorted(folder.glob("shard-*.parquet")) for row in pq.read_table(path).to_pylist()]


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def failures_of(folder: Path) -> dict[int, str]:
    lines = [line for path in sorted((folder / "failures").glob("*")) for line in path.read_text().splitlines()]
    return {entry["row"]: entry["reason"] for entry in map(json.loads, lines)}


def plain_answer(target: Any, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """What plain greedy `generate` of one prompt gives."""
    ids = torch.tensor([list(prompt)])
    out = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


@dataclass
class ChatServer:
    """What a test may set, and what it sees."""

    gives_ids: bool = True
    known_fields: frozenset[str] = frozenset({"return_token_ids", "chat_template_kwargs"})
    models: tuple[str, ...] = ("tiny",)
    template_suffix: tuple[int, ...] = ()
    refuse: Callable[[dict[str, Any]], int] = lambda request: 0  # an HTTP status, or 0
    hold: threading.Barrier | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    most_at_once: int = 0
    url: str = ""


@contextmanager
def chat_server(settings: ChatServer) -> Iterator[ChatServer]:
    """Serve the tiny target on a free port."""
    target, tokenizer = chat_target(), tiny_tokenizer()
    lock, generating = threading.Lock(), threading.Lock()
    at_once = 0

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        kwargs = request.get("chat_template_kwargs", {})
        prompt = tokenizer.apply_chat_template(
            request["messages"], add_generation_prompt=True, return_dict=True, **kwargs
        )["input_ids"] + list(settings.template_suffix)
        with generating:
            ids = plain_answer(target, prompt, request["max_tokens"])
        ended = ids[-1] == EOS
        text = tokenizer.decode(ids[:-1] if ended else ids)
        choice = {"index": 0, "finish_reason": "stop" if ended else "length"}
        choice["message"] = {"role": "assistant", "content": text}
        body: dict[str, Any] = {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": "tiny",
            "choices": [choice],
        }
        if settings.gives_ids and request.get("return_token_ids"):
            choice["token_ids"], body["prompt_token_ids"] = ids, prompt
        return body

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def reply(self, status: int, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            self.reply(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in settings.models]})

        def do_POST(self) -> None:
            nonlocal at_once
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            standard = {"model", "messages", "temperature", "top_p", "max_tokens", "seed"}
            with lock:
                settings.requests.append(request)
                at_once += 1
                settings.most_at_once = max(settings.most_at_once, at_once)
            if settings.hold is not None:
                settings.hold.wait(timeout=20)
            status = 422 if request.keys() - standard - settings.known_fields else settings.refuse(request)
            body = {"error": {"message": f"refused with {status}"}} if status else answer(request)
            with lock:  # before the reply, which sets the client free to ask again
                at_once -= 1
            self.reply(status or 200, body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    settings.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield settings
    finally:
        server.shutdown()
        server.server_close()
