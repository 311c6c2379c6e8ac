"""The checks of one server that `doctor` is connected to."""

import contextlib
import re
import shlex
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_lora_sync.cli.diagnosis import NOTE, OK, PROBLEM, Case, Diagnosis, model_folder
from trl_lora_sync.cli.peft_config import served_modules
from trl_lora_sync.engines.registry import ENGINES, restart_command
from trl_lora_sync.mixed_batches import SharedCPUServerError, score_base
from trl_lora_sync.places import default_sync_dir, is_local_url
from trl_lora_sync.runtime import run
from trl_lora_sync.verify import PROBE_PROMPT, BaseGap, Scores, compare, mean_distance

if TYPE_CHECKING:
    from trl_lora_sync.adapter.canonical import CanonicalAdapter
    from trl_lora_sync.adapter.saved import SavedAdapter
    from trl_lora_sync.adapter.store import StoredAdapter
    from trl_lora_sync.engines.base import Engine
    from trl_lora_sync.transports import Transport

_BEYOND_ANY_RANK = 1_000_000
# Mean distance of log-probabilities beyond which two servers do not serve the same weights.
_OTHER_BASE = 0.5


class Examination:
    """The checks of one connected server."""

    def __init__(self, engine: "Engine", case: Case, diagnosis: Diagnosis, scores: list[list[float]]) -> None:
        self._engine = engine
        self._case = case
        self._diagnosis = diagnosis
        self._scores = scores
        self._served = engine.capabilities
        self._spec = ENGINES[self._served.engine]
        self._transport: Transport | None = None

    def run(self) -> None:
        served, found = self._served, self._diagnosis
        found.engine, found.version, found.base_model = served.engine, served.version, served.base_model
        how = (
            'they are added to the weights; set lora_sync_serving="fused"' if served.is_fused else "they can be loaded"
        )
        found.add("adapters at run time", OK, how)
        self._check_version()
        self._check_logprobs_mode()
        self._check_modules()
        self.check_gpus()
        self._check_leftovers()
        with found.reporting("base model"):
            self._check_base()
        try:
            with found.reporting("adapter" if self._case.saved else "rank"):
                if self._case.saved is not None:
                    self._check_adapter(self._case.saved)
                elif self._case.config is not None:
                    self._check_rank(self._case.config)
        finally:
            if self._transport is not None:
                run(self._transport.close())

    def _check_version(self) -> None:
        known = self._spec.versions
        doubt = known.doubt(self._served.version)
        if doubt:
            self._diagnosis.add("version", NOTE, f"{doubt}; verify an adapter with --adapter")
        else:
            ran = self._served.version in known.run
            self._diagnosis.add("version", OK, "run with this release" if ran else "known from its source")

    def _check_logprobs_mode(self) -> None:
        mode = self._served.logprobs_mode
        if mode == "raw_logprobs":
            fix = self._spec.processed_logprobs.format(command=restart_command(self._engine))
            self._diagnosis.add(
                "log-probabilities",
                PROBLEM,
                "they come before the temperature, and TRL compares them with its own after it, so importance ratios "
                f"are wrong at any temperature but 1. {fix}",
            )
        elif mode == "unknown":
            self._diagnosis.add("log-probabilities", NOTE, "unknown whether they come before or after the temperature")
        else:
            self._diagnosis.add("log-probabilities", OK, "after the temperature, as TRL compares them")

    def check_gpus(self) -> None:
        """Whether a server on this host sees the GPUs that a trainer in this shell may use."""
        from trl_lora_sync.engine_plugins.cuda_ipc import visible_gpus

        ours = visible_gpus() if self._served.gpus and is_local_url(self._diagnosis.url) else []
        if not ours:
            return
        unseen = [gpu for gpu in ours if gpu not in self._served.gpus]
        if unseen:
            words = (
                f"the server does not see {', '.join(unseen)}. From a trainer there it gets versions through a file, "
                f"which takes longer. Restart it with {restart_command(self._engine)}, or add that GPU to its "
                "CUDA_VISIBLE_DEVICES after its own."
            )
            self._diagnosis.add("GPU to GPU", NOTE, words)
        else:
            self._diagnosis.add("GPU to GPU", OK, "the server sees every GPU that a trainer in this shell does")

    def _check_modules(self) -> None:
        if self._case.config is None or not self._served.target_modules:
            return
        targets = self._case.saved.target_modules if self._case.saved else self._case.config.get("target_modules")
        wanted = served_modules(targets)
        missing = [name for name in wanted if not self._served.serves_module(name)]
        if missing:
            command = restart_command(self._engine, engine_options=["--lora-target-modules", *wanted])
            words = f"{', '.join(missing)} cannot be adapted. Restart the server with {command}."
            self._diagnosis.add("target modules", PROBLEM, words)
        else:
            self._diagnosis.add("target modules", OK, f"{', '.join(wanted)} can be adapted")

    def _check_leftovers(self) -> None:
        with self._diagnosis.reporting("loaded adapters"):
            names = sorted(run(self._engine.loaded(self._case.deadline("Listing adapters"))))
            if names:
                words = (
                    f"{', '.join(names)}: of a live run, or left behind by a dead one. "
                    f"`{self._sweep_command()} --dry-run` lists which; without --dry-run it removes leftovers"
                )
                self._diagnosis.add("loaded adapters", NOTE, words)
            else:
                self._diagnosis.add("loaded adapters", OK, "none")

    def _sweep_command(self) -> str:
        options = {"--dir": self._case.folder, "--server-dir": self._case.server_folder}
        given = [part for name, value in options.items() if value is not None for part in (name, str(value))]
        return shlex.join(["trl-lora-sync", "sweep", self._diagnosis.url, *given])

    def _check_base(self) -> None:
        try:
            score = run(
                score_base(
                    self._engine,
                    self._case.deadline("Scoring a prompt with the base model"),
                    is_plausible=lambda found: not self._scores or mean_distance(found, self._scores[0]) <= _OTHER_BASE,
                )
            )
        except SharedCPUServerError as error:
            self._diagnosis.add("base model", NOTE, str(error))
            return
        if self._scores and mean_distance(score, self._scores[0]) > _OTHER_BASE:
            self._diagnosis.add(
                "base model",
                PROBLEM,
                f"it gives other log-probabilities than the first server's (mean distance "
                f"{mean_distance(score, self._scores[0]):.3f}). Serve the same model everywhere.",
            )
        else:
            self._diagnosis.add("base model", OK, "it scores a prompt of token ids")
        self._scores.append(score)

    def _check_rank(self, config: dict[str, Any]) -> None:
        from trl_lora_sync.adapter.support import saved_rank

        if self._served.is_fused:
            self._diagnosis.add("rank", OK, f"{saved_rank(config)} fits, as any does")
            return
        rank, reserved = saved_rank(config), self._reserved_rank()
        if reserved is None:
            words = "not checked: the server does not report it. Give --adapter, or --dir with a folder that it sees."
            self._diagnosis.add("rank", NOTE, words)
        elif rank > reserved:
            command = restart_command(self._engine, "--lora-rank", str(rank))
            words = f"the server reserves {reserved}, and the adapter has {rank}. Restart it with {command}."
            self._diagnosis.add("rank", PROBLEM, words)
        else:
            self._diagnosis.add("rank", OK, f"{rank} fits the {reserved} that the server reserves")

    def _reserved_rank(self) -> int | None:
        """The server's --max-lora-rank, if it reports it.

        vLLM names it when it refuses an adapter of a rank beyond any, which it does before it reads a tensor.
        Source: vllm/lora/peft_helper.py `validate_legal`, 0.22 to 0.33.
        """
        from trl_lora_sync.errors import LoRASyncError

        if self._served.max_lora_rank is not None:
            return self._served.max_lora_rank
        transport = self._open_transport()
        if transport is None:
            return None
        run(transport.open())
        stored = run(transport.write("rank", _empty_adapter(_BEYOND_ANY_RANK)))
        try:
            run(self._engine.load(stored, self._case.deadline("Asking for the rank")))
        except LoRASyncError as error:
            told = re.search(r"max_lora_rank[ =:]+(\d+)", str(error))
            return int(told[1]) if told else None
        finally:
            run(self._engine.unload(stored.name, self._case.deadline("Unloading")))
            run(transport.delete(stored))
        return None

    def _check_adapter(self, saved: "SavedAdapter") -> None:
        transport = self._open_transport()
        if transport is None:
            self._diagnosis.add(
                "adapter", NOTE, "not loaded: the server is elsewhere. Give --dir, a folder that it sees too."
            )
            return
        with self._loaded(transport, self._canonical(saved)) as stored:
            self._diagnosis.add("adapter", OK, f"loaded as {stored.name}, rank {stored.rank}")
            try:
                base = run(score_base(self._engine, self._case.deadline("Scoring")))
            except SharedCPUServerError as error:
                self._diagnosis.add("effect", NOTE, str(error))
                return
            adapted = run(self._engine.score(stored.name, list(PROBE_PROMPT), self._case.deadline("Scoring")))
            self._judge_change(saved, mean_distance(base, adapted))
            self._compare_with_peft(Scores(base=base, adapted=adapted))

    def _canonical(self, saved: "SavedAdapter") -> "CanonicalAdapter":
        from trl_lora_sync.adapter.saved import base_shapes

        if not self._served.needs_fused_siblings:
            return saved.canonical()
        base = self._base_folder()
        return saved.canonical(shapes=base_shapes(base) if base else {})

    def _base_folder(self) -> Path | None:
        """The base model on this host: as given, as the adapter names it, or as a server on this host does."""
        if self._case.base is None and is_local_url(self._diagnosis.url):
            return model_folder(self._served.base_root)
        return self._case.base

    def _judge_change(self, saved: "SavedAdapter", change: float) -> None:
        if saved.is_zero:
            self._diagnosis.add("effect", NOTE, "lora_B is zero, as before the first step: no difference is expected")
        elif change == 0.0:
            self._diagnosis.add(
                "effect",
                PROBLEM,
                "the server answers as if there were no adapter: its log-probabilities are the base model's. Either no "
                "layer of the served model has the names in the adapter, or the adapter is too small to show.",
            )
        else:
            words = f"the adapter moves the server's log-probabilities by {change:.4f} on average"
            self._diagnosis.add("effect", OK, words)

    def _compare_with_peft(self, served: Scores) -> None:
        base = self._base_folder()
        if base is None or self._case.adapter is None:
            self._diagnosis.add("PEFT", NOTE, "not compared: give --model, the folder of the base model")
            return
        try:
            trained, spread = _peft_scores(base, self._case.adapter)
        except (ImportError, OSError, RuntimeError, ValueError) as error:  # a folder of another model, or of none
            why = str(error).strip().partition("\n")[0]
            self._diagnosis.add("PEFT", NOTE, f"not compared: PEFT cannot load the adapter on {base}: {why}")
            return
        evidence = compare(served, trained)
        words = (
            f"mean |served - PEFT| {evidence.gap_mean:.4f} with the adapter and {evidence.base_gap:.4f} without; the "
            f"adapter itself moves PEFT's by {evidence.trained_change:.4f}"
        )
        if BaseGap(mean=evidence.base_gap, spread=spread).is_suspicious:
            self._diagnosis.add("PEFT", PROBLEM, f"{words}. The server serves another base model than {base}.")
        elif evidence.contradicts:
            fix = (
                "The server applies another adapter or another scaling, or leaves out layers, as vLLM does with "
                "--lora-target-modules."
            )
            self._diagnosis.add("PEFT", PROBLEM, f"{words}. {fix}")
        else:
            self._diagnosis.add("PEFT", OK, words)

    # Putting an adapter on the server

    def _open_transport(self) -> "Transport | None":
        from trl_lora_sync.transports import DiskTransport, HTTPTransport

        case, is_local = self._case, is_local_url(self._diagnosis.url)
        if case.folder is None and not is_local:
            is_sent = self._served.takes_tensors or self._served.takes_pushes
            self._transport = HTTPTransport(default_sync_dir(True, ".")) if is_sent else None
        else:
            root = case.folder or default_sync_dir(is_local, ".")
            self._transport = DiskTransport(root, server_root=case.server_folder)
        return self._transport

    @contextlib.contextmanager
    def _loaded(self, transport: "Transport", adapter: "CanonicalAdapter") -> Iterator["StoredAdapter"]:
        """An adapter that is on the server while the block lasts; what stays there all the same is reported."""
        from trl_lora_sync.startup_checks import load_and_sample

        run(transport.open())
        stored = run(transport.write("doctor", adapter))
        try:
            deadline = self._case.deadline("Loading the adapter and sampling from it")
            run(load_and_sample(self._engine, self._engine, stored, deadline))
            yield stored
        finally:
            run(self._engine.unload(stored.name, self._case.deadline("Unloading the adapter")))
            with self._diagnosis.reporting("clean-up"):
                left = stored.name in run(self._engine.loaded(self._case.deadline("Listing adapters")))
                if left:
                    words = f"{stored.name} could not be unloaded; look at the server's log, or restart it"
                    self._diagnosis.add("clean-up", PROBLEM, words)
                else:
                    self._diagnosis.add("clean-up", OK, "the adapter is unloaded and its files are deleted")


def _empty_adapter(rank: int) -> "CanonicalAdapter":
    import torch

    from trl_lora_sync.adapter.canonical import CanonicalAdapter

    return CanonicalAdapter(tensors={}, rank=rank, dtype=torch.float32, target_modules=("q_proj",))


@cache  # the same for all servers
def _peft_scores(base: Path, adapter: Path) -> tuple[Scores, float]:
    """PEFT's log-probabilities of the probe prompt, and their spread over the vocabulary; on the CPU."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    from trl_lora_sync.scoring import adapter_logprobs, base_logprobs

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report is what is to be read
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), adapter)
        without, spread = base_logprobs(model, PROBE_PROMPT)
        return Scores(base=without, adapted=adapter_logprobs(model, PROBE_PROMPT)), spread
