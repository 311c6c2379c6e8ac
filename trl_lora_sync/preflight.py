"""What is proved about a server before the first step: the right base, and that it loads and serves such an adapter.

A server reports no shapes. vLLM pads an adapter that is too small for it with zeros and answers 200; SGLang crashes
on a misfit. So names, dtype, vocabulary and the log-probabilities of a prompt are compared before a trial load.
"""

import itertools
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager

from trl_lora_sync.adapter.canonical import CanonicalAdapter, widened
from trl_lora_sync.adapter.store import StoredAdapter
from trl_lora_sync.engines.base import Deadline, PromptGroup, Sampling
from trl_lora_sync.engines.known import serve_command
from trl_lora_sync.errors import AdapterNotVisibleError, AdapterRejectedError, ServerSetupError
from trl_lora_sync.fleet_server import CLOSE_TIMEOUT_S, FleetServer
from trl_lora_sync.mixed_batches import score_base
from trl_lora_sync.transports import Transport
from trl_lora_sync.verify import PROBE_PROMPT, TrainedBase, Trial, base_gap

logger = logging.getLogger(__name__)

_TRIAL_PROMPT = PromptGroup(prompt=[0, 1, 2, 3], count=1)
_TRIAL_SAMPLING = Sampling.unrestricted(max_tokens=1, logprobs=0)


class Preflight:
    """The checks that a server passes before it samples for a run: each at the start, and again after its restart.

    Args:
        base: the trainer's base model; its probe is computed here, once, as a restart may come at any time.
        adapter: one as the trainer makes them, of which only the shapes are kept.
        is_strict: whether another base model than the trainer's is an error wherever it can be seen.
        transport: how adapters reach the servers.
        trials: what to prove servers with, one for each group of modules; empty to prove nothing.
    """

    def __init__(
        self,
        base: TrainedBase,
        adapter: CanonicalAdapter,
        transport: Transport,
        *,
        is_strict: bool,
        trials: Sequence[Trial] = (),
    ) -> None:
        self.trials = trials
        self._base = base.remembered()
        self._wider = widened(adapter)
        self._transport = transport
        self._is_strict = is_strict
        self._numbers = itertools.count(1)

    @property
    def base_logprobs(self) -> list[float]:
        """Of `PROBE_PROMPT`, as the trainer's base model computes them."""
        return self._base.logprobs(PROBE_PROMPT)[0]

    def check(self, server: FleetServer, deadline: Deadline) -> None:
        """Check dtype and base model against the trainer's.

        Raises:
            ServerSetupError: the server serves another model or computes in another dtype; what to change.
        """
        self._check_dtype(server)
        self._check_base(server, deadline)

    def _check_base(self, server: FleetServer, deadline: Deadline) -> None:
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
        if base.vocab_size and not engine.knows_token(base.vocab_size - 1, deadline):
            evidence = f"its vocabulary has fewer than the trainer's {base.vocab_size} tokens"
            raise self._other_base(server, base.name, evidence)
        server.base_logprobs = score_base(
            engine, deadline, is_plausible=lambda scores: not base_gap(base, scores).is_suspicious
        )
        gap = base_gap(base, server.base_logprobs)
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
            self._check_width(server, deadline)

    def _check_dtype(self, server: FleetServer) -> None:
        """Refuse an adapter that the server would cast to a dtype which holds other numbers; float32 loses nothing."""
        engine = server.engine.capabilities
        served, written = engine.dtype, str(self._wider.dtype).removeprefix("torch.")
        if served is not None and served != written and written != "float32":
            command = self._command(server, engine.base_root, ["--dtype", written])
            raise ServerSetupError(
                f"{server.base_url} was started with --dtype {served}, and the adapter is written in {written}, "
                f"the dtype of the trainer's base model. Both must compute in the same one. Restart the server with "
                f'{command}, or load the trainer\'s model in {served} and set lora_sync_dtype="{served}".'
            )

    def _check_width(self, server: FleetServer, deadline: Deadline) -> None:
        """Offer an adapter that is one wider than the trainer's; a server with the same base must refuse it."""
        probe = self._transport.write(f"width{next(self._numbers)}", self._wider, deadline)
        try:
            server.engine.load(server.form_of(probe), deadline)
        except AdapterRejectedError:
            return
        finally:
            wait([server.unload_later(probe.name)], timeout=CLOSE_TIMEOUT_S)
            self._transport.delete(probe, keep_name=probe.name in server.unconfirmed)
        raise self._other_base(server, self._wider.base_model, "its layers are wider than the trainer's")

    @contextmanager
    def on_trial(
        self, servers: Sequence[FleetServer], adapter: CanonicalAdapter, deadline: Deadline
    ) -> Iterator[StoredAdapter]:
        """Keep an adapter for the block, in which `servers` may load it, under a name that is not used again."""
        stored = self._transport.write(f"trial{next(self._numbers)}", adapter, deadline)
        try:
            yield stored
        finally:
            wait([server.unload_later(stored.name) for server in servers], timeout=CLOSE_TIMEOUT_S)
            is_known = any(stored.name in server.unconfirmed for server in servers)
            self._transport.delete(stored, keep_name=is_known)

    def try_out(
        self, server: FleetServer, stored: StoredAdapter, deadline: Deadline, trial: Trial | None = None
    ) -> None:
        """Load an adapter of the trainer's shapes and sample a token from it; to be unloaded by the caller.

        Args:
            trial: what `stored` was made from, which also proves that the server samples from what it loads. A server
                is proven once each of the `trials`, in their order, has been a proof.

        Raises:
            ServerSetupError: the server serves another model.
            AdapterRejectedError: it does not take such an adapter.
            VerificationError: it computes something else with it than the trainer.
        """
        try:
            server.load(stored, deadline)  # as each sync will, a pause included
            server.warm_up(stored, deadline)
            server.engine.generate(stored.name, [_TRIAL_PROMPT], _TRIAL_SAMPLING, deadline)
        except AdapterNotVisibleError:
            raise
        except AdapterRejectedError as error:
            evidence = "it refused an adapter of the trainer's shapes"
            words = str(error) if trial is None else f"{trial.advice} {error}".lstrip()
            raise self._other_base(server, self._wider.base_model, evidence, words) from error
        if trial is None:
            return
        was_proven = trial is self.trials[0] or server.is_proven
        found = server.verify(stored, trial.scores, deadline, trial)
        server.is_proven = was_proven and found.proves
        if not found.proves:
            logger.warning(
                "A trial adapter does not prove that %s samples from what it loads on %s, because its effect is too "
                "small beside the difference of the base models: %s. The first versions are verified instead, and "
                "lora_sync/verified stays 0 until one of them is a proof.",
                server.base_url,
                trial,
                found,
            )

    @staticmethod
    def _other_base(server: FleetServer, name: str | None, evidence: str, words: str = "") -> ServerSetupError:
        served = server.engine.capabilities
        return ServerSetupError(
            f"{server.base_url} serves {served.base_model!r} ({served.base_root}), which is not the base model "
            f"of the trainer, {name!r}: {evidence}. The adapter would be applied to the wrong weights. Restart the "
            f"server with the model that is being trained, {Preflight._command(server, name or 'MODEL')}, or point "
            f"vllm_server_base_url at the right server. {words}".rstrip()
        )

    @staticmethod
    def _command(server: FleetServer, model: str, engine_options: Sequence[str] = ()) -> str:
        address, served = server.address, server.engine.capabilities
        return serve_command(
            served.engine,
            model,
            served.serve_options,
            engine_options=engine_options,
            base_url=address.base_url,
            is_local=address.is_local,
        )


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
