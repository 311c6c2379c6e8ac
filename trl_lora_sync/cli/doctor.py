"""Check running servers: what they are, what is missing or wrong, and which flag to change.

With --adapter, the adapter is loaded under a unique name, the log-probabilities of a fixed prompt are compared with
the base's and, where the base model is on this host, with PEFT's own; then it is unloaded. Nothing is left behind.
Keys are read from VLLM_API_KEY, SGLANG_API_KEY and SGLANG_ADMIN_API_KEY.
"""

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from trl_lora_sync import runtime
from trl_lora_sync.addresses import is_local_url
from trl_lora_sync.checks.finding import NOTE, OK, PROBLEM
from trl_lora_sync.cli.console import UsageError, out, working
from trl_lora_sync.cli.diagnosis import Diagnosis, DoctorInput, model_folder
from trl_lora_sync.cli.examination import examine, handle_of
from trl_lora_sync.cli.peft_config import read_peft_config
from trl_lora_sync.cli.urls import check_listening, check_server_dir, check_timeout, checked_urls, start_command
from trl_lora_sync.engines.registry import ENGINES
from trl_lora_sync.errors import LoRASyncError, ServerSetupError, UnsupportedAdapterError

if TYPE_CHECKING:
    from trl_lora_sync.adapter.support import Serving

_STYLES = {OK: "green", NOTE: "yellow", PROBLEM: "bold red"}


def run(
    urls: Annotated[
        list[str], Argument(metavar="URL", help="a server, such as http://localhost:8000; or several, with commas")
    ],
    peft_config: Annotated[
        Path | None, Option(metavar="DIR", help="folder with the adapter_config.json to serve")
    ] = None,
    adapter: Annotated[Path | None, Option(metavar="DIR", help="folder of a saved adapter to load and verify")] = None,
    model: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="folder of the base model, to compare with",
            show_default="the folder that the adapter or the server names",
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        Option("--dir", metavar="DIR", help="folder shared with the servers", show_default="as in training"),
    ] = None,
    server_dir: Annotated[str | None, Option(metavar="DIR", help="the same folder as the servers see it")] = None,
    timeout: Annotated[
        float, Option(metavar="S", help="seconds to wait for a server; at most 3 if it refuses the connection")
    ] = 30,
    as_json: Annotated[bool, Option("--json", help="print the report as JSON")] = False,
) -> None:
    check_timeout(timeout)
    check_server_dir(server_dir)
    checked = [url for typed in urls for url in checked_urls(typed)]
    if twice := sorted({url for url in checked if checked.count(url) > 1}):
        raise UsageError(f"{', '.join(twice)} is given more than once. Name every server once.")
    saved = config = unusable = None
    if peft_config:
        config = read_peft_config(peft_config)
    if adapter:
        config = config or read_peft_config(adapter)
        with working(f"reading {adapter}"):
            from trl_lora_sync.adapter.saved import read_saved_adapter

            try:
                saved = read_saved_adapter(adapter)
            except UnsupportedAdapterError as error:
                unusable = str(error)
    if model is not None and not model.is_dir():
        raise UsageError(f"--model {model} is not a folder. Give the base model's, or leave it out.")
    if model is not None and not (model / "config.json").is_file():
        raise UsageError(f"--model {model} has no config.json. Give the folder of the base model, or leave it out.")
    # To compute a model takes time and memory, so it is looked for only where an adapter is to be compared.
    if model is None and saved is not None:
        model = model_folder(saved.config.get("base_model_name_or_path"))
    given = DoctorInput(
        config=config,
        adapter=adapter,
        saved=saved,
        unusable=unusable,
        base=model,
        folder=folder,
        server_folder=server_dir,
        timeout_s=timeout,
        peft_config=peft_config or adapter,
    )
    diagnoses: list[Diagnosis] = []
    scores: list[list[float]] = []
    for url in checked:
        with working(f"checking {url}"):
            diagnoses.append(diagnose(url, given, scores))
        if not as_json:
            show(diagnoses[-1])
    is_good = all(diagnosis.is_good for diagnosis in diagnoses)
    if as_json:
        # Once for all servers: standard output must be one JSON document.
        out().print(json.dumps({"ok": is_good, "servers": [one.as_json() for one in diagnoses]}, indent=2))
    raise typer.Exit(0 if is_good else 1)


def show(diagnosis: Diagnosis) -> None:
    """Print what was found at one URL."""
    from rich.text import Text

    known = f"{diagnosis.engine} {diagnosis.version}" if diagnosis.engine else "unknown server"
    served = f", serving {diagnosis.base_model}" if diagnosis.base_model else ""
    out().print(Text(f"{diagnosis.url}: {known}{served}", style="bold"))
    for finding in diagnosis.findings:
        line = Text(f"  {finding.status:8}", style=_STYLES[finding.status])
        out().print(line.append(f"{finding.name}: {finding.message}", style="default"))


def diagnose(url: str, given: DoctorInput, scores: list[list[float]]) -> Diagnosis:
    """Look at one server; never fails.

    Args:
        scores: log-probabilities of the probe prompt from the servers before, to which this one's are added.
    """
    diagnosis = Diagnosis(url)
    try:
        where = "" if is_local_url(url) else " on its host"
        start = start_command(url, *_serve_arguments(given))
        # First, as `connect` would wait its whole timeout for a port that is closed.
        # An engine accepts none before its model is loaded.
        advice = f"Otherwise start one{where} with `{start}`, or correct the URL."
        check_listening(url, given.timeout_s, f"Wait if it is still loading its model. {advice}")
    except LoRASyncError as error:
        # How it would serve is not known, so by the rules of the default of `lora_sync_serving`.
        _judge_features(diagnosis, given, "runtime")
        diagnosis.add("server", PROBLEM, str(error))
        return diagnosis
    server = handle_of(url, given)
    try:
        runtime.run(server.connect(given.deadline(f"Waiting for {url}")))
    except LoRASyncError as error:
        _judge_features(diagnosis, given, "runtime")
        # `connect` has failed before the engine could report itself.
        seen = _identify(diagnosis, given)
        is_other = seen and isinstance(error, ServerSetupError)
        diagnosis.add("server", PROBLEM, _other_server(url, seen, given) if is_other else str(error))
        return diagnosis
    try:
        _judge_features(diagnosis, given, "fused" if server.engine.capabilities.is_fused else "runtime")
        examine(server, given, diagnosis, scores)
    finally:
        runtime.run(server.disconnect())
    return diagnosis


def _judge_features(diagnosis: Diagnosis, given: DoctorInput, serving: "Serving") -> None:
    """Whether the adapter that was given can be served, by a server of this kind."""
    from trl_lora_sync.adapter.support import changes_base, check_saved_config, is_plain

    if given.unusable is not None:
        diagnosis.add("adapter features", PROBLEM, given.unusable)
    elif given.config is not None:
        with diagnosis.reporting("adapter features"):
            check_saved_config(given.config, serving)
            message = "plain LoRA, which both engines serve exactly"
            if changes_base(given.config.get("init_lora_weights")):
                message = "served exactly as the difference to the initial adapter, which has twice the rank"
            elif not is_plain(given.config):
                message = "more than plain LoRA, which this server computes in its weights"
            diagnosis.add("adapter features", OK, message)


def _serve_arguments(given: DoctorInput) -> tuple[str, ...]:
    named = (given.config or {}).get("base_model_name_or_path")
    model = str(given.base or named or "MODEL")
    return (model, "--peft-config", str(given.peft_config)) if given.peft_config else (model,)


def _other_server(url: str, seen: list[str], given: DoctorInput) -> str:
    """The message for a URL with a server of something else, without the settings of a trainer."""
    expected = " or ".join(spec.description for spec in ENGINES.values())
    where = "" if is_local_url(url) else " on its host"
    start = start_command(url, *_serve_arguments(given), port="PORT")
    return (
        f"{url} answers, but not as an inference server: {', and '.join(seen)}. Expected was {expected}. Correct the "
        f"URL, or start a server at a free port{where} with `{start}`."
    )


def _identify(diagnosis: Diagnosis, given: DoctorInput) -> list[str]:
    """Find engine and version of a server that cannot be connected to.

    Returns:
        Its answers, if they show that it is a server of something else.
    """
    from trl_lora_sync.engines.http import NO_KEY, APIKey, HTTPClient

    seen: list[str] = []
    is_telling = True
    # vLLM, which is first, sends its version without a key, so SGLang's key never goes to vLLM.
    for spec in ENGINES.values():
        for key in (NO_KEY, APIKey(spec.api_key_variable)) if spec.guards_version else (NO_KEY,):
            client = HTTPClient(diagnosis.url, api_key=key, is_local=is_local_url(diagnosis.url))
            # A server of the other engine answers with an error, with text, or with JSON of another form.
            with contextlib.suppress(LoRASyncError, ValueError, AttributeError):
                asked = client.request("GET", spec.version_route, given.deadline("Asking for the version"))
                answer = runtime.run(asked)
                seen.append(f"{spec.version_route} answered HTTP {answer.status_code} without a version")
                # Not such as a redirect, a key that is wanted, or a server that is not ready.
                is_telling = is_telling and answer.status_code in (200, 404)
                if version := answer.json().get("version"):
                    diagnosis.engine, diagnosis.version = spec.name, str(version)
            runtime.run(client.close())
            if diagnosis.engine:
                return []
    return list(dict.fromkeys(seen)) if is_telling else []
