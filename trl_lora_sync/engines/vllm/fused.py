"""A vLLM server that adds adapters to its weights: the trainer's side of `engine_plugins.vllm_fused`.

Requests name the base model, and the adapter in a header; the server puts it into its weights if it is not there
already. The same header of each answer must name that adapter.
"""

from collections.abc import Sequence
from typing import Any

import httpx

from trl_lora_sync.adapter.store import NextVersion, StoredAdapter
from trl_lora_sync.engine_plugins.safetensors_file import DTYPES
from trl_lora_sync.engine_plugins.version_note import NOTE_FORM
from trl_lora_sync.engine_plugins.vllm_fused import BASE, HEADER, PROTOCOL, ROUTE
from trl_lora_sync.engines.base import Deadline
from trl_lora_sync.engines.http import json_object, server_message
from trl_lora_sync.engines.vllm.engine import VLLMEngine, paths_by_name
from trl_lora_sync.errors import (
    AdapterRejectedError,
    DeadlineExceededError,
    LoRASyncError,
    ServerSetupError,
    WrongPolicyError,
)

# So that the server gives up before we do, and reports why.
_SHARE_FOR_WAITING = 0.9
# The server refuses a day and more.
_LONGEST_WAIT_S = 86399.0
# Words of `engine_plugins.weights_lock` and of `fused_middleware`, in their refusals with HTTP 409.
_BUSY = ("other requests were still being answered", "engine was still busy", "requests still use it")
_ASLEEP = "server sleeps"


class VLLMFusedEngine(VLLMEngine):
    """One vLLM server with fused serving; see the `Engine` protocol."""

    async def _check_serving(self, deadline: Deadline) -> dict[str, Any]:
        response = await self._retried("GET", ROUTE, deadline)
        message = server_message(response)
        if response.status_code == 404:
            raise ServerSetupError(
                f"The vLLM server at {self.base_url} does not add adapters to its weights. Restart it with "
                f"{self._serve_command()}, "
                f'or set lora_sync_serving="runtime". The server answered: {message!r}'
            )
        if response.status_code != 200:
            raise ServerSetupError(
                f"Fused serving does not work on the vLLM server at {self.base_url} (HTTP {response.status_code}). "
                f"The server answered: {message!r}"
            )
        state = json_object(response, ServerSetupError)
        protocol = state.get("protocol")
        # An older or newer plugin may mean something else by the same routes.
        if protocol != PROTOCOL:
            raise ServerSetupError(
                f"The server at {self.base_url} has version {protocol!r} of the fused routes, and this trainer "
                f"version {PROTOCOL}. Install the same trl-lora-sync next to both."
            )
        checks_payload, workers = state.get("checks") == NOTE_FORM, state.get("workers")
        return {
            "is_fused": True,
            "checks_payload": checks_payload,
            # The note of a version names the memory of the GPU, and workers with another form of note cannot read it.
            "gpus": tuple(workers[0].get("gpus", ())) if checks_payload and workers else (),
            "lora_dtype": DTYPES.get(workers[0].get("dtype", "")) if workers else None,
        }

    def _serve_command(self, *options: str, engine_options: Sequence[str] = ()) -> str:
        return super()._serve_command("--fused", *options, engine_options=engine_options)

    # Adapters

    async def loaded(self, deadline: Deadline) -> dict[str, str]:
        return _adapters_in(await self._get(ROUTE, deadline))

    async def reserve(self, coming: NextVersion, deadline: Deadline) -> bool:
        """See `Engine`. The server pauses its engine once the version is being written."""
        is_reserved = await super().reserve(coming, deadline)
        if self._reservation is not None:
            coming.reservations.send_at_begin(coming.name, self._reservation.number, self._reservation.socket)
        return is_reserved

    async def _load_once(self, adapter: StoredAdapter, deadline: Deadline) -> dict[str, str]:
        wait_s = min(deadline.remaining_s() * _SHARE_FOR_WAITING, _LONGEST_WAIT_S)
        body = {"path": adapter.server_path, "timeout_s": wait_s}
        # Unlike vLLM's own route, this one accepts a repeated request, if the adapter is in the weights already.
        response = await self._request("PUT", f"{ROUTE}/{adapter.name}", deadline, body=body)
        message = server_message(response)
        if response.status_code != 200:
            raise self._load_error(adapter, response.status_code, message)
        answer = json_object(response, AdapterRejectedError)
        found = (answer.get("current"), answer.get("path"))
        if found != (adapter.name, adapter.server_path):
            raise AdapterRejectedError(
                f"{self.base_url} accepted the adapter {adapter.name!r} from {adapter.server_path!r} but holds "
                f"{found!r}. Does another process use this server, or does a proxy spread requests over several?"
            )
        return _adapters_in(answer)

    def _load_error(self, adapter: StoredAdapter, status: int, message: str) -> LoRASyncError:
        # Not as a rejection, because nothing is wrong with the adapter, and the fleet may go on without this server.
        if status == 409 and any(words in message for words in _BUSY):
            return DeadlineExceededError(
                f"{self.base_url} did not put the adapter {adapter.name!r} into its weights, because it still answers "
                "requests of other clients. Fused serving changes the weights only while no request runs. End these "
                f"requests, or raise lora_sync_timeout to wait longer. The server answered: {message!r}"
            )
        if status == 409 and _ASLEEP in message:
            return ServerSetupError(
                f"The vLLM server at {self.base_url} is asleep, so the adapter {adapter.name!r} cannot be put into its "
                f"weights. It must be awake while it is synced. Run `curl -X POST {self.base_url}/wake_up`, and keep "
                f"other clients from sending /sleep. The server answered: {message!r}"
            )
        return super()._load_error(adapter, status, message)

    async def _ask_to_unload(self, adapter_name: str, deadline: Deadline) -> httpx.Response:
        return await self._request("DELETE", f"{ROUTE}/{adapter_name}", deadline)

    # Sampling

    def _name_in(self, model: str) -> str:
        return self.capabilities.base_model

    async def _post_sampling(self, path: str, body: dict[str, Any], model: str, deadline: Deadline) -> httpx.Response:
        base = self.capabilities.base_model
        wanted = BASE if model == base else model
        response = await self._retried("POST", path, deadline, body={**body, "model": base}, headers={HEADER: wanted})
        found = response.headers.get(HEADER)
        if response.status_code == 200 and found != wanted:
            raise WrongPolicyError(
                f"{self.base_url} answered with completions of {found!r} instead of {wanted!r}. They were "
                f"not used. Is there a proxy in between that drops the header {HEADER}?"
            )
        return response

    def _check_policy(self, content: dict[str, Any], model: str, *, names_model: bool = True) -> None:
        """The header, which has been checked, is more exact; the model in the answer is the base's."""
        super()._check_policy(content, self.capabilities.base_model, names_model=names_model)


def _adapters_in(answer: dict[str, Any]) -> dict[str, str]:
    return paths_by_name(answer.get("adapters")) or {}
