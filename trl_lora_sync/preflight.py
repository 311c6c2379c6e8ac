"""What is proved about a server before the first step: the right base, and that it loads and serves such an adapter.

A server reports no shapes. vLLM pads an adapter that is too small for it with zeros and answers 200; SGLang dies of a
misfit. So names, dtype, vocabulary and the log-probabilities of a prompt are compared before a trial load.
"""

import logging
from collections.abc import Callable

from trl_lora_sync.adapter.canonical import CanonicalAdapter, widened
from trl_lora_sync.adapter.store import StoredAdapter
from trl_lora_sync.engines.base import Deadline, Engine, PromptGroup, Sampling
from trl_lora_sync.errors import AdapterNotVisibleError, AdapterRejectedError, ServerSetupError
from trl_lora_sync.transports import Transport
from trl_lora_sync.verify import PROBE_PROMPT, TrainedBase, base_gap

logger = logging.getLogger(__name__)

_TRIAL_PROMPT = PromptGroup(prompt=[0, 1, 2, 3], count=1)
_TRIAL_SAMPLING = Sampling(
    temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, max_tokens=1, logprobs=0
)


class Preflight:
    """The checks of one connected server.

    Args:
        engine: the server.
        transport: how adapters reach it.
        deadline: for all checks together.
        withdraw: unloads an adapter and deletes its files; never fails.
    """

    def __init__(
        self,
        engine: Engine,
        transport: Transport,
        *,
        deadline: Deadline,
        withdraw: Callable[[StoredAdapter], None],
    ) -> None:
        self._engine = engine
        self._transport = transport
        self._deadline = deadline
        self._withdraw = withdraw

    def run(self, adapter: CanonicalAdapter, base: TrainedBase) -> None:
        """Check the served base against the trainer's, then load and sample from the adapter and withdraw it.

        Raises:
            ServerSetupError: the server serves another model or computes in another dtype; what to change.
            AdapterRejectedError: it does not take an adapter of these shapes.
        """
        self._check_dtype(adapter)
        self._check_base(adapter, base)
        self._try_out(adapter)

    def _check_base(self, adapter: CanonicalAdapter, base: TrainedBase) -> None:
        served = self._engine.capabilities
        same_name = not base.name or is_same_model(base.name, (served.base_model, served.base_root))
        if not same_name:
            logger.warning(
                "The trainer's base model is %r, but %s serves %r (%s). If these are not the same weights, every "
                "completion comes from another policy than the one being trained.",
                base.name,
                self._engine.base_url,
                served.base_model,
                served.base_root,
            )
        if base.vocab_size and not self._engine.knows_token(base.vocab_size - 1, self._deadline):
            raise self._other_base(base.name, f"its vocabulary has fewer than the trainer's {base.vocab_size} tokens")
        gap = base_gap(base, self._engine.score(served.base_model, list(PROBE_PROMPT), self._deadline))
        if gap.is_suspicious and not served.survives_misfit:
            raise self._other_base(base.name, f"it computes other log-probabilities ({gap})")
        if gap.is_suspicious:
            logger.warning(
                "The base model at %s computes other log-probabilities than the trainer's: %s. Completions come from "
                "another policy than the one being trained.",
                self._engine.base_url,
                gap,
            )
            self._check_width(adapter)

    def _check_dtype(self, adapter: CanonicalAdapter) -> None:
        """Refuse an adapter that the server would cast to a dtype which holds other numbers; float32 loses nothing."""
        served, written = self._engine.capabilities.dtype, str(adapter.dtype).removeprefix("torch.")
        if served is not None and served != written and written != "float32":
            raise ServerSetupError(
                f"{self._engine.base_url} was started with --dtype {served}, and the adapter is written in {written}, "
                f"the dtype of the trainer's base model. Both must compute in the same one. Restart the server with "
                f'--dtype {written}, or load the trainer\'s model in {served} and set lora_sync_dtype="{served}".'
            )

    def _check_width(self, adapter: CanonicalAdapter) -> None:
        """Offer an adapter that is one wider than the trainer's; a server with the same base must refuse it."""
        probe = self._transport.write("width", widened(adapter), self._deadline)
        try:
            self._engine.load(probe, self._deadline)
        except AdapterRejectedError:
            return
        finally:
            self._withdraw(probe)
        raise self._other_base(adapter.base_model, "its layers are wider than the trainer's")

    def _try_out(self, adapter: CanonicalAdapter) -> None:
        trial = self._transport.write(0, adapter, self._deadline)
        try:
            self._engine.load(trial, self._deadline)
            self._engine.warm_up(trial, self._deadline)
            self._engine.generate(trial.name, [_TRIAL_PROMPT], _TRIAL_SAMPLING, self._deadline)
        except AdapterNotVisibleError:
            raise
        except AdapterRejectedError as error:
            evidence = "it refused an adapter of the trainer's shapes"
            raise self._other_base(adapter.base_model, evidence, str(error)) from error
        finally:
            self._withdraw(trial)

    def _other_base(self, name: str | None, evidence: str, words: str = "") -> ServerSetupError:
        served = self._engine.capabilities
        return ServerSetupError(
            f"{self._engine.base_url} serves {served.base_model!r} ({served.base_root}), which is not the base model "
            f"of the trainer, {name!r}: {evidence}. The adapter would be applied to the wrong weights. "
            "Restart the server with the model that is being trained, or point vllm_server_base_url at the right "
            f"server. {words}".rstrip()
        )


def is_same_model(ours: str, theirs: tuple[str, ...]) -> bool:
    """Whether the trainer's and the server's words for the base model probably mean the same checkpoint.

    Compared by the last path component, because a mount or a hub organisation may differ. Text only: what a server
    says is never opened as a path.
    """
    return _model_name(ours) in {_model_name(name) for name in theirs}


def _model_name(text: str) -> str:
    # A snapshot in the Hugging Face cache ends in a commit hash: .../models--Qwen--Qwen3-8B/snapshots/<hash>
    repository, _, _ = text.partition("/snapshots/")
    return repository.rstrip("/").rpartition("/")[2].rpartition("--")[2].lower()
