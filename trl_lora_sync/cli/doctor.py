"""Check running servers: what they are, what is missing or wrong, and which flag to change.

With --adapter, the adapter is loaded under a name of its own, the log-probabilities of a fixed prompt are compared with
the base's and, where the base model is on this host, with PEFT's own; then it is unloaded. Nothing is left behind.
Keys are read from VLLM_API_KEY, SGLANG_API_KEY and SGLANG_ADMIN_API_KEY.
"""

import argparse
import contextlib
import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_lora_sync.cli.console import UsageError, out, working
from trl_lora_sync.places import default_sync_dir, has_secrets, is_http_url, is_local_url
from trl_lora_sync.verify import PROBE_PROMPT, BaseGap, Scores, compare, mean_distance

if TYPE_CHECKING:
    from trl_lora_sync.adapter.canonical import CanonicalAdapter
    from trl_lora_sync.adapter.saved import SavedAdapter
    from trl_lora_sync.adapter.store import StoredAdapter
    from trl_lora_sync.engines.base import Deadline, Engine
    from trl_lora_sync.transports import Transport

OK, NOTE, PROBLEM = "ok", "note", "problem"
_STYLES = {OK: "green", NOTE: "yellow", PROBLEM: "bold red"}
_BEYOND_ANY_RANK = 1_000_000


@dataclass
class Finding:
    """One thing that was looked at: its name, how it is (`ok`, `note` or `problem`), and the words for it."""

    name: str
    status: str
    words: str


@dataclass
class Diagnosis:
    """What was found at one URL."""

    url: str
    engine: str | None = None
    version: str | None = None
    base_model: str | None = None
    findings: list[Finding] = field(default_factory=list)

    def add(self, name: str, status: str, words: str) -> None:
        self.findings.append(Finding(name, status, words))

    @property
    def is_good(self) -> bool:
        return all(finding.status != PROBLEM for finding in self.findings)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the servers are checked for.

    Attributes:
        config: a saved `adapter_config.json`, if one was given.
        adapter: folder of a saved adapter, if one was given.
        saved: the same, read; None as well if it could not be served.
        unusable: why it could not.
        base: folder of the base model on this host, if there is one to compare with.
        folder: where to write what a server shall read, if it was given.
        server_folder: the same folder as the servers see it, if that differs.
        timeout_s: for each server to answer, and for each of the checks.
    """

    config: dict[str, Any] | None
    adapter: Path | None
    saved: "SavedAdapter | None"
    unusable: str | None
    base: Path | None
    folder: Path | None
    server_folder: str | None
    timeout_s: float

    def deadline(self, task: str) -> "Deadline":
        from trl_lora_sync.engines.base import Deadline

        return Deadline.after(self.timeout_s, task)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("urls", nargs="+", metavar="URL", help="a server, such as http://localhost:8000")
    parser.add_argument("--peft-config", type=Path, metavar="DIR", help="folder with the adapter_config.json to serve")
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="folder of a saved adapter to load and verify")
    parser.add_argument(
        "--model", type=Path, metavar="DIR",
        help="folder of the base model, to compare with (default: the one that the adapter names, if it is a folder)",
    )  # fmt: skip
    parser.add_argument("--dir", type=Path, help="folder shared with the servers (default: as in training)")
    parser.add_argument("--server-dir", help="the same folder as the servers see it")
    parser.add_argument(
        "--timeout", type=float, default=30.0, metavar="S", help="seconds to wait for a server (default: %(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace, rest: list[str]) -> int:
    if rest:
        raise UsageError(f"nothing may follow --, but {' '.join(rest)} does.")
    urls = [checked_url(url) for url in args.urls]
    case = case_of(args)
    diagnoses: list[Diagnosis] = []
    scores: list[list[float]] = []
    for url in urls:
        with working(f"checking {url}"):
            diagnoses.append(diagnose(url, case, scores))
        if not args.json:
            show(diagnoses[-1])
    is_good = all(diagnosis.is_good for diagnosis in diagnoses)
    if args.json:
        out().print(json.dumps({"ok": is_good, "servers": [asdict(one) for one in diagnoses]}, indent=2))
    return 0 if is_good else 1


def checked_url(url: str) -> str:
    """The URL as it is used.

    Raises:
        UsageError: it is none, or carries a key.
    """
    if has_secrets(url):
        raise UsageError("a URL carries a user, password, query or fragment. Give the key in the environment instead.")
    if not is_http_url(url):
        raise UsageError(f"{url!r} is not a URL. Expected something like http://localhost:8000.")
    return url.rstrip("/").removesuffix("/v1")


def case_of(args: argparse.Namespace) -> Case:
    """What was asked for, with the files read.

    Raises:
        UsageError: they cannot be read.
    """
    from trl_lora_sync.cli.serve import read_peft_config
    from trl_lora_sync.errors import UnsupportedAdapterError

    saved = config = unusable = None
    if args.peft_config:
        config = read_peft_config(args.peft_config)
    if args.adapter:
        config = config or read_peft_config(args.adapter)
        with working(f"reading {args.adapter}"):
            from trl_lora_sync.adapter.saved import read_saved_adapter

            try:
                saved = read_saved_adapter(args.adapter)
            except UnsupportedAdapterError as error:
                unusable = str(error)
    base = args.model
    if base is not None and not base.is_dir():
        raise UsageError(f"--model {base} is no folder. Give the base model's, or leave it out.")
    if base is None and saved is not None:
        named = Path(str(saved.config.get("base_model_name_or_path")))
        base = named if named.is_dir() else None
    return Case(
        config=config,
        adapter=args.adapter,
        saved=saved,
        unusable=unusable,
        base=base,
        folder=args.dir,
        server_folder=args.server_dir,
        timeout_s=args.timeout,
    )


def show(diagnosis: Diagnosis) -> None:
    """Print what was found at one URL."""
    from rich.text import Text

    known = f"{diagnosis.engine} {diagnosis.version}" if diagnosis.engine else "no server that could be told"
    served = f", serving {diagnosis.base_model}" if diagnosis.base_model else ""
    out().print(Text(f"{diagnosis.url}: {known}{served}", style="bold"))
    for finding in diagnosis.findings:
        line = Text(f"  {finding.status:8}", style=_STYLES[finding.status])
        out().print(line.append(f"{finding.name}: {finding.words}", style="default"))


def diagnose(url: str, case: Case, scores: list[list[float]]) -> Diagnosis:
    """Look at one server; never fails.

    Args:
        scores: log-probabilities of the probe prompt from the servers before, to which this one's are added.
    """
    from trl_lora_sync.adapter.support import check_saved_config
    from trl_lora_sync.engines.connect import connect_engine
    from trl_lora_sync.errors import LoRASyncError

    diagnosis = Diagnosis(url)
    if case.unusable is not None:
        diagnosis.add("adapter features", PROBLEM, case.unusable)
    elif case.config is not None:
        with _reported(diagnosis, "adapter features"):
            check_saved_config(case.config)
            diagnosis.add("adapter features", OK, "plain LoRA, which both engines serve exactly")
    try:
        engine = connect_engine(
            url,
            engine="auto",
            is_local=is_local_url(url),
            deadline=case.deadline(f"Waiting for {url}"),
            serving="auto",
        )
    except LoRASyncError as error:
        _identify(diagnosis, case)
        diagnosis.add("server", PROBLEM, str(error))
        return diagnosis
    try:
        _Examination(engine, case, diagnosis, scores).run()
    finally:
        engine.close()
    return diagnosis


def _identify(diagnosis: Diagnosis, case: Case) -> None:
    """Engine and version of a server that cannot be connected to, if it tells."""
    from trl_lora_sync.engines.http import NO_KEY, APIKey, HTTPClient
    from trl_lora_sync.errors import LoRASyncError

    # vLLM tells its version without a key, so SGLang's goes to no vLLM.
    for engine, route, key in (
        ("vllm", "/version", NO_KEY),
        ("sglang", "/server_info", NO_KEY),
        ("sglang", "/server_info", APIKey("SGLANG_API_KEY")),
    ):
        client = HTTPClient(diagnosis.url, api_key=key, is_local=is_local_url(diagnosis.url))
        with contextlib.suppress(LoRASyncError, ValueError, AttributeError):
            version = client.request("GET", route, case.deadline("Asking for the version")).json().get("version")
            if version:
                diagnosis.engine, diagnosis.version = engine, str(version)
        client.close()
        if diagnosis.engine:
            return


@contextlib.contextmanager
def _reported(diagnosis: Diagnosis, name: str) -> Iterator[None]:
    """Turn an error of ours into a finding."""
    from trl_lora_sync.errors import LoRASyncError

    try:
        yield
    except LoRASyncError as error:
        diagnosis.add(name, PROBLEM, str(error))


class _Examination:
    """The checks of one connected server."""

    def __init__(self, engine: "Engine", case: Case, diagnosis: Diagnosis, scores: list[list[float]]) -> None:
        self._engine = engine
        self._case = case
        self._diagnosis = diagnosis
        self._scores = scores
        self._served = engine.capabilities
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
        self._check_leftovers()
        with _reported(found, "base model"):
            self._check_base()
        try:
            with _reported(found, "adapter" if self._case.saved else "rank"):
                if self._case.saved is not None:
                    self._check_adapter(self._case.saved)
                elif self._case.config is not None:
                    self._check_rank(self._case.config)
        finally:
            if self._transport is not None:
                self._transport.close()

    def _check_version(self) -> None:
        from trl_lora_sync.engines.known import KNOWN_VERSIONS

        known = KNOWN_VERSIONS[self._served.engine]
        doubt = known.doubt(self._served.version)
        if doubt:
            self._diagnosis.add("version", NOTE, f"{doubt}; verify an adapter with --adapter")
        else:
            ran = self._served.version in known.run
            self._diagnosis.add("version", OK, "run with this release" if ran else "known from its source")

    def _check_logprobs_mode(self) -> None:
        mode = self._served.logprobs_mode
        if mode == "raw_logprobs":
            fix = {
                "vllm": "Restart the server with --logprobs-mode processed_logprobs",
                "sglang": "Restart the server without SGLANG_RETURN_ORIGINAL_LOGPROB",
            }
            self._diagnosis.add(
                "log-probabilities",
                PROBLEM,
                "they come before the temperature, and TRL compares them with its own after it, so importance ratios "
                f"are wrong at any temperature but 1. {fix[self._served.engine]}.",
            )
        elif mode == "unknown":
            self._diagnosis.add("log-probabilities", NOTE, "whether they come after the temperature cannot be told")
        else:
            self._diagnosis.add("log-probabilities", OK, "after the temperature, as TRL compares them")

    def _check_modules(self) -> None:
        from trl_lora_sync.cli.serve import served_modules

        if self._case.config is None or not self._served.target_modules:
            return
        targets = self._case.saved.target_modules if self._case.saved else self._case.config.get("target_modules")
        wanted = served_modules(targets)
        missing = [name for name in wanted if not self._served.serves_module(name)]
        if missing:
            words = f"{', '.join(missing)} cannot be adapted. Restart the server with --lora-target-modules "
            self._diagnosis.add("target modules", PROBLEM, f"{words}{' '.join(wanted)}.")
        else:
            self._diagnosis.add("target modules", OK, f"{', '.join(wanted)} can be adapted")

    def _check_leftovers(self) -> None:
        with _reported(self._diagnosis, "loaded adapters"):
            names = sorted(self._engine.loaded(self._case.deadline("Listing adapters")))
            if names:
                words = f"{', '.join(names)}: of a run that goes on, or left behind; `trl-lora-sync sweep` tells"
                self._diagnosis.add("loaded adapters", NOTE, words)
            else:
                self._diagnosis.add("loaded adapters", OK, "none")

    def _check_base(self) -> None:
        score = self._engine.score(
            self._served.base_model, list(PROBE_PROMPT), self._case.deadline("Scoring a prompt with the base model")
        )
        if self._scores and mean_distance(score, self._scores[0]) > 0.5:
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
        from trl_lora_sync.engines.known import allowed_max_lora_rank

        if self._served.is_fused:
            self._diagnosis.add("rank", OK, f"{saved_rank(config)} fits, as any does")
            return
        rank, reserved = saved_rank(config), self._reserved_rank()
        if reserved is None:
            words = (
                "not checked: the server does not tell. Give --adapter, or --dir, a folder that the server sees too."
            )
            self._diagnosis.add("rank", NOTE, words)
        elif rank > reserved:
            flag = allowed_max_lora_rank(rank) if self._served.engine == "vllm" else rank
            words = (
                f"the server reserves {reserved}, and the adapter has {rank}. Restart it with --max-lora-rank {flag}."
            )
            self._diagnosis.add("rank", PROBLEM, words)
        else:
            self._diagnosis.add("rank", OK, f"{rank} fits the {reserved} that the server reserves")

    def _reserved_rank(self) -> int | None:
        """The server's --max-lora-rank, if it tells.

        vLLM tells as it refuses an adapter of a rank beyond any, which it does before it looks at a tensor.
        Source: vllm/lora/peft_helper.py `validate_legal`, 0.22 to 0.33.
        """
        from trl_lora_sync.errors import LoRASyncError

        if self._served.max_lora_rank is not None:
            return self._served.max_lora_rank
        transport = self._open_transport()
        if transport is None:
            return None
        transport.open()
        stored = transport.write("rank", _empty_adapter(_BEYOND_ANY_RANK))
        try:
            self._engine.load(stored, self._case.deadline("Asking for the rank"))
        except LoRASyncError as error:
            told = re.search(r"max_lora_rank[ =:]+(\d+)", str(error))
            return int(told[1]) if told else None
        finally:
            self._engine.unload(stored.name, self._case.deadline("Unloading"))
            transport.delete(stored)
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
            base = self._engine.score(self._served.base_model, list(PROBE_PROMPT), self._case.deadline("Scoring"))
            adapted = self._engine.score(stored.name, list(PROBE_PROMPT), self._case.deadline("Scoring"))
            self._judge_change(saved, mean_distance(base, adapted))
            self._compare_with_peft(Scores(base=base, adapted=adapted))

    def _canonical(self, saved: "SavedAdapter") -> "CanonicalAdapter":
        from trl_lora_sync.adapter.saved import base_shapes

        if not self._served.needs_fused_siblings:
            return saved.canonical()
        return saved.canonical(shapes=base_shapes(self._case.base) if self._case.base else {})

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
        if self._case.base is None or self._case.adapter is None:
            self._diagnosis.add("PEFT", NOTE, "not compared: give --model, the folder of the base model")
            return
        try:
            trained, spread = _peft_scores(self._case.base, self._case.adapter)
        except ImportError as error:
            self._diagnosis.add("PEFT", NOTE, f"not compared: {error}")
            return
        evidence = compare(served, trained)
        words = (
            f"mean |served - PEFT| {evidence.gap_mean:.4f} with the adapter and {evidence.base_gap:.4f} without; the "
            f"adapter itself moves PEFT's by {evidence.trained_change:.4f}"
        )
        if BaseGap(mean=evidence.base_gap, spread=spread).is_suspicious:
            self._diagnosis.add(
                "PEFT", PROBLEM, f"{words}. The server serves another base model than {self._case.base}."
            )
        elif evidence.contradicts:
            fix = "The server applies another adapter or another scaling, or leaves out layers."
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
        transport.open()
        stored = transport.write("doctor", adapter)
        try:
            self._engine.load(stored, self._case.deadline("Loading the adapter"))
            self._engine.warm_up(stored, self._case.deadline("Using the adapter"))
            yield stored
        finally:
            self._engine.unload(stored.name, self._case.deadline("Unloading the adapter"))
            with _reported(self._diagnosis, "clean-up"):
                left = stored.name in self._engine.loaded(self._case.deadline("Listing adapters"))
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
    with warnings.catch_warnings(action="ignore"):  # the report is what is to be read
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), adapter)
        without, spread = base_logprobs(model, PROBE_PROMPT)
        return Scores(base=without, adapted=adapter_logprobs(model, PROBE_PROMPT)), spread
