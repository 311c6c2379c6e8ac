"""An SGLang server as a process: its set-up, its keys, pausing it, and its memory (0.5.11 to 0.5.23).

Three rules keep the server alive. Memory is released only if it is idle, restored only if it was released, and not
sampled with in between: SGLang asserts all three, and a failed assertion ends it.
"""

import asyncio
import contextlib
import json
import logging
from typing import Any

import httpx
from packaging.version import InvalidVersion, Version

from trl_lora_sync.engines.base import TIMEOUTS, Deadline, Sampling, Timeouts
from trl_lora_sync.engines.http import APIKey, SizedBody, may_have_acted, server_message
from trl_lora_sync.engines.registry import restart_command
from trl_lora_sync.engines.server import ServerEngine, models_in
from trl_lora_sync.engines.sglang.completions import sampling_params
from trl_lora_sync.engines.sglang.spec import SGLANG
from trl_lora_sync.errors import LoRASyncError, ServerError, ServerSetupError

logger = logging.getLogger(__name__)

_ADMIN_KEY_VARIABLE = "SGLANG_ADMIN_API_KEY"
_OLDEST = SGLANG.versions.oldest
_ADMIN_TENSORS_FROM = Version("0.5.22")
_POLL_S = 0.05
# Before, what these stores keep has no adapter in its key (sglang#38577; mem_cache/storage/lmcache, 0.5.21).
_STORAGE_APART_FROM, _LMCACHE_APART_FROM = Version("0.5.20"), Version("0.5.21")


class SGLangServer(ServerEngine):
    """What `SGLangEngine` knows of its server besides adapters and tokens; see `ServerEngine` for the arguments."""

    spec = SGLANG
    local_visibility_grace_s = 0.0

    def __init__(self, base_url: str, *, is_local: bool, timeouts: Timeouts = TIMEOUTS) -> None:
        super().__init__(base_url, is_local=is_local, timeouts=timeouts)
        self._admin_key = APIKey(_ADMIN_KEY_VARIABLE)
        self._version = _OLDEST
        self._has_memory_saver = False
        self._speculates = False
        self._is_paused = False
        self._is_released = False
        self._loaded_at_release: set[str] = set()

    # Set-up

    def _check_setup(self, server: dict[str, Any], model: dict[str, Any]) -> None:
        """Raises ServerSetupError for a server that cannot be used.

        Args:
            server: of `/server_info`.
            model: of `/model_info`.
        """
        version = str(server.get("version", "unknown"))
        try:
            self._version = Version(version)
        except InvalidVersion:
            logger.warning("%s reports the SGLang version %r; %s is assumed.", self.base_url, version, _OLDEST)
        if self._version < _OLDEST:
            raise self._setup_error(f"runs SGLang {version}", f"SGLang {_OLDEST} or later is needed", "Upgrade it")
        if not server.get("enable_lora"):
            raise self._setup_error(
                "was started without LoRA support",
                "adapters are loaded while it runs",
                f"Restart it with {self._serve_command()}; for an adapter of a rank above 16, add --lora-rank",
            )
        if int(server.get("dp_size") or 1) > 1:
            raise self._setup_error(
                f"was started with --dp-size {server['dp_size']}",
                "SGLang loads adapters into one replica only",
                f"Start independent servers, one URL each, with {self._serve_command()}",
            )
        # From 0.5.22 on, `--dp-size N --enable-dp-attention` is reported as dp_size 1 and attn_dp_size N as well.
        if (groups := int(server.get("attn_dp_size") or 1)) > 1:
            raise self._setup_error(
                f"was started with attention data parallelism (--attn-dp-size {groups})",
                "SGLang then takes pinned adapters only, and versions are not pinned",
                f"Restart it with {self._serve_command()}",
            )
        if int(server.get("tokenizer_worker_num") or 1) > 1:
            raise self._setup_error(
                f"was started with --tokenizer-worker-num {server['tokenizer_worker_num']}",
                "each worker keeps a separate list of adapters, so requests to the others would fail",
                f"Restart it with {self._serve_command()}",
            )
        for flag, is_given, right_from in (
            ("--hicache-storage-backend", server.get("hicache_storage_backend"), _STORAGE_APART_FROM),
            ("--enable-lmcache", server.get("enable_lmcache"), _LMCACHE_APART_FROM),
        ):
            if is_given and self._version < right_from:
                raise self._setup_error(
                    f"was started with {flag}",
                    f"before SGLang {right_from} the keys of that cache lack the adapter, so a version would be "
                    "computed from what another one has left there",
                    f"Restart it with {self._serve_command()}, or upgrade it",
                )
        self._speculates = bool(server.get("speculative_algorithm"))
        # Below 1, a draft is taken that the model would have drawn less often (`_sampling_verify` in
        # srt/speculative/ngram_info.py).
        thresholds = [server.get(f"speculative_accept_threshold_{kind}", 1.0) for kind in ("single", "acc")]
        if self._speculates and any(isinstance(one, float | int) and one < 1.0 for one in thresholds):
            raise self._setup_error(
                "was started with --speculative-accept-threshold-single or -acc below 1",
                "it takes drafts that the policy would not have sampled so often",
                f"Restart it with {self._serve_command()}",
            )
        preferred = _json_fields(model.get("preferred_sampling_params"))
        # What is sent with each request takes precedence.
        if added := sorted(preferred - sampling_params(Sampling.unrestricted(max_tokens=1, logprobs=None), 0).keys()):
            raise self._setup_error(
                f"was started with --preferred-sampling-params, which sets {', '.join(added)}",
                "every completion would be sampled with that, and the trainer does not know it",
                f"Restart it with {self._serve_command()}, and put into generation_kwargs what is wanted",
            )

    async def _max_model_len(self, deadline: Deadline) -> int | None:
        # `/server_info` gives the flag --context-length, which is null unless it was set.
        models = models_in(await self._get("/v1/models", deadline))
        base = next((model for model in models if not model.get("parent")), {})
        longest = base.get("max_model_len")
        return longest if isinstance(longest, int) else None

    def _setup_error(self, seen: str, why: str, fix: str) -> ServerSetupError:
        return ServerSetupError(f"The SGLang server at {self.base_url} {seen}: {why}. {fix}.")

    # Pausing and memory

    async def pause(self, mode: str, deadline: Deadline) -> None:
        if mode == "drain":
            await self._wait_until_idle(deadline)
        self._is_paused = True  # before the request, whose answer may be lost
        # In place after a drain: a request that came in meanwhile keeps its tokens and its KV cache, and goes on later.
        await self._control("/pause_generation", {"mode": "abort" if mode == "abort" else "in_place"}, deadline)

    async def _wait_until_idle(self, deadline: Deadline) -> None:
        # SGLang has no pause that finishes what runs, so its load is watched until there is none.
        while running := await self._running_requests(deadline):
            if deadline.is_over():
                raise deadline.error(
                    f"{running} requests still run or wait at {self.base_url}: other clients keep it busy. Set "
                    'lora_sync_pause="abort", or "off", which is safe as well'
                )
            await asyncio.sleep(_POLL_S)

    async def _running_requests(self, deadline: Deadline) -> int:
        loads = (await self._get("/v1/loads?include=core", deadline)).get("loads", [])
        try:
            return sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in loads)
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(
                f"{self.base_url}/v1/loads does not report how many requests run, so nothing can be drained. Set "
                'lora_sync_pause="abort", or "off", which is safe as well.'
            ) from error

    async def resume(self, deadline: Deadline) -> None:
        await self._control("/continue_generation", {}, deadline)
        # After the answer: no unload is sent to a server that may still be paused.
        self._is_paused = False

    async def release_kv_cache(self, deadline: Deadline) -> None:
        """See `Engine`.

        Source: SGLang asserts that it is idle, and the assertion ends the server (`release_memory_occupation` in
        srt/managers, 0.5.11 to 0.5.23). A request of another client has the same effect until the cache is restored.
        """
        if not self._has_memory_saver:
            restart = restart_command(self, "--sleep", is_local=self._is_local)
            raise self._setup_error(
                "was started without the memory saver",
                "its KV cache cannot be released",
                f'Restart it with {restart}, or set vllm_server_sleep="off"',
            )
        if self._is_released:
            return
        # By these names `restore_kv_cache` recognises a process that was restarted.
        self._loaded_at_release = set(await self.loaded(deadline))
        await self._flush_when_idle(deadline)
        # With no time left nothing would be sent, but the error would be the same as for a late answer, after which the
        # cache counts as released.
        deadline.remaining_s()
        self._is_released = True  # before the request, whose answer may be late or lost
        try:
            await self._control("/release_memory_occupation", {"tags": ["kv_cache"]}, deadline)
        except ServerError as error:
            self._is_released = may_have_acted(error)
            raise

    async def _flush_when_idle(self, deadline: Deadline) -> None:
        """Flush the prefix cache, which SGLang refuses (HTTP 400) by the very condition that a release asserts.

        `/v1/loads` would not do: it has what the scheduler last published, which may be a batch behind.
        """
        # The answers of a generation step are out before the scheduler has put its last batch away.
        grace = Deadline.after(self._timeouts.idle_s, "Waiting for an idle server")
        while (response := await self._admin("/flush_cache", deadline)).status_code != 200:
            if response.status_code != 400 or grace.is_over():
                raise ServerError(
                    f"{self.base_url} did not become idle, so its KV cache was not released (HTTP "
                    f"{response.status_code} from /flush_cache). Nothing may run there meanwhile. Keep other clients "
                    f'off the server, or set vllm_server_sleep="off". The server answered: {server_message(response)!r}'
                )
            deadline.remaining_s()
            await asyncio.sleep(_POLL_S)

    async def restore_kv_cache(self, deadline: Deadline) -> bool:
        """See `Engine`. Adapters are in another memory pool, so they stay, unless the server was restarted.

        Source: SGLang removes the tag from a set, and the KeyError of a restore without a release ends the server
        (`resume_memory_occupation` in srt/managers, 0.5.11 to 0.5.23).
        """
        if not self._is_released:
            return True
        before = self._loaded_at_release
        # None of the adapters is there, so it was restarted, and a restore without a release would end it.
        if before and not before & (await self.loaded(deadline)).keys():
            self._is_released = False
            return False
        # As for the release: a request that was not sent must not look like one without an answer.
        deadline.remaining_s()
        try:
            await self._control("/resume_memory_occupation", {"tags": ["kv_cache"]}, deadline)
        except (LoRASyncError, asyncio.CancelledError) as error:
            # A server that has the request will restore, and a second one is fatal.
            self._is_released = not may_have_acted(error)
            raise
        self._is_released = False
        return True

    async def _control(self, path: str, body: dict[str, Any], deadline: Deadline) -> None:
        response = await self._admin(path, deadline, body=body)
        if response.status_code != 200:
            raise ServerError(
                f"{self.base_url}{path} failed (HTTP {response.status_code}). Look at its log, or switch "
                f"lora_sync_pause and vllm_server_sleep off. The server answered: {server_message(response)!r}"
            )

    # Requests

    @property
    def _is_watched(self) -> bool:
        # SGLang's health check samples a token, which waits while it is paused and kills it without its KV cache.
        return not (self._is_paused or self._is_released)

    async def _admin(
        self, path: str, deadline: Deadline, *, body: Any = None, content: SizedBody | None = None
    ) -> httpx.Response:
        """A control request, with the admin key if there is one.

        Control routes want the admin key if the server has one, else the API key; loading from tensors wants the API
        key up to 0.5.21. A refusal is answered with the other one. Source: `auth_level` in
        srt/entrypoints/http_server.py, 0.5.11 to 0.5.23.
        """
        keys = [self._admin_key, self._api_key] if self._admin_key.is_set else [self._api_key]
        if content is not None and self._version < _ADMIN_TENSORS_FROM:
            keys.reverse()
        for key in keys:
            response = await self._http.request("POST", path, deadline, body=body, content=content, api_key=key)
            if response.status_code != 401:
                break
        return self._checked(response)

    def _key_words(self, path: str) -> str:
        return (
            f"{self.base_url}{path} wants another key. In the trainer's environment, "
            f"{self._api_key!r} and {self._admin_key!r}. Export {SGLANG.api_key_variable} with the server's "
            f"--api-key, and {_ADMIN_KEY_VARIABLE} with its --admin-api-key if it has one."
        )


def _json_fields(value: Any) -> set[str]:
    """The names in an object, or in the JSON of one."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    return set(value) if isinstance(value, dict) else set()
