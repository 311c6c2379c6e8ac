"""The list of checks on one server for `doctor`, which knows no trainer but what its input has of one."""

import json
import shlex
import warnings
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from trl_lora_sync.addresses import default_sync_dir, is_local_url
from trl_lora_sync.checks.finding import NOTE, OK, PROBLEM
from trl_lora_sync.checks.verify import PROBE_PROMPT, Scores, TrainedBase, Trial
from trl_lora_sync.cli.diagnosis import Diagnosis, DoctorInput, model_folder
from trl_lora_sync.cli.peft_config import served_modules
from trl_lora_sync.runtime import run

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trl_lora_sync.adapter.canonical import CanonicalAdapter, Form
    from trl_lora_sync.adapter.saved import SavedAdapter
    from trl_lora_sync.checks.subject import Expected
    from trl_lora_sync.servers.handle import ServerHandle
    from trl_lora_sync.servers.transports import DiskTransport

# Half of it is the mean distance of log-probabilities beyond which two servers do not serve the same weights.
_SPREAD_OF_PEER = 1.0


def handle_of(url: str, given: DoctorInput) -> "ServerHandle":
    """The server as in a run that accepts either engine and either serving mode."""
    from trl_lora_sync.servers.handle import ServerHandle
    from trl_lora_sync.servers.ledger import VersionLedger
    from trl_lora_sync.settings import ServerAddress, SyncSettings

    # A run may be using this server, so the settings below pause nothing and release no memory.
    address = ServerAddress(base_url=url, is_local=is_local_url(url))
    settings = SyncSettings(
        servers=(address,),
        engine="auto",
        serving="auto",
        transport="disk",
        root=given.folder or default_sync_dir(address.is_local, "."),
        server_root=given.server_folder,
        dtype=None,
        keep=1,
        pause="off",
        frees_kv_cache=False,
        sync_timeout_s=given.timeout_s,
        startup_timeout_s=given.timeout_s,
        generation_timeout_s=given.timeout_s,
    )
    return ServerHandle(address, settings, VersionLedger(settings.keep))


def examine(server: "ServerHandle", given: DoctorInput, diagnosis: Diagnosis, scores: list[list[float]]) -> None:
    """Make every check of the list, and report all that they find; never fails.

    Args:
        scores: as for `diagnose`.
    """
    from trl_lora_sync.checks.listed import make_checks
    from trl_lora_sync.checks.subject import Subject, TrialStore

    served = server.engine.capabilities
    diagnosis.engine, diagnosis.version, diagnosis.base_model = served.engine, served.version, served.base_model
    # Before the checks load adapters of our own, which would be listed among the leftovers.
    _look_for_leftovers(server, given, diagnosis)
    transport, expected = _transport(given, server), _expected(given, server, scores)
    store = TrialStore(transport, server.ledger, clean_up_s=given.timeout_s) if transport else None
    subject = Subject(server, expected, store, diagnosis.findings)
    try:
        # An error of a check is a finding already. This is for an adapter that cannot be stored.
        with diagnosis.reporting("adapter"):
            run(make_checks([subject], expected.trials, partial(given.deadline, f"A check of {server.base_url}")))
        scores += [subject.base_logprobs] if subject.base_logprobs else []
        if transport is not None and expected.trials:
            _check_clean_up(server, transport.store.run_id, given, diagnosis)
    finally:
        if transport is not None:
            # Or the folder of this check would stay behind, as that of a dead run.
            run(transport.close())


def _transport(given: DoctorInput, server: "ServerHandle") -> "DiskTransport | None":
    """How an adapter reaches the server; None if no way is known."""
    from trl_lora_sync.adapter.store import AdapterStore
    from trl_lora_sync.servers.transports import DiskTransport, HTTPTransport

    # Not `is_sent_content`, which raises where no way is known. Here the adapter is then left out, with a note.
    served, settings = server.engine.capabilities, server.settings
    if given.folder is not None or server.address.is_local:
        return DiskTransport(AdapterStore(settings.root, server_root=settings.server_root, has_checksums=False))
    return HTTPTransport(AdapterStore(settings.root)) if served.supports_tensor_load or served.supports_push else None


def _look_for_leftovers(server: "ServerHandle", given: DoctorInput, diagnosis: Diagnosis) -> None:
    options = {"--dir": given.folder, "--server-dir": given.server_folder}
    typed = [part for name, value in options.items() if value is not None for part in (name, str(value))]
    sweep = shlex.join(["trl-lora-sync", "sweep", server.base_url, *typed])
    with diagnosis.reporting("loaded adapters"):
        names = sorted(run(server.engine.loaded(given.deadline("Listing adapters"))))
        if names:
            message = (
                f"{', '.join(names)}: of a live run, or left behind by a dead one. "
                f"`{sweep} --dry-run` lists which; without --dry-run it removes leftovers"
            )
            diagnosis.add("loaded adapters", NOTE, message)
        else:
            diagnosis.add("loaded adapters", OK, "none")


def _check_clean_up(server: "ServerHandle", run_id: str, given: DoctorInput, diagnosis: Diagnosis) -> None:
    with diagnosis.reporting("clean-up"):
        # By the run id, as adapters of live runs may be loaded there as well.
        left = [name for name in run(server.engine.loaded(given.deadline("Listing adapters"))) if run_id in name]
        if left:
            message = f"{', '.join(left)} could not be unloaded; look at the server's log, or restart it"
            diagnosis.add("clean-up", PROBLEM, message)
        else:
            diagnosis.add("clean-up", OK, "the server has no adapter of this check left, and its files are deleted")


# What the trainer would know


def _expected(given: DoctorInput, server: "ServerHandle", scores: list[list[float]]) -> "Expected":
    from trl_lora_sync.adapter.support import saved_rank
    from trl_lora_sync.checks.subject import Expected

    saved, config, base = given.saved, given.config or {}, given.base
    # On one host only, as the path of another one may lead to another model here.
    if base is None and saved is not None and server.address.is_local:
        base = model_folder(server.engine.capabilities.base_root)
    # With the first server each time: differences would add up from one server to the next.
    trained, computed = TrainedBase(scores=(scores[0], _SPREAD_OF_PEER) if scores else None), None
    unscored = "give --model, the folder of the base model"
    if base is not None:
        # Fused serving takes the names of the checkpoint.
        if saved is not None and not server.engine.capabilities.is_fused:
            saved = saved.as_served(_config_of(base))
        try:
            trained, computed = _trained(base, given.adapter if saved else None)
        # A folder of another model, or of none, or with a damaged file.
        except (ImportError, OSError, RuntimeError, ValueError, SafetensorError) as error:
            why = str(error).strip().partition("\n")[0]
            unscored = f"the model in {base} cannot be computed with PEFT: {why}"
        # Errors of torch for a .bin file that is empty, or of another kind. Their messages are about pickles.
        except (EOFError, LookupError, UnpicklingError) as error:
            unscored = f"the model in {base} has a file of weights that is damaged ({type(error).__name__})"
    targets = saved.target_modules if saved else config.get("target_modules")
    return Expected(
        base=replace(trained, name=str(given.base) if given.base else config.get("base_model_name_or_path")),
        are_of_peer=computed is None,
        unscored=unscored,
        rank=saved_rank(config) if config else None,
        target_modules=served_modules(targets) if config else (),
        trials=[_trial(saved, base, computed)] if saved else (),
        doubt=_doubt(saved, base, server, "" if computed else unscored) if saved else "",
    )


def _doubt(saved: "SavedAdapter", base: Path | None, server: "ServerHandle", unscored: str) -> str:
    """Why the adapter may not fit the server, and what to do; empty if it fits as far as can be known."""
    from trl_lora_sync.checks.server import is_same_model

    served, name = server.engine.capabilities, saved.config.get("base_model_name_or_path")
    if served.requires_packed_modules and saved.lacks_siblings(_shapes(base)):
        return (
            "It needs q/k/v and gate/up complete, and the shapes of what the adapter lacks are not known here. "
            "Give --model, a folder with the base model's safetensors files."
        )
    # With scores of the base model, its name does not matter.
    if unscored and not is_same_model(str(name), (served.base_model, served.base_root)):
        return f"It serves {served.base_model!r}, not the adapter's base model, {name!r}. Not compared: {unscored}."
    return ""


def _trial(saved: "SavedAdapter", base: Path | None, computed: Scores | None) -> Trial:
    def read(form: "Form") -> "CanonicalAdapter":
        # SGLang needs q/k/v and gate/up complete, and the base model has the shapes of what is missing.
        return saved.canonical(shapes=_shapes(base) if form.packed_modules else None)

    return Trial(group="saved", modules=(), read=read, scores=computed)


def _config_of(base: Path) -> dict[str, Any]:
    """The `config.json` in a folder; empty if it cannot be read, which `_trained` reports."""
    try:
        config = json.loads((base / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


@cache  # the same for all servers
def _shapes(base: Path | None) -> "Mapping[str, tuple[int, int]]":
    from trl_lora_sync.adapter.saved import base_shapes

    try:
        return base_shapes(base) if base else {}
    except (OSError, SafetensorError):  # a damaged file; without shapes, an incomplete adapter is not loaded
        return {}


@cache  # the same for all servers
def _trained(base: Path, adapter: Path | None) -> tuple[TrainedBase, Scores]:
    """What PEFT computes of the probe prompt, on the CPU; without an adapter, of the base alone."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    from trl_lora_sync.generation.scoring import adapter_logprobs, base_logprobs

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report is what is to be read
        model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
        # The configuration of a vision-language model has its vocabulary one level down.
        size = getattr(model.config.get_text_config(), "vocab_size", None)
        scores = base_logprobs(model, PROBE_PROMPT, {})
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter)
        adapted = adapter_logprobs(model, PROBE_PROMPT)
        return TrainedBase(vocab_size=size, scores=scores), Scores(base=scores[0], adapted=adapted)
