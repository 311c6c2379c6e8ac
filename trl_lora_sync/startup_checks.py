"""What is checked of a server at the start and after its restart: the right base, and that it serves such an adapter.

A server reports no shapes. vLLM pads an adapter that is too small for it with zeros and answers 200; SGLang crashes
on a misfit. So names, dtype, vocabulary and the log-probabilities of a prompt are compared before a trial load.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from trl_lora_sync.adapter.canonical import CanonicalAdapter, common_form, widened
from trl_lora_sync.adapter.store import StoredAdapter
from trl_lora_sync.engines.base import Deadline, Engine, PromptGroup, Sampling
from trl_lora_sync.engines.registry import restart_command
from trl_lora_sync.errors import AdapterNotVisibleError, AdapterRejectedError, ServerSetupError
from trl_lora_sync.ledger import VersionLedger
from trl_lora_sync.mixed_batches import score_base
from trl_lora_sync.runtime import offload
from trl_lora_sync.transports import Transport
from trl_lora_sync.verify import TrainedBase, Trial, base_gap

if TYPE_CHECKING:
    from trl_lora_sync.server_handle import ServerHandle

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TRIAL_PROMPT = PromptGroup(prompt=[0, 1, 2, 3], count=1)
_TRIAL_SAMPLING = Sampling.unrestricted(max_tokens=1, logprobs=0)


class StartupChecks:
    """The checks that a server passes before it samples for a run: each at the start, and again after its restart.

    Args:
        base: the trainer's base model; its probe has been computed already, as a restart may come at any time.
        adapter: one as the trainer makes them, of which only the shapes are kept.
        clean_up_s: how long the unload of a trial adapter is waited for.
        is_strict: whether another base model than the trainer's is an error wherever it can be seen.
        transport: how adapters reach the servers.
        ledger: which server has which version.
        trials: what to prove servers with, one for each group of modules; empty to prove nothing.
    """

    def __init__(
        self,
        base: TrainedBase,
        adapter: CanonicalAdapter,
        transport: Transport,
        ledger: VersionLedger,
        *,
        clean_up_s: float,
        is_strict: bool,
        trials: Sequence[Trial] = (),
    ) -> None:
        self._trials = trials
        self._base = base
        self._wider = widened(adapter)
        self._transport = transport
        self._ledger = ledger
        self._clean_up_s = clean_up_s
        self._is_strict = is_strict
        self._numbers = itertools.count(1)

    async def check(self, server: "ServerHandle", deadline: Deadline) -> list[float]:
        """Check dtype and base model against the trainer's.

        Returns:
            Log-probabilities of `PROBE_PROMPT` by the served base model.

        Raises:
            ServerSetupError: the server serves another model or computes in another dtype; what to change.
        """
        self._check_dtype(server)
        return await self._check_base(server, deadline)

    async def _check_base(self, server: "ServerHandle", deadline: Deadline) -> list[float]:
        base, engine = self._base, server.engine
        served = engine.capabilities
        same_name = not base.name or is_same_model(base.name, (served.base_model, served.base_root))
        if not same_name:
            logger.warning(
                "The trainer's base model is %r, but %s serves %r (%s). If these are not the same weights, every "
                "completion comes from another policy than the one being trained.",
                base.name,
                server.base_url,
                served.base_model,
                served.base_root,
            )
        if base.vocab_size and not await engine.knows_token(base.vocab_size - 1, deadline):
            evidence = f"its vocabulary has fewer than the trainer's {base.vocab_size} tokens"
            raise self._other_base(server, base.name, evidence)
        scores = await score_base(
            engine, deadline, is_plausible=lambda scores: not base_gap(base, scores).is_suspicious
        )
        gap = base_gap(base, scores)
        if gap.is_suspicious and (self._is_strict or not served.survives_misfit):
            evidence = f"it computes other log-probabilities ({gap})"
            relaxed = 'If they are meant to differ, set lora_sync_verify="off".' if served.survives_misfit else ""
            raise self._other_base(server, base.name, evidence, relaxed)
        if gap.is_suspicious:
            logger.warning(
                "The base model at %s computes other log-probabilities than the trainer's: %s. Completions come from "
                "another policy than the one being trained.",
                server.base_url,
                gap,
            )
            await self._check_width(server, deadline)
        return scores

    def _check_dtype(self, server: "ServerHandle") -> None:
        """Refuse an adapter that the server would cast to a dtype which holds other numbers; float32 loses nothing."""
        engine = server.engine.capabilities
        served, written = engine.dtype, str(self._wider.dtype).removeprefix("torch.")
        if served is not None and served != written and written != "float32":
            command = restart_command(server.engine, engine_options=["--dtype", written])
            raise ServerSetupError(
                f"{server.base_url} was started with --dtype {served}, and the adapter is written in {written}, "
                f"the dtype of the trainer's base model. Both must compute in the same one. Restart the server with "
                f'{command}, or load the trainer\'s model in {served} and set lora_sync_dtype="{served}".'
            )

    async def _check_width(self, server: "ServerHandle", deadline: Deadline) -> None:
        """Offer an adapter that is one wider than the trainer's; a server with the same base must refuse it."""
        async with self._stored("width", [server], self._wider, deadline) as stored:
            try:
                await server.load(stored, deadline)
            except AdapterRejectedError:
                return
        raise self._other_base(server, self._wider.base_model, "its layers are wider than the trainer's")

    async def prove(self, servers: Sequence["ServerHandle"], deadline: Deadline) -> None:
        """Have servers load and sample from each of the trials, and compare what they compute with the trainer.

        Raises:
            ServerSetupError: a server serves another model.
            AdapterRejectedError: it does not take such an adapter.
            VerificationError: it computes something else with it than the trainer.
        """
        form = common_form(server.engine.capabilities.form for server in servers)
        for number, trial in enumerate(self._trials):
            adapter = await offload(partial(trial.read, form))
            async with self._stored("trial", servers, adapter, deadline) as stored:
                await each(servers, partial(self._prove, stored, trial, number == 0, deadline))

    async def _prove(
        self, stored: StoredAdapter, trial: Trial, is_first: bool, deadline: Deadline, server: "ServerHandle"
    ) -> None:
        await self._smoke_test(stored, deadline, server, trial)
        await server.verify_trial(stored, trial, deadline, is_first=is_first)

    async def smoke_test(
        self, servers: Sequence["ServerHandle"], adapter: CanonicalAdapter, deadline: Deadline
    ) -> None:
        """Have servers load an adapter of the trainer's shapes, and sample a token from it; errors as of `prove`."""
        async with self._stored("trial", servers, adapter, deadline) as stored:
            await each(servers, partial(self._smoke_test, stored, deadline))

    async def _smoke_test(
        self, stored: StoredAdapter, deadline: Deadline, server: "ServerHandle", trial: Trial | None = None
    ) -> None:
        try:
            await load_and_sample(server, server.engine, stored, deadline)  # as each sync will, a pause included
        except AdapterNotVisibleError:
            raise
        except AdapterRejectedError as error:
            evidence = "it refused an adapter of the trainer's shapes"
            message = str(error) if trial is None else f"{trial.advice} {error}".lstrip()
            raise self._other_base(server, self._wider.base_model, evidence, message) from error

    @asynccontextmanager
    async def _stored(
        self, kind: str, servers: Sequence["ServerHandle"], adapter: CanonicalAdapter, deadline: Deadline
    ) -> AsyncIterator[StoredAdapter]:
        """Keep an adapter for the block, in which `servers` may load it, under a name that is not used again."""
        stored = await self._transport.write(f"{kind}{next(self._numbers)}", adapter, deadline)
        try:
            yield stored
        finally:
            await asyncio.wait([server.unload_later(stored.name) for server in servers], timeout=self._clean_up_s)
            await self._transport.delete(stored, keep_name=not self._ledger.is_gone(stored.name))

    @staticmethod
    def _other_base(server: "ServerHandle", name: str | None, evidence: str, words: str = "") -> ServerSetupError:
        served = server.engine.capabilities
        restart = restart_command(server.engine, model=name or "MODEL")
        return ServerSetupError(
            f"{server.base_url} serves {served.base_model!r} ({served.base_root}), which is not the base model "
            f"of the trainer, {name!r}: {evidence}. The adapter would be applied to the wrong weights. Restart the "
            f"server with the model that is being trained, {restart}, or point "
            f"vllm_server_base_url at the right server. {words}".rstrip()
        )


async def load_and_sample(
    server: "ServerHandle | Engine", engine: Engine, stored: StoredAdapter, deadline: Deadline
) -> None:
    """Load an adapter and sample a token from it, as the start and `doctor` do; errors as of `Engine`.

    Args:
        server: what loads it on `engine`.
    """
    await server.load(stored, deadline)
    await server.warm_up(stored, deadline)
    await engine.generate(stored.name, [_TRIAL_PROMPT], _TRIAL_SAMPLING, deadline)


async def each(servers: Sequence["ServerHandle"], act: Callable[["ServerHandle"], Awaitable[T]]) -> list[T]:
    """Do the same on all servers at the same time; wait for all, then raise the first error."""
    outcomes = await asyncio.gather(*map(act, servers), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes  # type: ignore[return-value]


def is_same_model(ours: str, theirs: tuple[str, ...]) -> bool:
    """Whether the trainer's and the server's words for the base model probably mean the same checkpoint.

    Compared by the last path component, because a mount or a hub organisation may differ. Text only: a server's
    answer is never opened as a path.
    """
    return _model_name(ours) in {_model_name(name) for name in theirs}


def _model_name(text: str) -> str:
    # A snapshot in the Hugging Face cache ends in a commit hash: .../models--Qwen--Qwen3-8B/snapshots/<hash>
    repository, _, _ = text.partition("/snapshots/")
    return repository.rstrip("/").rpartition("/")[2].rpartition("--")[2].lower()
