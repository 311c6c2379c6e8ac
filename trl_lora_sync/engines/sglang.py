"""What a stock SGLang server accepts, answers and forgets (0.5.11 to 0.5.23).

Samples through `/generate` only: the OpenAI routes serve the base model, with HTTP 200, for an adapter that is named
without a colon. Five rules keep the server alive and unblocked. An adapter's weights are copied at its first batch,
and a misfit kills the scheduler there, so every load is followed by one token, while nothing else waits for it.
Samples are sent one by one (`n=1`), because up to 0.5.21 `n>1` leaves a reference behind that no unload ever sees
released. A request that the server would refuse is not sent, because up to 0.5.21 its adapter is never released
either. An unload is never sent while generation is paused. And memory is released only if the server is idle, restored
only if it was released, and not sampled with in between: SGLang asserts all three, and dies.
"""

import logging
import math
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import torch
from packaging.version import InvalidVersion, Version

from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.adapter.store import StoredAdapter
from trl_lora_sync.engines.base import Capabilities, Completion, Deadline, PromptGroup, Sampling
from trl_lora_sync.engines.http import APIKey, HTTPClient, is_unreachable, json_object, retrying, server_words
from trl_lora_sync.engines.sglang_completions import read_completion, sampling_params
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
_ADMIN_TENSORS_FROM = Version("0.5.22")
_CONCURRENT_REQUESTS = 64
_TRANSIENT_STATUSES = frozenset({502, 503, 504})
_GENERATION_RETRY_S = 15.0
_TENSOR_PATH = "__tensor__"  # what SGLang lists as the path of an adapter that came as tensors
_POLL_S = 0.05
# The answers of a generation step are out before the scheduler has put its last batch away.
_IDLE_GRACE_S = 5.0
# How long an unload looks whether an earlier one, which took too long, has ended after all.
_RECOVERY_PROBE_S = 1.0
# File systems shared over a network may show a new directory late (up to 30 s on FUSE mounts).
_VISIBILITY_GRACE_S = {True: 0.0, False: 35.0}
# Words for a path that is not there: SGLang takes it for a repository of the Hugging Face hub.
_NOT_FOUND_WORDS = (
    "Repo id must", "Repository Not Found", "files on the Hub", "huggingface.co", "offline mode", "No such file",
    "does not appear to have a file", "adapter_config.json",
)  # fmt: skip
# Values of --dtype; "auto" is the checkpoint's.
_DTYPES = {
    "half": "float16", "float16": "float16", "bfloat16": "bfloat16", "float": "float32", "float32": "float32"
}  # fmt: skip
_NEVER_LOADED = "trl-lora-sync-probe"
_WARM_UP_PROMPT = [0, 1, 2, 3]
_ONE_TOKEN = Sampling(
    temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, max_tokens=1, logprobs=None
)


_Row = tuple[list[int], dict[str, Any]]  # prompt and sampling parameters of one sample


class SGLangEngine:
    """One SGLang server; see the `Engine` protocol for the contract.

    Args:
        base_url: without a trailing slash.
        is_local: whether the server runs on this host.
    """

    def __init__(self, base_url: str, *, is_local: bool) -> None:
        self.base_url = base_url
        self._is_local = is_local
        self._http = HTTPClient(
            base_url, api_key=APIKey(API_KEY_VARIABLE), is_local=is_local, max_connections=_CONCURRENT_REQUESTS
        )
        self._admin_key = APIKey(ADMIN_KEY_VARIABLE)
        self._capabilities: Capabilities | None = None
        self._version = OLDEST
        self._tp_size = 1
        self._has_memory_saver = False
        self._payload = TensorPayload()
        self._seeds: random.Random | None = None
        self._stuck_unload: str | None = None
        self._overdue: dict[str, None] = {}  # a set in order: what is still to be unloaded
        self._paused = False
        self._is_released = False
        self._loaded_at_release: set[str] = set()

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
            max_model_len=self._max_model_len(deadline),
            logprobs_mode=self._logprobs_mode(deadline),
            dtype=_DTYPES.get(str(server.get("dtype"))),
            max_lora_rank=server.get("max_lora_rank"),
            target_modules=_target_modules(server.get("lora_target_modules")),
            needs_fused_siblings=True,
            survives_misfit=False,
            takes_tensors=True,
        )
        self._has_memory_saver = bool(server.get("enable_memory_saver"))
        if server.get("enable_deterministic_inference"):
            self._seeds = random.Random(torch.initial_seed())  # the trainer's, so that a run repeats itself
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

    def _max_model_len(self, deadline: Deadline) -> int | None:
        # `/server_info` gives the flag --context-length, which is null unless it was set.
        base = next((model for model in self._models(deadline) if not model.get("parent")), {})
        longest = base.get("max_model_len")
        return longest if isinstance(longest, int) else None

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
        # An unknown id in a prompt goes to the GPU, which kills the server; in `logit_bias` it is refused (HTTP 400).
        # Source: srt/sampling/sampling_params.py `verify`, 0.5.11 to 0.5.23.
        body = {
            "input_ids": _WARM_UP_PROMPT,
            "sampling_params": {"top_k": -1, "max_new_tokens": 1, "logit_bias": {str(token_id): 0.0}},
            "stream": False,
        }
        response = self._post_generate(body, deadline)
        return response.status_code == 200 or "logit_bias" not in server_words(response)

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
        self._check_fits(adapter)
        if self._stuck_unload and not self._has_recovered(deadline):
            raise AdapterRejectedError(self._stuck_words())
        grace = Deadline.after(_VISIBILITY_GRACE_S[self._is_local], "waiting for the directory to appear")

        def may_repeat(error: BaseException) -> bool:
            return is_unreachable(error) or (isinstance(error, AdapterNotVisibleError) and not grace.is_over())

        for attempt in retrying(deadline, may_repeat):
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
                f"{self.base_url} did not answer the load of {adapter.name}. An unload that waits for a request that "
                "never ends blocks every load; if that does not pass, restart the server"
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
        path = adapter.server_path
        if path is not None and (path in words or any(known in words for known in _NOT_FOUND_WORDS)):
            return AdapterNotVisibleError(
                f"{self.base_url} does not find the adapter at {path}. The trainer wrote it to {adapter.path} (mode "
                "0700, so the server must run as the same user). Let both see one folder with lora_sync_dir and "
                f'lora_sync_server_dir, or set lora_sync_transport="tensors". It said: {words!r}'
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
        """See `Engine`. What cannot be unloaded at the moment is tried again at the next unload."""
        self._overdue[adapter_name] = None
        if self._paused:
            return False  # it would wait for requests that do not go on, and block every load meanwhile
        try:
            probe = Deadline.after(_RECOVERY_PROBE_S, "Looking for the end of an earlier unload")
            if self._stuck_unload and not self._has_recovered(min(probe, deadline, key=lambda one: one.ends_at)):
                return False
            for name in list(self._overdue):
                self._unload_once(name, deadline)
        except LoRASyncError as error:
            logger.debug("Unloading %s failed: %s", adapter_name, error)
        return adapter_name not in self._overdue

    def _unload_once(self, adapter_name: str, deadline: Deadline) -> None:
        deadline.remaining_s()  # without any time left, nothing is asked and nothing can hang
        try:
            response = self._admin("/unload_lora_adapter", deadline, body={"lora_name": adapter_name})
        except DeadlineExceededError:
            self._stuck_unload = adapter_name
            logger.error("%s", self._stuck_words())
            raise
        if response.status_code == 200 or "does not exist" in server_words(response):
            self._overdue.pop(adapter_name, None)

    def _has_recovered(self, deadline: Deadline) -> bool:
        """Whether an unload that took too long has ended; waits for it.

        Unloading a name that never was is answered as soon as the lock is free that every load and unload takes.
        Source: srt/managers/tokenizer_control_mixin.py `lora_update_lock`, 0.5.11 to 0.5.23.
        """
        try:
            self._admin("/unload_lora_adapter", deadline, body={"lora_name": _NEVER_LOADED})
        except DeadlineExceededError:
            return False
        logger.info("%s has finished unloading %s after all.", self.base_url, self._stuck_unload)
        self._stuck_unload = None
        return True

    def _stuck_words(self) -> str:
        return (
            f"{self.base_url} does not finish unloading {self._stuck_unload}: it waits for requests that it believes "
            "to be running, and loads nothing until then. Requests of other clients with n > 1, and requests that "
            "were broken off, cause this up to SGLang 0.5.21. If no other client still samples from that adapter, "
            "restart the server, and the run from its last checkpoint; SGLang 0.5.22 has the fix."
        )

    def loaded(self, deadline: Deadline) -> dict[str, str]:
        models = self._models(deadline)
        return {model["id"]: str(model.get("root")) for model in models if model.get("parent")}

    def _models(self, deadline: Deadline) -> list[dict[str, Any]]:
        content = json_object(self._get("/v1/models", deadline), ServerSetupError)
        return [model for model in content.get("data", []) if isinstance(model, dict) and "id" in model]

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
        """See `Engine`.

        Source: SGLang asserts that it is idle, and the assertion ends the server (`release_memory_occupation` in
        srt/managers, 0.5.11 to 0.5.23). A request of another client dies with it until the cache is restored.
        """
        if not self._has_memory_saver:
            raise self._setup_error(
                "was started without the memory saver",
                "its KV cache cannot be released",
                'Restart it with --enable-memory-saver, or set vllm_server_sleep="off"',
            )
        if self._is_released:
            return
        self._loaded_at_release = set(self.loaded(deadline))
        self._flush_when_idle(deadline)
        deadline.remaining_s()
        self._is_released = True  # before the request, whose answer may be late
        try:
            self._control("/release_memory_occupation", {"tags": ["kv_cache"]}, deadline)
        except ServerError:
            self._is_released = False
            raise

    def _flush_when_idle(self, deadline: Deadline) -> None:
        """Flush the prefix cache, which SGLang refuses (HTTP 400) by the very condition that a release asserts.

        `/v1/loads` would not do: it tells what the scheduler last published, which may be a batch behind.
        """
        grace = Deadline.after(_IDLE_GRACE_S, "Waiting for an idle server")
        while (response := self._admin("/flush_cache", deadline)).status_code != 200:
            if response.status_code != 400 or grace.is_over():
                raise ServerError(
                    f"{self.base_url} did not become idle, so its KV cache was not released (HTTP "
                    f"{response.status_code} from /flush_cache). Nothing may run there meanwhile. Keep other clients "
                    f'off the server, or set vllm_server_sleep="off". It said: {server_words(response)!r}'
                )
            deadline.remaining_s()
            time.sleep(_POLL_S)

    def restore_kv_cache(self, deadline: Deadline) -> bool:
        """See `Engine`. Adapters are in another memory pool, so they stay; unless the server was started anew.

        Source: SGLang removes the tag from a set, and the KeyError of a restore without a release ends the server
        (`resume_memory_occupation` in srt/managers, 0.5.11 to 0.5.23).
        """
        if not self._is_released:
            return True
        before = self._loaded_at_release
        if before and not before & self.loaded(deadline).keys():
            self._is_released = False
            return False
        deadline.remaining_s()
        try:
            self._control("/resume_memory_occupation", {"tags": ["kv_cache"]}, deadline)
        except DeadlineExceededError:
            self._is_released = False  # it was asked and will do it; asking twice is fatal
            raise
        self._is_released = False
        return True

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
        """See `Engine`.

        The deadline is the only thing that breaks requests off, and it ends the run: a request whose client leaves
        keeps its adapter's reference for ever in some versions (0.5.15 to 0.5.21), and no unload gets past that.
        """
        rows = self._rows(groups, sampling)
        size = max(1, math.ceil(len(rows) / _CONCURRENT_REQUESTS))
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        with ThreadPoolExecutor(max_workers=max(1, min(_CONCURRENT_REQUESTS, len(batches)))) as pool:
            answers = pool.map(lambda batch: self._generate_batch(model, batch, sampling, deadline), batches)
            completions = [completion for answer in answers for completion in answer]
        iterator = iter(completions)
        return [[next(iterator) for _ in range(group.count)] for group in groups]

    def _rows(self, groups: Sequence[PromptGroup], sampling: Sampling) -> list[_Row]:
        """One row per sample, checked as the server would check it."""
        rows = []
        for group in groups:
            prompt = _token_ids(group)
            for sample in range(group.count):
                params = sampling_params(sampling, sample)
                if self._seeds is not None and params.get("sampling_seed") is None:
                    # With --enable-deterministic-inference every request without a seed gets the seed 42, so a group
                    # would be one completion several times (srt/sampling/sampling_batch_info.py, 0.5.11 to 0.5.23).
                    params["sampling_seed"] = self._seeds.getrandbits(31)
                self._check_length(prompt, params)
                rows.append((prompt, params))
        return rows

    def _check_length(self, prompt_ids: list[int], params: dict[str, Any]) -> None:
        """Refuse what the server would refuse after it has taken hold of the adapter, for ever up to 0.5.21."""
        longest = self.capabilities.max_model_len
        wanted = len(prompt_ids) + max(1, params["max_new_tokens"] or 0)
        if not prompt_ids:
            raise GenerationError("A prompt has no tokens. At least one is needed. Check the dataset and its template.")
        if longest is not None and wanted > longest:
            raise GenerationError(
                f"A prompt of {len(prompt_ids)} tokens and up to {params['max_new_tokens']} new ones do not fit into "
                f"the context of {longest} tokens at {self.base_url}. Lower max_completion_length, shorten the "
                f"prompts, or restart the server with --context-length {wanted}."
            )

    def _generate_batch(
        self, model: str, rows: Sequence[_Row], sampling: Sampling, deadline: Deadline
    ) -> list[Completion]:
        prompts = [prompt for prompt, _ in rows]
        lora_path = self._lora_path(model)
        body = {
            "input_ids": prompts,
            "sampling_params": [params for _, params in rows],
            "return_logprob": sampling.logprobs is not None,
            "logprob_start_len": -1,
            "top_logprobs_num": sampling.logprobs or 0,
            "return_text_in_logprobs": False,
            "lora_path": lora_path,
            "stream": False,
        }
        answers = self._sample(body, lora_path, deadline)
        if len(answers) != len(rows):
            raise GenerationError(
                f"{self.base_url} sent {len(answers)} completions where {len(rows)} were asked for. Is it SGLang "
                "itself, and not a proxy?"
            )
        try:
            return [read_completion(answer, prompt, sampling) for answer, prompt in zip(answers, prompts, strict=True)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise GenerationError(
                f"{self.base_url} sent completions that cannot be trained on: {error or type(error).__name__}."
            ) from error

    def _post_generate(self, body: dict[str, Any], deadline: Deadline) -> httpx.Response:
        """Sampling again does no harm, so a broken connection or a busy server is tried again for a while."""
        if self._is_released:
            raise GenerationError(
                f"The KV cache of {self.base_url} is released, and a request now would end the server. Take it back "
                "first: generate through the trainer, which does so."
            )
        for attempt in retrying(deadline, is_unreachable, at_most_s=_GENERATION_RETRY_S):
            with attempt:
                response = self._request("POST", "/generate", deadline, body=body)
        return response

    def _sample(self, body: dict[str, Any], lora_path: str | None, deadline: Deadline) -> list[dict[str, Any]]:
        response = self._post_generate(body, deadline)
        if response.status_code != 200:
            words = server_words(response)
            if "never been loaded" in words or "implicitly load" in words:
                raise AdapterLostError(
                    f"{self.base_url} no longer knows {lora_path!r}, although it had accepted it. It was probably "
                    "restarted. Restart the run from its last checkpoint once the server is up again. "
                    f"It said: {words!r}"
                )
            raise GenerationError(
                f"{self.base_url} could not sample from {lora_path or 'the base model'!r} (HTTP "
                f"{response.status_code}). If it names a field, correct generation_kwargs; else look at its log. "
                f"It said: {words!r}"
            )
        try:
            answer = response.json()
        except ValueError as error:
            raise GenerationError(
                f"{self.base_url} sent completions that are not valid JSON. Is it SGLang itself, and not a proxy?"
            ) from error
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

        Control routes want the admin key if the server has one, else the API key; loading from tensors wants the API
        key up to 0.5.21. A refusal is answered with the other one. Source: `auth_level` in
        srt/entrypoints/http_server.py, 0.5.11 to 0.5.23.
        """
        keys = [self._admin_key, self._http.api_key] if self._admin_key.is_set else [self._http.api_key]
        if content is not None and self._version < _ADMIN_TENSORS_FROM:
            keys.reverse()
        for key in keys:
            response = self._http.request("POST", path, deadline, body=body, content=content, api_key=key)
            if response.status_code != 401:
                break
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
