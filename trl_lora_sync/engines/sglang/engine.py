"""What a stock SGLang server accepts, answers and drops (0.5.11 to 0.5.23).

Samples through `/generate` only: the OpenAI routes serve the base model, with HTTP 200, for an adapter that is named
without a colon. Four rules keep the server alive and unblocked, beside those in `sglang.server`. An adapter's weights
are copied at its first batch, and a misfit kills the scheduler there, so every load is followed by one token, while
nothing else waits for it. Samples are sent one by one (`n=1`), because up to 0.5.21 `n>1` leaves a reference behind
that no unload ever sees released. A request that the server would refuse is not sent, or first to the base model,
because up to 0.5.21 its adapter is never released either. And an unload is never sent while generation is paused.
"""

import logging
import math
import random
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

import httpx
import torch
from packaging.version import Version

from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.adapter.store import StoredAdapter
from trl_lora_sync.engine_plugins.collector import collector_paused
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
from trl_lora_sync.engines.http import server_message
from trl_lora_sync.engines.images import data_urls, one_token_per_image
from trl_lora_sync.engines.registry import restart_command
from trl_lora_sync.engines.server import logprobs_mode
from trl_lora_sync.engines.sglang.completions import Sample, read_completion, sampling_params
from trl_lora_sync.engines.sglang.payload import LoadBody
from trl_lora_sync.engines.sglang.server import SGLangServer
from trl_lora_sync.engines.sglang.spec import SGLANG
from trl_lora_sync.errors import (
    AdapterLostError,
    AdapterNotVisibleError,
    AdapterRejectedError,
    DeadlineExceededError,
    GenerationError,
    LoRASyncError,
    ServerError,
    ServerSetupError,
    ServerUnreachableError,
)
from trl_lora_sync.runtime import in_parallel, offload

logger = logging.getLogger(__name__)

_TENSORS_PER_RANK_FROM = Version("0.5.17")
_REFUSALS_LET_GO_FROM = Version("0.5.22")
# From here on answers have the prompt, by which the tokens of images are compared.
_IMAGES_FROM = Version("0.5.15")
_TENSOR_PATH = "__tensor__"  # what SGLang lists as the path of an adapter that came as tensors
# Words for a path that is not there: SGLang takes it for a repository of the Hugging Face hub.
_NOT_FOUND_WORDS = (
    "Repo id must", "Repository Not Found", "files on the Hub", "huggingface.co", "offline mode", "No such file",
    "does not appear to have a file", "adapter_config.json",
)  # fmt: skip
# Values of --dtype; "auto" is the checkpoint's.
_DTYPES = {
    "half": "float16", "float16": "float16", "bfloat16": "bfloat16", "float": "float32", "float32": "float32"
}  # fmt: skip
# What is not applied to each token of a draft, with the values that switch it off.
_INEXACT = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_NEVER_LOADED = "trl-lora-sync-probe"
# Ids that every vocabulary has.
_WARM_UP_PROMPT = [0, 1, 2, 3]
_ONE_TOKEN = Sampling.unrestricted(max_tokens=1, logprobs=None)


class SGLangEngine(SGLangServer):
    """One SGLang server; see the `Engine` protocol for the contract, and `ServerEngine` for the arguments."""

    def __init__(self, base_url: str, *, is_local: bool, timeouts: Timeouts = TIMEOUTS) -> None:
        super().__init__(base_url, is_local=is_local, timeouts=timeouts)
        self._tp_size = 1
        self._seeds: random.Random | None = None
        self._accepted_sampling: set[str] = set()
        self._stuck_unload: str | None = None
        self._fits: set[tuple[int, tuple[str, ...]]] = set()  # rank and modules of adapters that gave a token
        self._takes_images = False

    # Connecting

    async def connect(self, deadline: Deadline) -> Capabilities:
        model = await self._get("/model_info", deadline)
        server = await self._get("/server_info", deadline)
        self._base_root = str(model.get("model_path") or server.get("served_model_name"))
        self._check_setup(server, model)
        base_model = str(server.get("served_model_name") or model.get("model_path"))
        self._tp_size = int(server.get("tp_size") or 1)
        modules = server.get("lora_target_modules") or ()
        self._capabilities = Capabilities(
            engine=SGLANG.name,
            version=str(server.get("version", "unknown")),
            base_model=base_model,
            base_root=str(model.get("model_path", base_model)),
            max_model_len=await self._max_model_len(deadline),
            logprobs_mode=logprobs_mode(await self._spread(0.5, deadline), await self._spread(2.0, deadline)),
            dtype=_DTYPES.get(str(server.get("dtype"))),
            max_lora_rank=server.get("max_lora_rank"),
            # SGLang counts the base model as one.
            max_loras=int(server["max_loras_per_batch"]) - 1 if server.get("max_loras_per_batch") else None,
            target_modules=frozenset([modules] if isinstance(modules, str) else modules),
            **SGLANG.capabilities,
        )
        self._has_memory_saver = bool(server.get("enable_memory_saver"))
        # A model of text ignores images, with HTTP 200. Source: managers/tokenizer_manager.py (0.5.15).
        self._takes_images = bool(model.get("has_image_understanding")) and self._version >= _IMAGES_FROM
        if server.get("enable_deterministic_inference"):
            self._seeds = random.Random(torch.initial_seed())  # the trainer's, so that a run repeats itself
        return self._capabilities

    async def _spread(self, temperature: float, deadline: Deadline) -> float | None:
        body = {
            "input_ids": _WARM_UP_PROMPT,
            "sampling_params": {"temperature": temperature, "top_k": -1, "max_new_tokens": 1},
            "return_logprob": True,
            "top_logprobs_num": 5,
            "stream": False,
        }
        answer = (await self._sample(body, None, deadline))[0]
        try:
            top = [entry[0] for entry in answer["meta_info"]["output_top_logprobs"][0]]
            return float(max(top) - min(top))
        except (KeyError, IndexError, TypeError):
            return None

    async def has_token(self, token_id: int, deadline: Deadline) -> bool:
        # An unknown id in a prompt goes to the GPU, which kills the server; in `logit_bias` it is refused (HTTP 400).
        # Source: srt/sampling/sampling_params.py `verify`, 0.5.11 to 0.5.23.
        body = {
            "input_ids": _WARM_UP_PROMPT,
            "sampling_params": {"top_k": -1, "max_new_tokens": 1, "logit_bias": {str(token_id): 0.0}},
            "stream": False,
        }
        response = await self._post_generate(body, deadline)
        return response.status_code == 200 or "logit_bias" not in server_message(response)

    async def score(self, model: str, prompt_ids: list[int], deadline: Deadline) -> list[float]:
        lora_path = self.lora_path(model)
        body = {
            "input_ids": prompt_ids,
            "sampling_params": {"temperature": 1.0, "top_k": -1, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
            "lora_path": lora_path,
            "stream": False,
        }
        answer = (await self._sample(body, lora_path, deadline))[0]
        try:
            # The first token has none: nothing comes before it.
            return [float(entry[0]) for entry in answer["meta_info"]["input_token_logprobs"][1:]]
        except (KeyError, IndexError, TypeError) as error:
            raise self._unscored() from error

    async def score_image(
        self, model: str, prompt_ids: list[int], image: Any, image_token_id: int, scored: int, deadline: Deadline
    ) -> list[float]:
        # Source: `should_apply_lora` of srt/models/qwen2_5_vl.py, qwen3_vl.py and gemma3_mm.py (0.5.15).
        raise ServerSetupError(
            f"The adapter changes modules that see images, to which SGLang at {self.base_url} applies none. Train the "
            'language model only, for example with LoraConfig(exclude_modules=r".*(visual|'
            'vision_tower|multi_modal_projector).*"), or sample on vLLM.'
        )

    # Adapters

    async def load(self, adapter: StoredAdapter, deadline: Deadline) -> dict[str, str]:
        self._check_fits(adapter)
        # Every load takes the lock that a stuck unload holds, and would hang as well.
        if self._stuck_unload and not await self._has_recovered(deadline):
            raise AdapterRejectedError(self._stuck_words())
        async with self._distrusting_connections():
            async for attempt in self._attempts_to_load(deadline):
                with attempt:
                    loaded = await self._load_once(adapter, deadline)
        return loaded

    def _check_fits(self, adapter: StoredAdapter) -> None:
        served = self.capabilities
        if served.max_lora_rank is not None and adapter.rank > served.max_lora_rank:
            raise self._setup_error(
                f"was started with --max-lora-rank {served.max_lora_rank}",
                f"the adapter has rank {adapter.rank}",
                f"Restart it with {self._command_for(adapter)}",
            )
        missing = [name for name in adapter.target_modules if not served.serves_module(name)]
        if missing:
            raise self._setup_error(
                f"was started without {', '.join(missing)} among its --lora-target-modules",
                "the adapter needs them",
                f"Restart it with {self._command_for(adapter)}",
            )

    def _command_for(self, adapter: StoredAdapter) -> str:
        rank, modules = str(adapter.rank), adapter.target_modules
        return self._serve_command("--lora-rank", rank, engine_options=["--lora-target-modules", *modules])

    async def _load_once(self, adapter: StoredAdapter, deadline: Deadline) -> dict[str, str]:
        try:
            if adapter.server_path is not None:
                body = {"lora_name": adapter.name, "lora_path": adapter.server_path, "pinned": False}
                response = await self._admin("/load_lora_adapter", deadline, body=body)
            else:
                assert adapter.content is not None  # what has no path comes as tensors
                tensors = await self.tensor_body(adapter.name, adapter.content)
                response = await self._admin("/load_lora_adapter_from_tensors", deadline, content=tensors)
        except DeadlineExceededError as error:
            raise deadline.error(
                f"{self.base_url} did not answer the load of {adapter.name}. An unload that waits for a request that "
                "never ends blocks every load; if that does not pass, restart the server"
            ) from error
        message = server_message(response)
        # A repeated request finds its own first attempt. The path, below, distinguishes it from another client's.
        if response.status_code != 200 and "already loaded" not in message:
            raise self._load_error(adapter, response.status_code, message)
        expected = adapter.server_path or _TENSOR_PATH
        loaded = await self.loaded(deadline)
        path = loaded.get(adapter.name)
        if path != expected:
            raise AdapterRejectedError(
                f"{self.base_url} lists the adapter {adapter.name!r} with path {path!r} instead of {expected!r}. Every "
                f"version needs a unique name; does another process load adapters there? The server answered: "
                f"{message!r}"
            )
        return loaded

    async def tensor_body(self, adapter_name: str, adapter: CanonicalAdapter) -> LoadBody:
        """The request that carries the tensors to this server."""
        # From 0.5.17 on, a list with one element per tensor-parallel rank takes the place of one string.
        per_rank = self._version >= _TENSORS_PER_RANK_FROM
        # In the thread for long calls, because all bytes are copied.
        return await offload(partial(LoadBody, adapter_name, adapter, per_rank=per_rank, tp_size=self._tp_size))

    def _load_error(self, adapter: StoredAdapter, status: int, message: str) -> ServerError:
        if status == 404:
            return self._setup_error(
                "has no route that loads an adapter (HTTP 404)",
                "SGLang's Rust server has none, and a gateway may not pass it on",
                "Restart it without SGLANG_RUST_SERVER, or give vllm_server_base_url the server's own URL",
            )
        path = adapter.server_path
        if path is not None and (path in message or any(known in message for known in _NOT_FOUND_WORDS)):
            return AdapterNotVisibleError(
                f"{self.base_url} does not find the adapter at {path}. The trainer wrote it to {adapter.path} (mode "
                "0700, so the server must run as the same user). Let both see one folder with lora_sync_dir and "
                f'lora_sync_server_dir, or set lora_sync_transport="tensors". The server answered: {message!r}'
            )
        if "LoRA memory pool configuration" in message:
            return self._setup_error(
                "cannot hold this adapter",
                f"it has rank {adapter.rank} and the modules {', '.join(adapter.target_modules)}",
                f"Restart it with {self._command_for(adapter)} (the server answered: {message!r})",
            )
        return AdapterRejectedError(
            f"{self.base_url} refused to load the adapter {adapter.name!r} (HTTP {status}). It was expected to fit "
            f"the server's base model; check that the server serves the model that is being trained. "
            f"The server answered: {message!r}"
        )

    async def warm_up(self, adapter: StoredAdapter, deadline: Deadline) -> None:
        kind = adapter.rank, adapter.target_modules
        try:
            await self.generate(adapter.name, [PromptGroup(prompt=_WARM_UP_PROMPT, count=1)], _ONE_TOKEN, deadline)
            self._fits.add(kind)
        except (ServerUnreachableError, GenerationError) as error:
            # It is a loss like any other if adapters of these shapes have given tokens before.
            if isinstance(error, ServerUnreachableError) and kind in self._fits:
                raise
            raise AdapterRejectedError(
                f"{self.base_url} loaded the adapter {adapter.name!r} but failed at its first token. SGLang crashes on "
                "an adapter whose shapes do not fit its base model; look at its log, and serve the model that is "
                f"being trained. {error}"
            ) from error

    def take_over(self, before: Engine) -> None:
        """See `Engine`. Nothing is left: SGLang keeps adapters in the memory of its process only."""

    async def unload(self, adapter_name: str, deadline: Deadline) -> bool:
        """See `Engine`."""
        if self._is_paused:
            return False  # it would wait for requests that do not go on, and block every load meanwhile
        try:
            # Briefly: the unloads of a server wait for each other, and the next one probes again.
            probe = Deadline.after(self._timeouts.unstuck_s, "Looking for the end of an earlier unload")
            if self._stuck_unload and not await self._has_recovered(min(probe, deadline, key=lambda one: one.ends_at)):
                return False
            return await self._unload_once(adapter_name, deadline)
        except LoRASyncError as error:
            logger.debug("Unloading %s failed: %s", adapter_name, error)
            return False

    async def _unload_once(self, adapter_name: str, deadline: Deadline) -> bool:
        deadline.remaining_s()  # without any time left, no request is sent and nothing can hang
        try:
            response = await self._admin("/unload_lora_adapter", deadline, body={"lora_name": adapter_name})
        # The server goes on waiting for requests of that adapter, with its lock held, after this client has left.
        except DeadlineExceededError:
            self._stuck_unload = adapter_name
            logger.error("%s", self._stuck_words())
            raise
        return response.status_code == 200 or "does not exist" in server_message(response)

    async def _has_recovered(self, deadline: Deadline) -> bool:
        """Whether an unload that took too long has ended; waits for it.

        Unloading a name that never was is answered as soon as the lock is free that every load and unload takes.
        Source: srt/managers/tokenizer_control_mixin.py `lora_update_lock`, 0.5.11 to 0.5.23.
        """
        try:
            await self._admin("/unload_lora_adapter", deadline, body={"lora_name": _NEVER_LOADED})
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

    # Generation

    async def generate(
        self,
        model: str,
        groups: Sequence[PromptGroup],
        sampling: Sampling,
        deadline: Deadline,
        at_once: int = CONCURRENT_REQUESTS,
    ) -> list[list[Completion]]:
        """See `Engine`."""
        samples = await self._samples(groups, sampling)
        if model != self.capabilities.base_model:
            await self._check_samples(samples, deadline)
        # Images are sent for one sample, as they were measured.
        size = 1 if any(one.images for one in samples) else max(1, math.ceil(len(samples) / at_once))
        batches = [samples[start : start + size] for start in range(0, len(samples), size)]
        async with self._distrusting_connections():
            answers = await in_parallel(
                lambda batch: self._generate_batch(model, batch, sampling, deadline), batches, at_once
            )
        iterator = (completion for answer in answers for completion in answer)
        return [[next(iterator) for _ in range(group.count)] for group in groups]

    async def _samples(self, groups: Sequence[PromptGroup], sampling: Sampling) -> list[Sample]:
        samples = []
        for group in groups:
            prompt_ids, pictures = group.prompt, group.images or []
            if isinstance(prompt_ids, str):
                raise GenerationError("Text prompts are not sent to SGLang. Tokenize them and send token ids.")
            if pictures and not self._takes_images:
                raise GenerationError(
                    f"A prompt has images, and {self.base_url} (SGLang {self.capabilities.version}, "
                    f"{self.capabilities.base_root}) takes none. Serve the vision-language model that is trained, with "
                    f"SGLang {_IMAGES_FROM} or newer: {self._serve_command()}"
                )
            sent_ids = one_token_per_image(prompt_ids, len(pictures), sampling.image_token_id)
            images = await offload(partial(data_urls, pictures)) if pictures else []
            for number in range(group.count):
                params = sampling_params(sampling, number)
                if self._seeds is not None and params.get("sampling_seed") is None:
                    # With --enable-deterministic-inference every request without a seed gets the seed 42, so a group
                    # would be one completion several times (srt/sampling/sampling_batch_info.py, 0.5.11 to 0.5.23).
                    params["sampling_seed"] = self._seeds.getrandbits(31)
                # With all tokens of its images, as the model's context has to hold them.
                self._check_length(prompt_ids, params)
                self._check_exact(params)
                samples.append(Sample(prompt_ids, sent_ids, images, params))
        return samples

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
                f"prompts, or restart the server with "
                f"{restart_command(self, is_local=self._is_local, engine_options=['--context-length', str(wanted)])}."
            )

    def _check_exact(self, params: dict[str, Any]) -> None:
        """Refuse what SGLang ignores, or applies to the first token of a draft only, when it speculates.

        Source: `_sampling_verify` and `verify` in srt/speculative/ngram_info.py; the only algorithm that it allows with
        adapters (server_args.py).
        """
        if self._speculates and (changed := [name for name, off in _INEXACT.items() if params.get(name, off) != off]):
            raise GenerationError(
                f"{self.base_url} was started with --speculative-algorithm, with which SGLang does not apply "
                f"{', '.join(changed)} to every token. Restart it with {self._serve_command()}, or leave these out."
            )

    async def _check_samples(self, samples: Sequence[Sample], deadline: Deadline) -> None:
        """Have the server judge sampling parameters and numbers of images on the base model first, once.

        Up to 0.5.21 a refusal comes after the server has taken hold of the adapter, for ever; of the base it takes no
        hold.
        """
        if self._version >= _REFUSALS_LET_GO_FROM:
            return
        for _, sent_ids, images, params in samples:
            # The seed differs from sample to sample, and each would cost a request.
            judged = {name: value for name, value in params.items() if name != "sampling_seed"}
            known = repr((sorted(judged.items()), len(images)))
            if known not in self._accepted_sampling:
                # As few tokens as these parameters allow: a minimum above the maximum must still be refused.
                fewest = min(params["max_new_tokens"] or 1, max(1, params.get("min_new_tokens") or 1))
                prompt = {"input_ids": sent_ids, "image_data": images} if images else {"input_ids": _WARM_UP_PROMPT}
                body = prompt | {
                    "sampling_params": params | {"max_new_tokens": fewest},
                    "lora_path": None,
                    "stream": False,
                }
                await self._sample(body, None, deadline)
                self._accepted_sampling.add(known)

    async def _generate_batch(
        self, model: str, samples: Sequence[Sample], sampling: Sampling, deadline: Deadline
    ) -> list[Completion]:
        lora_path, (_, sent_ids, images, params) = self.lora_path(model), samples[0]
        asked: dict[str, Any] = {
            "input_ids": [one.sent_ids for one in samples], "sampling_params": [one.params for one in samples],
        }  # fmt: skip
        if images:
            asked = {"input_ids": sent_ids, "sampling_params": params, "image_data": images}
        body = asked | {
            "return_logprob": sampling.logprobs is not None,
            # Of the completion only.
            "logprob_start_len": -1,
            "top_logprobs_num": sampling.logprobs or 0,
            "return_text_in_logprobs": False,
            "return_prompt_token_ids": True,  # ignored by versions that do not know it
            "lora_path": lora_path,
            "stream": False,
        }
        answers = await self._sample(body, lora_path, deadline)
        if len(answers) != len(samples):
            raise self._wrong_count(len(answers), len(samples))
        longest = self.capabilities.max_model_len
        try:
            with collector_paused():
                return [
                    read_completion(answer, one.prompt_ids, sampling, must_echo=bool(images), max_model_len=longest)
                    for answer, one in zip(answers, samples, strict=True)
                ]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._untrainable(error) from error

    async def _post_generate(self, body: dict[str, Any], deadline: Deadline) -> httpx.Response:
        if self._is_released:
            raise GenerationError(
                f"The KV cache of {self.base_url} is released, and a request now would end the server. Take it back "
                "first: generate through the trainer, which does so."
            )
        is_batch = isinstance(body["input_ids"][0], list)
        async for attempt in self._retrying(deadline):
            with attempt:
                # New ones for each attempt: an id that the server still knows is refused as a duplicate (0.5.17). None
                # begins with another, as SGLang aborts by the beginning of an id.
                ids = [uuid.uuid4().hex for _ in (body["input_ids"] if is_batch else [0])]
                answer = await self._http.request(
                    "POST",
                    "/generate",
                    deadline,
                    body={**body, "rid": ids if is_batch else ids[0]},
                    is_watched=self._is_watched,
                    abort=partial(self._abort, ids),
                )
                response = self._checked(answer)
        return response

    async def _abort(self, request_ids: Sequence[str], deadline: Deadline) -> None:
        """End requests before their connection is broken off.

        In 0.5.15 and 0.5.17 a request whose client leaves keeps its adapter's reference for ever, and up to 0.5.21 so
        does an abort of a queued request; no unload gets past that. An abort of a running request releases the
        reference.
        Source: managers/tokenizer_manager.py `abort_request`, `_handle_abort_req`, `_discard_pending_req_states`.
        """
        for request_id in request_ids:
            await self._admin("/abort_request", deadline, body={"rid": request_id})

    async def _sample(self, body: dict[str, Any], lora_path: str | None, deadline: Deadline) -> list[dict[str, Any]]:
        response = await self._post_generate(body, deadline)
        if response.status_code != 200:
            message = server_message(response)
            # The second one: SGLang loads an unloaded adapter again from its old path, where the files may be gone
            # (managers/tokenizer_manager.py, 0.5.23). The third one: it went during the request (lora/lora_registry.py
            # `acquire`, 0.5.23).
            if any(words in message for words in ("never been loaded", "implicitly load", "are not loaded")):
                raise AdapterLostError(
                    f"{self.base_url} no longer knows {lora_path!r}, although it had accepted it. It was "
                    "restarted, or another client unloads adapters there. "
                    f"The server answered: {message!r}"
                )
            raise GenerationError(
                f"{self.base_url} could not sample from {lora_path or 'the base model'!r} (HTTP "
                f"{response.status_code}). If it names a field, correct generation_kwargs; else look at its log. "
                f"The server answered: {message!r}"
            )
        try:
            with collector_paused():
                answer = response.json()
        except ValueError as error:
            raise GenerationError(
                f"{self.base_url} sent completions that are not valid JSON. Is it SGLang itself, and not a proxy?"
            ) from error
        return answer if isinstance(answer, list) else [answer]

    def lora_path(self, model: str) -> str | None:
        """SGLang's field names the adapter, by name; null is the base."""
        return None if model == self.capabilities.base_model else model

    async def chat(self, body: dict[str, Any], count: int, sampling: Sampling, deadline: Deadline) -> list[Completion]:
        raise GenerationError(
            "SGLang's chat route serves the base model for adapters that are named without a colon, so it is not "
            "used. Render the chat template in the rollout function and call generate() with token ids."
        )
