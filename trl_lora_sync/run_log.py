"""The log of a run in its output_dir: a header with what was run, then one line of JSON per log entry.

TRL writes its own log history with a checkpoint only. `trl-lora-sync report` reads this file, also of a running job.
"""

import json
import logging
import platform
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_lora_sync._trl import record_metrics
from trl_lora_sync.metrics import GENERATE, LOG_FILE

if TYPE_CHECKING:
    from trl_lora_sync.trainers import LoRASyncTrainer

logger = logging.getLogger(__name__)

_PACKAGES = ("trl-lora-sync", "trl", "transformers", "peft", "torch")
# Left out because they name folders and hosts, and the file is shown to others.
_PRIVATE = frozenset({"lora_sync_dir", "lora_sync_server_dir"})
_SETTINGS = (
    "vllm_sync_strategy", "vllm_server_engine", "vllm_server_sleep", "learning_rate", "lr_scheduler_type", "beta",
    "loss_type", "num_generations", "per_device_train_batch_size", "gradient_accumulation_steps",
    "steps_per_generation", "num_iterations", "max_completion_length", "temperature", "seed",
)  # fmt: skip


class RunLog(TrainerCallback):  # type: ignore[misc]
    """Writes the log on process 0, and gives the trainer the seconds of generation in each step.

    A second `train()` appends to the file, and so does a run that was resumed; each begins with a header. Nothing that
    happens to the file ends a training.
    """

    def __init__(self, trainer: "LoRASyncTrainer") -> None:
        self._trainer = trainer
        self._path = Path(trainer.args.output_dir) / LOG_FILE
        self._has_begun = False
        self._has_warned = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # Every process gets the events, and would write the same lines.
        self._has_begun = state.is_world_process_zero
        if self._has_begun:
            self._append(header(self._trainer, state))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer.vllm_generation.take_generate_s()  # that of an evaluation between two steps

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        seconds = self._trainer.vllm_generation.take_generate_s()
        if seconds is not None:
            record_metrics(self._trainer, {GENERATE: seconds}, latest=frozenset())

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._has_begun:
            # The history, not `logs`: other callbacks take entries out of that.
            self._append({"time": _now(), **state.log_history[-1]})

    def _append(self, entry: dict[str, Any]) -> None:
        try:
            line = json.dumps(entry, default=str).encode() + b"\n"
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # For reading too, to see how the file ends. Writing appends wherever the reading has stopped.
            with self._path.open("a+b") as file:
                # A run that was killed or met a full disk may have left a part of a line.
                if file.tell() and (file.seek(-1, 2), file.read(1))[1] != b"\n":
                    line = b"\n" + line
                file.write(line)
        # The last two are from `json`: a key of another type, or a value that contains itself.
        except (OSError, TypeError, ValueError) as error:
            if not self._has_warned:
                logger.warning(
                    "%s cannot be written (%s). The training goes on; `trl-lora-sync report` will lack these steps.",
                    self._path,
                    error,
                )
            self._has_warned = True


def header(trainer: "LoRASyncTrainer", state: TrainerState) -> dict[str, Any]:
    """What was run, in which versions and with which settings; for process 0."""
    args, model = trainer.args, trainer.model
    lora = model.peft_config[model.active_adapter]
    ours = [name for name in vars(args) if name.startswith("lora_sync_") and name not in _PRIVATE]
    return {
        "started": _now(),
        "from_step": state.global_step,
        "max_steps": state.max_steps,
        "model": lora.base_model_name_or_path or model.config.name_or_path,
        "lora_rank": max([lora.r, *lora.rank_pattern.values()]),
        "lora_alpha": lora.lora_alpha,
        **trainer.vllm_generation.engine_summary,
        "processes": trainer.accelerator.num_processes,
        "versions": {name: _version(name) for name in _PACKAGES} | {"python": platform.python_version()},
        "settings": {name: getattr(args, name) for name in (*_SETTINGS, *ours) if hasattr(args, name)},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a source tree
        return None


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
