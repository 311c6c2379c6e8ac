"""Unit tier: the command itself, its help, its exit status, and what it leaves unloaded."""

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trl_lora_sync.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "trl", "peft", "transformers", "accelerate", "datasets", "vllm", "sglang", "matplotlib"}
_LOADED = """
import json, sys
import trl_lora_sync.cli
from trl_lora_sync.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as ended:
    code = ended.code
print(json.dumps([code, sorted(set(sys.modules))]))
"""


@pytest.mark.outside
@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["grpo", "-h"], *([name, "--help"] for name in COMMANDS)], ids=" ".join
)
def test_help_and_version_load_no_slow_library(arguments: list[str], run_python: Callable[..., str]) -> None:
    code, loaded = json.loads(run_python(_LOADED, *arguments).splitlines()[-1])
    assert code == 0
    assert not HEAVY & set(loaded)


@pytest.mark.outside
@pytest.mark.parametrize(
    "arguments", [["serve", "vllm", "./typo"], ["grpo", "--config", "typo.yaml"], ["doctor", "localhost"]], ids=" ".join
)
def test_mistake_is_found_before_a_slow_library_is_loaded(arguments: list[str], run_python: Callable[..., str]) -> None:
    code, loaded = json.loads(run_python(_LOADED, *arguments).splitlines()[-1])
    assert code == 2
    assert not HEAVY & set(loaded)


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    for name, line in COMMANDS.items():
        assert name in said
        assert line.split()[0] in said


@pytest.mark.parametrize("arguments", [["nonsense"], ["--nonsense"], ["serve"], ["serve", "other", "M"], ["doctor"]])
def test_what_cannot_be_understood_ends_with_2(arguments: list[str]) -> None:
    assert main(arguments) == 2


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_each_argument_of_a_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    listed = re.split(r"^(?:Arguments|Options|Adapter sync):$", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    entries = re.findall(r"^  (\S.*(?:\n   .*)*)", "\n".join(listed).partition("  Example:")[0], re.MULTILINE)
    assert any(entry.startswith("-h, --help  ") for entry in entries)
    for entry in entries:
        assert re.search(r"(?:\s{2,}|\n\s+)\w", entry), f"{name}: {entry}"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_fits_a_narrow_terminal(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the example of a command, which can be copied."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main([name, "--help"]) == 0
    lines = capsys.readouterr().out.partition("  Example:")[0].splitlines()
    assert max(map(len, lines)) <= 80
    assert all(line.isascii() for line in lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["srve"], "Did you mean 'serve'?"),
        (["doctor"], "Missing argument 'URL'"),
        (["serve", "vllm"], "Missing argument 'model'"),
        (["serve", "vlm", "M"], "'vlm' is not one of 'vllm', 'sglang'"),
        (["serve", "vllm", "M", "other"], "unexpected extra argument(s) (other)"),
        (["serve", "vllm", "M", "--port", "many"], "Invalid value for '--port'"),
        (["sweep", "--timeout", "long"], "Invalid value for '--timeout'"),
        (["report", "out", "--out"], "'--out' requires an argument"),
        (["grpo", "--config"], "'--config' requires an argument"),
    ],
)
def test_what_is_wrong_with_a_command_is_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert not captured.out


def test_interrupted_command_ends_with_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trl_lora_sync.cli.sweep.sweep_folder", interrupted)
    assert main(["sweep", str(tmp_path)]) == 130


@pytest.mark.parametrize("command", [["sweep"], ["serve", "vllm"], ["grpo", "--config"]], ids=" ".join)
def test_path_that_the_system_refuses_gets_no_traceback(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """As a folder without rights does, which the user of a test may have."""
    assert main([*command, "./" + 300 * "x"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"trl-lora-sync {command[0]}: ")
    assert "File name too long" in line


@pytest.mark.outside
@pytest.mark.parametrize("arguments", [["--version"], ["serve", "--help"], ["sweep", "."]], ids=" ".join)
def test_reader_that_has_seen_enough_gets_no_traceback(arguments: list[str], tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "trl_lora_sync.cli.main", *arguments]
    ended = subprocess.run(
        command,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    os.close(writing)
    assert "Traceback" not in ended.stderr
    assert "BrokenPipe" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["doctor", "http://localhost:8000", "--adaptr", "x"], "(Possible options: --adapter"),
        (["sweep", "--dryrun"], "--dry-run)"),
        (["report", "out", "--xyzzy"], "Try 'trl-lora-sync report --help' for help."),
    ],
)
def test_unknown_option_ends_with_2_and_a_hint(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.outside
@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colour_is_for_terminals_that_want_it(no_color: str, coloured: bool) -> None:
    terminal, process_side = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color"}
    env.pop("NO_COLOR", None)
    if no_color:
        env["NO_COLOR"] = no_color
    source = "from trl_lora_sync.cli.console import out; out().print('text', style='red')"
    subprocess.run([sys.executable, "-c", source], stdout=process_side, env=env, check=True, timeout=120)
    os.close(process_side)
    said = os.read(terminal, 1000)
    os.close(terminal)
    assert b"text" in said
    assert (b"\x1b[31m" in said) == coloured


@pytest.mark.outside
def test_output_that_is_no_terminal_has_no_colour(
    monkeypatch: pytest.MonkeyPatch, run_python: Callable[..., str]
) -> None:
    said = run_python("from trl_lora_sync.cli.console import out\nout().print('text', style='bold red')")
    assert said == "text\n"
