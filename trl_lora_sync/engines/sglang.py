"""What a stock SGLang server accepts, answers and forgets (0.5.11 to 0.5.23).

Samples through `/generate` only: the OpenAI routes serve the base model, with HTTP 200, for an adapter that is named
without a colon. Three rules keep the server alive and unblocked. An adapter's weights are copied at its first batch,
and a misfit kills the scheduler there, so every load is followed by one token, while nothing else waits for it.
Samples are sent one by one (`n=1`), because up to 0.5.21 `n>1` leaves a reference behind that no unload ever sees
released. And an unload is never sent while generation is paused.
"""

import logging
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from packaging.version import InvalidVersion, Version

from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.adapter.store import StoredAdapter
from trl_lora_sync.engines.base import Capabilities, Completion, Deadline, PromptGroup, Sampling
from trl_lora_sync.engines.http import APIKey, HTTPClient, is_unreachable, json_object, retrying, server_words
from trl_lora_sync.engines.sglang_payload import LoadBody, TensorPayload
from trl_lora_sync.errors import (
    AdapterLostError,
    AdapterNotVisibleError,
    AdapterRejectedError,
    DeadlineExceededError,
    GenerationError,
    LoRASyncError,
    ServerAuthError,
    ServerError,
    ServerSetupError,
    ServerUnreachableError,
)

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "SGLANG_API_KEY"
ADMIN_KEY_VARIABLE = "SGLANG_ADMIN_API_KEY"
OLDEST = Version("0.5.11")
_TENSORS_PER_RANK_FROM = Version("0.5.17")
_CONCURRENT_REQUESTS = 64
_TRANSIENT_STATUSES = frozenset({502, 503, 504})
_GENERATION_RETRY_S = 15.0
_TENSOR_PATH = "__tensor__"  # what SGLang lists as the path of an adapter that came as tensors
_POLL_S = 0.05
_WARM_UP_PROMPT = [0, 1, 2, 3]
_ONE_TOKEN = Sampling(
    temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, max_tokens=1, logprobs=None
)


class SGLangEngine:
    """One SGLang server; see the `Engine` protocol for the contract.

    Args:
        base_url: without a trailing slash.
        is_local: whether the server runs on this host.
    """

    def __init__(self, base_url: str, *, is_local: bool) -> None:
        self.base_url = base_url
        self._http = HTTPClient(
            base_url, api_key=APIKey(API_KEY_VARIABLE), is_local=is_local, max_connections=_CONCURRENT_REQUESTS
        )
        self._admin_key = APIKey(ADMIN_KEY_VARIABLE)
        self._capabilities: Capabilities | None = None
        self._version = OLDEST
        self._tp_size = 1
        self._has_memory_saver = False
        self._payload = TensorPayload()
        self._stuck_unload: str | None = None
        self._paused = False

    @property
    def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            raise LoRASyncError(f"connect() has not been called for {self.base_url}.")
        return self._capabilities

    # Connecting

    def connect(self, deadline: Deadline) -> Capabilities:
        model = json_object(self._get("/model_info", deadline), ServerSetupError)
        server = json_object(self._get("/server_info", deadline), ServerSetupError)
        self._check_setup(server)
        base_model = str(server.get("served_model_name") or model.get("model_path"))
        self._tp_size = int(server.get("tp_size") or 1)
        self._capabilities = Capabilities(
            engine="sglang",
            version=str(server.get("version", "unknown")),
            base_model=base_model,
            base_root=str(model.get("model_path", base_model)),
            max_model_len=server.get("context_length"),
            logprobs_mode=self._logprobs_mode(deadline),
            max_lora_rank=server.get("max_lora_rank"),
            target_modules=_target_modules(server.get("lora_target_modules")),
            needs_fused_siblings=True,
            survives_misfit=False,
            takes_tensors=True,
        )
        self._has_memory_saver = bool(server.get("enable_memory_saver"))
        return self._capabilities

    def _check_setup(self, server: dict[str, Any]) -> None:
        version = str(server.get("version", "unknown"))
        try:
            self._version = Version(version)
        except InvalidVersion:
            logger.warning("%s reports the SGLang version %r; %s is assumed.", self.base_url, version, OLDEST)
        if self._version < OLDEST:
            raise self._setup_error(f"runs SGLang {version}", f"SGLang {OLDEST} or later is needed", "Upgrade it")
        if not server.get("enable_lora"):
            raise self._setup_error(
                "was started without LoRA support",
                "adapters are loaded while it runs",
                "Restart it with --enable-lora --max-lora-rank R --lora-target-modules ...",
            )
        if int(server.get("dp_size") or 1) > 1:
            raise self._setup_error(
                f"was started with --dp-size {server['dp_size']}",
                "SGLang loads adapters into one replica only",
                "Start independent servers with --dp-size 1, one URL each",
            )
        if int(server.get("tokenizer_worker_num") or 1) > 1:
            raise self._setup_error(
                f"was started with --tokenizer-worker-num {server['tokenizer_worker_num']}",
                "each worker keeps a list of adapters of its own, so requests to the others would fail",
                "Restart it with --tokenizer-worker-num 1",
            )

    def _setup_error(self, seen: str, why: str, fix: str) -> ServerSetupError:
        return ServerSetupError(f"The SGLang server at {self.base_url} {seen}: {why}. {fix}.")

    def _logprobs_mode(self, deadline: Deadline) -> str:
        """SGLang scales by the temperature unless SGLANG_RETURN_ORIGINAL_LOGPROB is set, which no route reports."""
        sharp, flat = (self._spread(temperature, deadline) for temperature in (0.5, 2.0))
        if sharp is None or flat is None or sharp < 1e-3:
            return "unknown"
        return "processed_logprobs" if flat < 0.5 * sharp else "raw_logprobs"

    def _spread(self, temperature: float, deadline: Deadline) -> float | None:
        body = {
            "input_ids": _WARM_UP_PROMPT,
            "sampling_params": {"temperature": temperature, "top_k": -1, "max_new_tokens": 1},
            "return_logprob": True,
            "top_logprobs_num": 5,
            "stream": False,
        }
        answer = self._sample(body, None, deadline)[0]
        try:
            top = [entry[0] for entry in answer["meta_info"]["output_top_logprobs"][0]]
            return float(max(top) - min(top))
        except (KeyError, IndexError, TypeError):
            return None

    def knows_token(self, token_id: int, deadline: Deadline) -> bool:
        # Not asked: some versions pass an unknown id on to the GPU, which kills the server.
        return True

    def score(self, model: str, prompt_ids: list[int], deadline: Deadline) -> list[float]:
        lora_path = self._lora_path(model)
        body = {
            "input_ids": prompt_ids,
            "sampling_params": {"temperature": 1.0, "top_k": -1, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
            "lora_path": lora_path,
            "stream": False,
        }
        answer = self._sample(body, lora_path, deadline)[0]
        try:
            return [float(entry[0]) for entry in answer["meta_info"]["input_token_logprobs"][1:]]
        except (KeyError, IndexError, TypeError) as error:
            raise GenerationError(f"{self.base_url} scored a prompt without log-probabilities.") from error

    # Adapters

    def load(self, adapter: StoredAdapter, deadline: Deadline) -> None:
        if self._stuck_unload:
            raise AdapterRejectedError(self._stuck_words())
        self._check_fits(adapter)
        for attempt in retrying(deadline, is_unreachable):
            with attempt:
                self._load_once(adapter, deadline)

    def _check_fits(self, adapter: StoredAdapter) -> None:
        served = self.capabilities
        if served.max_lora_rank is not None and adapter.rank > served.max_lora_rank:
            raise self._setup_error(
                f"was started with --max-lora-rank {served.max_lora_rank}",
                f"the adapter has rank {adapter.rank}",
                f"Restart it with --max-lora-rank {adapter.rank}",
            )
        missing = [name for name in adapter.target_modules if not _is_served(name, served.target_modules)]
        if missing:
            raise self._setup_error(
                f"was started without {', '.join(missing)} among its --lora-target-modules",
                "the adapter needs them",
                f"Restart it with --lora-target-modules {' '.join(adapter.target_modules)}",
            )

    def _load_once(self, adapter: StoredAdapter, deadline: Deadline) -> None:
        try:
            if adapter.server_path is not None:
                body = {"lora_name": adapter.name, "lora_path": adapter.server_path, "pinned": False}
                response = self._admin("/load_lora_adapter", deadline, body=body)
            else:
                response = self._load_tensors(adapter, deadline)
        except DeadlineExceededError as error:
            raise deadline.error(
                f"{self.base_url} did not finish loading {adapter.name}. An unload that waits for a request that "
                "never ends blocks every load; if it does not recover, restart the server"
            ) from error
        words = server_words(response)
        if response.status_code != 200 and "already loaded" not in words:
            raise self._load_error(adapter, response.status_code, words)
        expected = adapter.server_path or _TENSOR_PATH
        path = self.loaded(deadline).get(adapter.name)
        if path != expected:
            raise AdapterRejectedError(
                f"{self.base_url} lists the adapter {adapter.name!r} with path {path!r} instead of {expected!r}. Every "
                f"version needs a name of its own; does another process load adapters there? It said: {words!r}"
            )

    def _load_tensors(self, adapter: StoredAdapter, deadline: Deadline) -> httpx.Response:
        if adapter.content is None:
            raise LoRASyncError(f"The adapter {adapter.name!r} has neither a path nor tensors to send.")
        body = self.tensor_body(adapter.name, adapter.content)
        return self._admin("/load_lora_adapter_from_tensors", deadline, content=body)

    def tensor_body(self, adapter_name: str, adapter: CanonicalAdapter) -> LoadBody:
        """The request that carries the tensors to this server, valid until the next one is made."""
        # From 0.5.17 on, a list with one element per tensor-parallel rank takes the place of one string.
        per_rank = self._version >= _TENSORS_PER_RANK_FROM
        return self._payload.body(adapter_name, adapter, per_rank=per_rank, tp_size=self._tp_size)

    def _load_error(self, adapter: StoredAdapter, status: int, words: str) -> ServerError:
        if "No such file" in words or "does not appear to have a file" in words or "adapter_config.json" in words:
            return AdapterNotVisibleError(
                f"{self.base_url} does not find the adapter at {adapter.server_path}. The trainer wrote it to "
                f"{adapter.path}. Let both see one folder with lora_sync_dir and lora_sync_server_dir, or set "
                f'lora_sync_transport="tensors". It said: {words!r}'
            )
        if "LoRA memory pool configuration" in words:
            return self._setup_error(
                "cannot hold this adapter",
                f"it has rank {adapter.rank} and the modules {', '.join(adapter.target_modules)}",
                f"Restart it with --max-lora-rank {adapter.rank} --lora-target-modules "
                f"{' '.join(adapter.target_modules)} (it said: {words!r})",
            )
        return AdapterRejectedError(
            f"{self.base_url} refused to load the adapter {adapter.name!r} (HTTP {status}). It was expected to fit "
            f"the server's base model. It said: {words!r}"
        )

    def warm_up(self, adapter: StoredAdapter, deadline: Deadline) -> None:
        try:
            self.generate(adapter.name, [PromptGroup(prompt=_WARM_UP_PROMPT, count=1)], _ONE_TOKEN, deadline)
        except (ServerUnreachableError, GenerationError) as error:
            raise AdapterRejectedError(
                f"{self.base_url} loaded the adapter {adapter.name!r} but failed at its first token. SGLang dies of "
                "an adapter whose shapes do not fit its base model; look at its log, and serve the model that is "
                f"being trained. {error}"
            ) from error

    def unload(self, adapter_name: str, deadline: Deadline) -> bool:
        if self._paused or self._stuck_unload:
            return False  # it would wait for ever, and block every load meanwhile
        try:
            response = self._admin("/unload_lora_adapter", deadline, body={"lora_name": adapter_name})
        except DeadlineExceededError:
            self._stuck_unload = adapter_name
            logger.error("%s", self._stuck_words())
            return False
        except LoRASyncError as error:
            logger.debug("Unloading %s failed: %s", adapter_name, error)
            return False
        return response.status_code == 200 or "not" in server_words(response)

    def _stuck_words(self) -> str:
        return (
            f"{self.base_url} does not finish unloading {self._stuck_unload}: it waits for requests that it believes "
            "to be running, and loads nothing until then. Requests of other clients with n > 1 cause this up to "
            "SGLang 0.5.21. Restart the server, and the run from its last checkpoint; SGLang 0.5.22 has the fix."
        )

    def loaded(self, deadline: Deadline) -> dict[str, str]:
        content = json_object(self._get("/v1/models", deadline), ServerSetupError)
        models = [model for model in content.get("data", []) if isinstance(model, dict)]
        return {model["id"]: str(model.get("root")) for model in models if model.get("parent")}

    # Pausing and memory

    def pause(self, mode: str, deadline: Deadline) -> None:
        if mode == "drain":
            self._wait_until_idle(deadline)
        self._paused = True  # before the request, whose answer may be lost
        self._control("/pause_generation", {"mode": "abort" if mode == "abort" else "in_place"}, deadline)

    def _wait_until_idle(self, deadline: Deadline) -> None:
        # SGLang has no pause that finishes what runs, so its load is watched until there is none.
        while self._running_requests(deadline):
            deadline.remaining_s()
            time.sleep(_POLL_S)

    def _running_requests(self, deadline: Deadline) -> int:
        loads = json_object(self._get("/v1/loads?include=core", deadline), ServerError).get("loads", [])
        try:
            return sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in loads)
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(f"{self.base_url}/v1/loads does not tell how many requests run.") from error

    def resume(self, deadline: Deadline) -> None:
        self._control("/continue_generation", {}, deadline)
        self._paused = False

    def release_kv_cache(self, deadline: Deadline) -> None:
        if not self._has_memory_saver:
            raise self._setup_error(
                "was started without the memory saver", "its KV cache cannot be released", "Add --enable-memory-saver"
            )
        self._control("/release_memory_occupation", {"tags": ["kv_cache"]}, deadline)

    def restore_kv_cache(self, deadline: Deadline) -> bool:
        self._control("/resume_memory_occupation", {"tags": ["kv_cache"]}, deadline)
        return True  # adapters are in another memory pool

    def _control(self, path: str, body: dict[str, Any], deadline: Deadline) -> None:
        response = self._admin(path, deadline, body=body)
        if response.status_code != 200:
            raise ServerError(
                f"{self.base_url}{path} failed (HTTP {response.status_code}). It said: {server_words(response)!r}"
            )

    # Generation

    def generate(
        self, model: str, groups: Sequence[PromptGroup], sampling: Sampling, deadline: Deadline
    ) -> list[list[Completion]]:
        rows = [(group, sample) for group in groups for sample in range(group.count)]
        size = max(1, math.ceil(len(rows) / _CONCURRENT_REQUESTS))
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        with ThreadPoolExecutor(max_workers=max(1, min(_CONCURRENT_REQUESTS, len(batches)))) as pool:
            answers = pool.map(lambda batch: self._generate_batch(model, batch, sampling, deadline), batches)
            completions = [completion for answer in answers for completion in answer]
        iterator = iter(completions)
        return [[next(iterator) for _ in range(group.count)] for group in groups]

    def _generate_batch(
        self, model: str, rows: Sequence[tuple[PromptGroup, int]], sampling: Sampling, deadline: Deadline
    ) -> list[Completion]:
        prompts = [_token_ids(group) for group, _ in rows]
        lora_path = self._lora_path(model)
        body = {
            "input_ids": prompts,
            "sampling_params": [sampling_params(sampling, sample) for _, sample in rows],
            "return_logprob": sampling.logprobs is not None,
            "logprob_start_len": -1,
            "top_logprobs_num": sampling.logprobs or 0,
            "return_text_in_logprobs": False,
            "lora_path": lora_path,
            "stream": False,
        }
        answers = self._sample(body, lora_path, deadline)
        if len(answers) != len(rows):
            raise GenerationError(f"{self.base_url} sent {len(answers)} completions where {len(rows)} were asked for.")
        try:
            return [read_completion(answer, prompt, sampling) for answer, prompt in zip(answers, prompts, strict=True)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise GenerationError(
                f"{self.base_url} sent completions that cannot be trained on: {error or type(error).__name__}."
            ) from error

    def _sample(self, body: dict[str, Any], lora_path: str | None, deadline: Deadline) -> list[dict[str, Any]]:
        for attempt in retrying(deadline, is_unreachable, at_most_s=_GENERATION_RETRY_S):
            with attempt:
                response = self._request("POST", "/generate", deadline, body=body)
        words = server_words(response)
        if response.status_code != 200:
            if "never been loaded" in words or "implicitly load" in words:
                raise AdapterLostError(
                    f"{self.base_url} no longer knows {lora_path!r}, although it had accepted it. It was probably "
                    "restarted. Restart the run from its last checkpoint once the server is up again. "
                    f"It said: {words!r}"
                )
            raise GenerationError(
                f"{self.base_url} could not sample from {lora_path or 'the base model'!r} "
                f"(HTTP {response.status_code}). It said: {words!r}"
            )
        try:
            answer = response.json()
        except ValueError as error:
            raise GenerationError(f"{self.base_url} sent completions that are not valid JSON.") from error
        return answer if isinstance(answer, list) else [answer]

    def _lora_path(self, model: str) -> str | None:
        """SGLang's field names the adapter, by name; null is the base."""
        return None if model == self.capabilities.base_model else model

    def chat(self, body: dict[str, Any], count: int, sampling: Sampling, deadline: Deadline) -> list[Completion]:
        raise GenerationError(
            "SGLang's chat route serves the base model for adapters that are named without a colon, so it is not "
            "used. Render the chat template in the rollout function and call generate() with token ids."
        )

    # Requests

    def _get(self, path: str, deadline: Deadline) -> httpx.Response:
        for attempt in retrying(deadline, is_unreachable, at_most_s=_GENERATION_RETRY_S):
            with attempt:
                response = self._request("GET", path, deadline)
        if response.status_code != 200:
            raise ServerSetupError(
                f"{self.base_url}{path} answered HTTP {response.status_code}, so this is not an SGLang server of "
                f"{OLDEST} or later. Correct vllm_server_base_url or vllm_server_engine. "
                f"It said: {server_words(response)!r}"
            )
        return response

    def _admin(
        self, path: str, deadline: Deadline, *, body: Any = None, content: LoadBody | None = None
    ) -> httpx.Response:
        """A control request, with the admin key if there is one.

        Which key a route wants differs by version: loading from tensors wants the API key up to 0.5.21 and the admin
        key from 0.5.22 on, so a refusal is answered with the other one.
        """
        key = self._admin_key if self._admin_key.is_set else None
        response = self._http.request("POST", path, deadline, body=body, content=content, api_key=key)
        if response.status_code == 401 and key is not None:
            response = self._http.request("POST", path, deadline, body=body, content=content)
        return self._checked(response)

    def _request(self, method: str, path: str, deadline: Deadline, *, body: Any = None) -> httpx.Response:
        return self._checked(self._http.request(method, path, deadline, body=body))

    def _checked(self, response: httpx.Response) -> httpx.Response:
        if response.status_code == 401:
            raise ServerAuthError(
                f"{self.base_url}{response.request.url.path} wants another key. In the trainer's environment, "
                f"{self._http.api_key!r} and {self._admin_key!r}. Export {API_KEY_VARIABLE} with the server's "
                f"--api-key, and {ADMIN_KEY_VARIABLE} with its --admin-api-key if it has one."
            )
        if response.status_code in _TRANSIENT_STATUSES:
            raise ServerUnreachableError(
                f"{self.base_url} is up but not serving (HTTP {response.status_code}). It may be starting or out of "
                f"order; look at its log. It said: {server_words(response)!r}"
            )
        return response

    def close(self) -> None:
        self._http.close()


def sampling_params(sampling: Sampling, sample: int) -> dict[str, Any]:
    """SGLang's names for the sampling fields, all of them explicit, for one single sample.

    Args:
        sample: which of a group's samples; a fixed seed is advanced by it, so that they differ.
    """
    extra = dict(sampling.extra)
    seed = extra.pop("seed", extra.pop("sampling_seed", None))
    fields: dict[str, Any] = {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "max_new_tokens": sampling.max_tokens,
        "regex": sampling.regex,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if seed is not None:
        fields["sampling_seed"] = seed + sample
    return fields | extra


def read_completion(answer: dict[str, Any], prompt_ids: list[int], sampling: Sampling) -> Completion:
    """Check one answer and bring it into the shape TRL expects.

    Raises:
        ValueError: with the reason why it cannot be trained on.
    """
    meta, token_ids = answer["meta_info"], answer["output_ids"]
    reason = meta["finish_reason"] or {}
    if reason.get("type") not in ("stop", "length"):
        raise ValueError(f"a completion was cut off ({reason.get('type')}: {reason.get('message', 'no reason given')})")
    logprobs = logprob_token_ids = None
    if sampling.logprobs is not None:
        logprobs, logprob_token_ids = _read_logprobs(meta, token_ids, sampling.logprobs)
    return Completion(
        prompt_ids=prompt_ids, token_ids=token_ids, logprobs=logprobs, logprob_token_ids=logprob_token_ids
    )


def _read_logprobs(
    meta: dict[str, Any], token_ids: list[int], top: int
) -> tuple[list[list[float | None]], list[list[int]]]:
    sampled = meta["output_token_logprobs"]
    if len(sampled) != len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens came with {len(sampled)} log-probabilities")
    alternatives = meta["output_top_logprobs"] if top else [[]] * len(sampled)
    values: list[list[float | None]] = []
    ids: list[list[int]] = []
    for token_id, (logprob, owner, *_), others in zip(token_ids, sampled, alternatives, strict=True):
        if owner != token_id:
            raise ValueError(f"token {token_id} came with the log-probability of token {owner}")
        if logprob is None or not math.isfinite(logprob):
            raise ValueError(f"the sampled token {token_id} has the log-probability {logprob!r}")
        found = {entry[1]: entry[0] for entry in others or []} | {token_id: logprob}
        ranked = sorted(found.items(), key=lambda item: -item[1])
        ids.append([token for token, _ in ranked])
        values.append([None if math.isnan(value) else value for _, value in ranked])
    return values, ids


def _token_ids(group: PromptGroup) -> list[int]:
    if isinstance(group.prompt, str):
        raise GenerationError("Text prompts are not sent to SGLang. Tokenize them and send token ids.")
    if group.images:
        raise GenerationError(
            "Prompts with images are not supported on SGLang servers. Use a vLLM server for vision-language models."
        )
    return group.prompt


def _target_modules(value: Any) -> frozenset[str]:
    if isinstance(value, str):
        value = [value]
    return frozenset(value or ())


def _is_served(module: str, served: frozenset[str]) -> bool:
    fused = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    fused |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    return not served or "all" in served or module in served or fused.get(module) in served
