"""One vLLM server: its routes, what they are sent, and what of their answers is believed.

Written for vLLM 0.32 and its OpenAI-compatible routes. Every answer is checked before use; what is
not as it should be raises RequestError.

- `/v1/completions` takes the whole context as token ids and returns token ids. All sampling
  parameters are sent, because a server takes missing ones from the model's generation_config.json
  (top-p, repetition penalty). No `seed` is sent: with a seed, vLLM's build for CPUs stops at
  prompts that are read in pieces.
- `/v1/load_lora_adapter` makes an adapter a model with its own name.
- `/collective_rpc` with `reload_weights` replaces all weights by those of a folder, and
  `/update_weight_version` labels them. A restarted server has another label. So the label says
  whether the server still has the weights that it was given.
"""

from __future__ import annotations

import math
import ssl
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from pydantic import AliasPath, BaseModel, Field, TypeAdapter

from ragen_apo.files import parse_record
from ragen_apo.plural import counted
from ragen_apo.policy.engine import Response
from ragen_apo.policy.http_exchange import http_client
from ragen_apo.policy.inference_server.wire import Request, RequestError
from ragen_apo.policy.sampling import StopRule
from ragen_apo.policy.tokenizer import CLOSE_ANSWER

_MAX_CONNECT_SECONDS = 10.0
MAX_GREETING_SECONDS = 30.0
"""A server that does not say in this time what it is and has hangs; others need not wait for it."""
_ROUNDING = 1e-3
"""What a log-probability of 0 may be above it."""


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself."""

    version: str
    model: str
    """The name under which it serves the model that it was started with."""
    folder: str
    """The model folder or hub name that it was started with."""
    max_context_tokens: int
    adapters: tuple[str, ...] = ()
    """The names of those that are loaded."""


@dataclass(frozen=True)
class Wanted:
    """A response that is asked for."""

    model: str
    """The name of the model, or of an adapter."""
    context: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    rule: StopRule | None
    """When it is over; None for the token limit alone."""
    salt: str
    """Prefix caches are shared among requests of one salt."""


class _Choice(BaseModel):
    token_ids: list[int]
    prompt_token_ids: list[int]
    logprobs: list[float] = Field(validation_alias=AliasPath("logprobs", "token_logprobs"))
    finish_reason: str | None = None


class _Completion(BaseModel):
    choices: list[_Choice]


class _Model(BaseModel):
    id: str
    root: str | None = None
    max_model_len: int | None = None
    parent: str | None = None


class _Models(BaseModel):
    data: list[_Model]


class _Version(BaseModel):
    version: str


class _Label(BaseModel):
    weight_version: str


class _Success(BaseModel):
    success: bool


class _Info(BaseModel):
    device: str = Field(validation_alias=AliasPath("vllm_config", "device_config", "device"))


_Answer = TypeVar("_Answer", bound=BaseModel)


class VllmServer:
    """A server at an address; every method is one request and raises RequestError."""

    def __init__(self, base_url: str, *, timeout_seconds: float, key: str | None = None) -> None:
        self.base_url = base_url
        self.timeout_seconds, self._key = timeout_seconds, key
        # Proxies of the surroundings are not used.
        self._http = http_client(
            seconds=timeout_seconds,
            connect_seconds=_MAX_CONNECT_SECONDS,
            key=key,
            base_url=self.base_url,
            trust_env=False,
            verify=ssl.create_default_context(),
        )
        self._requests = weakref.WeakSet[Request]()
        self._is_broken_off = False
        self._lock = threading.Lock()
        """Of these two."""

    def request(
        self, path: str, body: Mapping[str, Any] | None = None, *, within: float | None = None
    ) -> Request:
        """A request that is not sent yet; `within` seconds at most, if that is less than usual."""
        seconds = min(self.timeout_seconds, within or self.timeout_seconds)
        request = Request(self._http, path, timeout_seconds=seconds, body=body, key=self._key)
        with self._lock:
            self._requests.add(request)
            if self._is_broken_off:
                request.break_off()
        return request

    def break_off(self) -> None:
        """Ends all requests, and those to come, from another thread; they raise RequestError."""
        with self._lock:
            self._is_broken_off = True
            for request in self._requests:
                request.break_off()

    def facts(self) -> ServerFacts:
        """Version, model, longest context and adapters."""
        version = self._ask("/version", _Version, within=MAX_GREETING_SECONDS).version
        models = self._ask("/v1/models", _Models, within=MAX_GREETING_SECONDS).data
        bases = [each for each in models if each.parent is None and each.max_model_len]
        if not bases:
            raise RequestError("/v1/models names no model with a longest context")
        return ServerFacts(
            version=version,
            model=bases[0].id,
            folder=bases[0].root or "",
            max_context_tokens=bases[0].max_model_len or 0,
            adapters=tuple(each.id for each in models if each.parent is not None),
        )

    def runs_on_cpu(self) -> bool:
        """Whether it is vLLM's build for CPUs; takes some seconds at first."""
        return self._ask("/server_info?config_format=json", _Info).device == "cpu"

    def label(self) -> str:
        """What the present weights were labelled with."""
        found = self._ask("/weight_info", _Label, within=MAX_GREETING_SECONDS)
        return found.weight_version

    def set_label(self, label: str) -> None:
        self._ask("/update_weight_version", _Success, {"new_version": label})

    def load_weights(self, folder: Path) -> None:
        """Replaces all weights by those of a model folder of the same architecture."""
        arguments = {"weights_path": str(folder)}
        try:
            self.request(
                "/collective_rpc", {"method": "reload_weights", "kwargs": arguments}
            ).send()
        except RequestError as failure:
            if failure.status != httpx2.codes.INTERNAL_SERVER_ERROR:
                raise
            raise RequestError(
                str(failure),
                advice="Its model may have other shapes than the policy: serve the model of "
                "policy.path. Start the server again in any case: after weights that did not fit "
                "it takes none any more",
                status=failure.status,
            ) from failure
        if not self._ask("/reset_prefix_cache", _Success, {}).success:
            raise RequestError(
                "/reset_prefix_cache: the server kept its cache, as it works on other requests",
                advice="Another run uses it too; give each run servers of its own",
            )

    def load_adapter(self, name: str, folder: Path) -> None:
        """Serves the adapter in a PEFT folder under a name that was never used."""
        self.request("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}).send()

    def unload_adapter(self, name: str) -> None:
        self.request("/v1/unload_lora_adapter", {"lora_name": name}).send()

    def completion(self, wanted: Wanted) -> Request:
        """The request for a response; `read_completion` reads its answer."""
        body: dict[str, Any] = {
            "model": wanted.model,
            "prompt": list(wanted.context),
            "max_tokens": wanted.max_new_tokens,
            "temperature": wanted.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "n": 1,
            "stream": False,
            "logprobs": 0,
            "return_token_ids": True,
            "cache_salt": wanted.salt,
            "add_special_tokens": False,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            # Only our own end tokens end a response, and they are part of it.
            "ignore_eos": True,
            "stop_token_ids": sorted(wanted.rule.end_ids) if wanted.rule else [],
        }
        if wanted.rule and wanted.rule.reads_text:
            body |= {"stop": [CLOSE_ANSWER], "include_stop_str_in_output": True}
        return self.request("/v1/completions", body)

    def _ask(
        self,
        path: str,
        kind: type[_Answer],
        body: Mapping[str, Any] | None = None,
        *,
        within: float | None = None,
    ) -> _Answer:
        return _read(path, kind, self.request(path, body, within=within).send())


def _read(path: str, kind: type[_Answer], answer: Any) -> _Answer:
    """The record in an answer; RequestError where it is none."""
    try:
        return parse_record(TypeAdapter(kind), answer)
    except ValueError as error:
        raise RequestError(f"{path}: the answer is not what vLLM answers ({error})") from error


def read_completion(answer: Any, wanted: Wanted, *, vocabulary_size: int) -> Response:
    """The response in an answer of `/v1/completions`.

    What a server sampled past the end of a response, by our rule, is cut off: those tokens were
    sampled after it and do not change it. Raises RequestError for anything else than finite
    log-probabilities of known tokens, up to that end or the token limit, after the context that was
    sent.
    """
    path = "/v1/completions"
    choices = _read(path, _Completion, answer).choices
    if len(choices) != 1:
        raise RequestError(f"{path} answered {len(choices)} choices, expected 1")
    token_ids, logprobs = choices[0].token_ids, choices[0].logprobs
    if problem := _problem(choices[0], wanted, vocabulary_size=vocabulary_size):
        raise RequestError(f"{path} answered {problem}")
    length = _length(token_ids, wanted.rule)
    if length is None and len(token_ids) < wanted.max_new_tokens:
        raise RequestError(
            f"{path} ended a response after {len(token_ids)} of "
            f"{counted(wanted.max_new_tokens, 'token')} for a reason of its own "
            f"({choices[0].finish_reason})"
        )
    kept = slice(0, length)
    return Response(tuple(token_ids[kept]), tuple(logprobs[kept]), stopped=length is not None)


def _problem(choice: _Choice, wanted: Wanted, *, vocabulary_size: int) -> str | None:
    """What cannot be right about the numbers of an answer."""
    token_ids, logprobs = choice.token_ids, choice.logprobs
    if tuple(choice.prompt_token_ids) != wanted.context:
        return "to another context than it was sent"
    if len(token_ids) != len(logprobs):
        return f"{len(token_ids)} token_ids and {len(logprobs)} token_logprobs"
    if not token_ids or len(token_ids) > wanted.max_new_tokens:
        return f"{len(token_ids)} tokens, expected 1 to {wanted.max_new_tokens}"
    if unknown := [token for token in token_ids if not 0 <= token < vocabulary_size]:
        return f"token {unknown[0]}, and the policy has {vocabulary_size}"
    if not all(math.isfinite(logprob) and logprob < _ROUNDING for logprob in logprobs):
        return "a log-probability that is not finite or above 0"
    return None


def _length(token_ids: Sequence[int], rule: StopRule | None) -> int | None:
    """After how many tokens the response is over; None if it is not."""
    if rule is None:
        return None
    lengths = range(1, len(token_ids) + 1)
    return next((length for length in lengths if rule.is_over(token_ids[:length])), None)
