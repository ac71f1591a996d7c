"""Answers from an OpenAI-compatible server (vLLM, SGLang, `transformers serve`): the path for more than one machine.

The exact token ids matter, and a chat server speaks text. A server that returns token ids (vLLM's `return_token_ids`)
is taken at its word, and its prompt must be the one that the target's chat template gives here. From any other the
text is tokenised once, the tokens must decode to that very text, and the target's end-of-sequence token is added where
the server says that the target ended. A row that fails is set aside with the reason; a server that stops answering
ends the run, which can then be continued.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from .prompts import Failure, Prompt
from .responses import Progress, Response, Sampling, finish

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ServerResponder:
    """Answers over HTTP with the `openai` client, at most `concurrency` requests at a time.

    Args:
        base_url: The server's, ending in `/v1`.
        tokenizer: The target's.
        sampling: How answers are drawn.
        template_kwargs: Arguments of the chat template, sent with each request.
        model: Its name on the server; the only one it serves where None.
        eos_ids: Tokens that end an answer.
        extra: More fields of each request, beyond OpenAI's own; never left out.
        retries: Of a request that fails in transport or by the server's fault.
        timeout: Of one request, in seconds.
        progress: Told of every answer.

    Raises:
        ValueError: If the `openai` package is missing, the server does not answer, or serves several models or none.
    """

    def __init__(
        self,
        base_url: str,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        template_kwargs: dict[str, Any],
        *,
        eos_ids: Sequence[int],
        model: str | None = None,
        concurrency: int = 32,
        extra: dict[str, Any] | None = None,
        retries: int = 4,
        timeout: float = 900.0,
        progress: Progress = lambda rows, tokens: None,
    ) -> None:
        try:
            from openai import OpenAI
        except ModuleNotFoundError as error:
            raise ValueError("--server needs the package 'openai': run `pip install openai`") from error
        # A server of one's own takes any key, and the client insists on one.
        key = os.environ.get("OPENAI_API_KEY", "none")
        self.base_url = base_url
        self.client = OpenAI(base_url=base_url, api_key=key, max_retries=retries, timeout=timeout)
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.template_kwargs = template_kwargs
        self.eos_ids = list(eos_ids)
        self.extra = extra or {}
        self.model = model if model is not None else self._only_model()
        self.pool = ThreadPoolExecutor(concurrency)
        self.progress = progress
        # What goes beyond OpenAI's own fields, and less of it for a server that refuses; what works stays.
        kwargs: dict[str, Any] = {"chat_template_kwargs": template_kwargs} if template_kwargs else {}
        self._extras: list[dict[str, Any]] = [{"return_token_ids": True} | kwargs, kwargs, {}]

    def _only_model(self) -> str:
        from openai import OpenAIError

        try:
            served = [entry.id for entry in self.client.models.list().data]
        except OpenAIError as error:
            raise ValueError(
                f"the server at {self.base_url} does not list its models ({error}): is it running?"
            ) from error
        if len(served) != 1:
            raise ValueError(f"the server at {self.base_url} serves {served}: choose one with --server-model")
        return served[0]

    def start(self, prompts: Sequence[Prompt], seed: int) -> Callable[[], list[Response | Failure]]:
        futures = [self.pool.submit(self._answer, prompt, seed) for prompt in prompts]
        return lambda: [future.result() for future in futures]

    def close(self) -> None:
        """Drop the requests that wait; those under way end by themselves."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.client.close()

    def _answer(self, prompt: Prompt, seed: int) -> Response | Failure:
        import openai

        try:
            answer = self._checked(prompt, self._request(prompt, seed))
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            answer = Failure(prompt.row, f"{type(error).__name__}: {error}")
        except openai.InternalServerError as error:
            # A prompt that breaks the server must not stop the run for ever, and a broken server must not cost a row.
            self._check_that_it_answers()
            answer = Failure(prompt.row, f"{type(error).__name__}: {error}")
        except openai.OpenAIError as error:
            raise self._gone(error) from error
        self.progress(1, len(answer.token_ids) if isinstance(answer, Response) else 0)
        return answer

    def _check_that_it_answers(self) -> None:
        import openai

        try:
            hello = [{"role": "user", "content": "Hello"}]
            self.client.chat.completions.create(model=self.model, messages=hello, max_tokens=1)  # type: ignore[arg-type]
        except openai.OpenAIError as error:
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> ValueError:
        return ValueError(
            f"the server at {self.base_url} stopped answering ({type(error).__name__}: {error}): start it again and "
            "repeat the command, which continues where this run ended"
        )

    def _request(self, prompt: Prompt, seed: int) -> Any:
        """The completion, with as many of the extra fields as the server takes; what works once is kept."""
        import openai

        tried = self._extras
        for place, extra in enumerate(tried):
            try:
                completion = self._create(prompt, seed, extra)
            except (openai.BadRequestError, openai.UnprocessableEntityError):
                if place + 1 == len(tried):
                    raise
                continue
            if len(tried) > 1:
                self._check_left_out(prompt, extra)
                self._extras = [extra]
            return completion

    def _check_left_out(self, prompt: Prompt, extra: dict[str, Any]) -> None:
        """Refuse to go on without template arguments that make a difference."""
        if "chat_template_kwargs" in extra or not self.template_kwargs:
            return
        plain = self.tokenizer.apply_chat_template(
            prompt.messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        if list(plain) != prompt.token_ids:
            raise ValueError(
                f"the server at {self.base_url} refuses chat_template_kwargs={self.template_kwargs}, and the target's "
                "template needs them: use another server, or --thinking unset"
            )

    def _create(self, prompt: Prompt, seed: int, extra: dict[str, Any]) -> Any:
        top_k = {"top_k": self.sampling.top_k} if self.sampling.temperature > 0 and self.sampling.top_k else {}
        return self.client.chat.completions.create(
            model=self.model,
            messages=prompt.messages,  # type: ignore[arg-type]  # the client's types tell the roles apart
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            max_tokens=self.sampling.max_new_tokens,
            seed=(seed * 1_000_003 + prompt.row) % 2**31,
            extra_body=top_k | extra | self.extra,
        )

    def _checked(self, prompt: Prompt, completion: Any) -> Response | Failure:
        if not completion.choices:
            return Failure(prompt.row, "the server gave no choice")
        given = getattr(completion, "prompt_token_ids", None)
        if given is not None and list(given) != prompt.token_ids:
            return Failure(
                prompt.row,
                f"the server's prompt ({len(given)} tokens) is not what the target's chat template gives "
                f"({len(prompt.token_ids)} tokens): server and --target use different templates",
            )
        choice = completion.choices[0]
        ids = getattr(choice, "token_ids", None)
        if ids is None:
            ids = self.tokenizer.encode(choice.message.content or "", add_special_tokens=False)
            if self.tokenizer.decode(ids) != (choice.message.content or ""):
                return Failure(
                    prompt.row, "the answer's text does not survive tokenisation; no token ids were returned"
                )
        ids = list(ids)
        if choice.finish_reason == "stop" and not any(token in self.eos_ids for token in ids):
            ids += self.eos_ids[:1]  # it ended the answer, and was not part of what came back
        return finish(prompt, ids, self.eos_ids, self.sampling)
