"""Unit tier: the command that installs this copy of the package elsewhere never names the package alone."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trl_lora_sync
from trl_lora_sync.origin import install_command, install_elsewhere, pip_source

pytestmark = pytest.mark.outside

PACKAGE = Path(trl_lora_sync.__file__).parent
_ASK = """
import json, trl_lora_sync
from trl_lora_sync.origin import install_command, install_elsewhere, pip_source
print(json.dumps([pip_source(), install_command("/env/bin/python"), install_elsewhere()]))
"""
Ask = Callable[..., list[Any]]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Installs a copy of the package by hand, with pip's record of its origin, and queries that copy."""
    site = tmp_path / "site"
    (site / "trl_lora_sync").mkdir(parents=True)
    for name in ("__init__.py", "origin.py"):
        shutil.copy(PACKAGE / name, site / "trl_lora_sync" / name)

    def asked(origin: dict[str, Any] | None, *, has_metadata: bool = True) -> list[Any]:
        if has_metadata:
            metadata = site / "trl_lora_sync-0.1.0.dist-info"
            metadata.mkdir()
            (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: trl-lora-sync\nVersion: 0.1.0\n")
            if origin is not None:
                (metadata / "direct_url.json").write_text(json.dumps(origin))
        done = subprocess.run(
            [sys.executable, "-c", _ASK],
            env=os.environ | {"PYTHONPATH": str(site)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        return list(json.loads(done.stdout))

    return asked


def test_checkout_is_installed_from_its_folder() -> None:
    """Whether it is an editable install or on PYTHONPATH."""
    assert pip_source() == str(PACKAGE.parent)
    command = ["/env/bin/python", "-m", "pip", "install", "--no-deps", str(PACKAGE.parent)]
    assert shlex.split(install_command("/env/bin/python")) == command
    assert install_elsewhere().startswith(f"copy {PACKAGE} into an empty folder of the server's host, and start")


def test_environment_without_pip_gets_a_command_of_uv() -> None:
    command = ["uv", "pip", "install", "--python", "/my env/python", "--no-deps", str(PACKAGE.parent)]
    assert shlex.split(install_command("/my env/python", has_pip=False)) == command


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        (None, "trl-lora-sync==0.1.0"),  # from an index, which has it
        (
            {"url": "https://git.example/us/it", "vcs_info": {"vcs": "git", "commit_id": "abc123"}},
            "git+https://git.example/us/it@abc123",
        ),
        (
            {
                "url": "https://git.example/us/it",
                "vcs_info": {"vcs": "git", "commit_id": "abc123"},
                "subdirectory": "python",
            },
            "git+https://git.example/us/it@abc123#subdirectory=python",
        ),
        (
            {"url": "https://files.example/trl_lora_sync-0.1.0-py3-none-any.whl", "archive_info": {}},
            "https://files.example/trl_lora_sync-0.1.0-py3-none-any.whl",
        ),
    ],
)
def test_what_every_host_can_reach_is_installed_from_there(
    origin: dict[str, Any] | None, source: str, ask: Ask
) -> None:
    found, here, elsewhere = ask(origin)
    assert found == source
    assert shlex.split(here)[-2:] == ["--no-deps", source]
    assert shlex.join(["pip", "install", "--no-deps", source]) in elsewhere


def test_wheel_on_this_host_is_installed_here_and_its_package_is_copied(tmp_path: Path, ask: Ask) -> None:
    wheel = tmp_path / "a folder" / "trl_lora_sync-0.1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.touch()
    found, here, elsewhere = ask({"url": wheel.as_uri(), "archive_info": {}})
    assert found == shlex.split(here)[-1] == str(wheel)
    assert f"copy {tmp_path / 'site' / 'trl_lora_sync'} into" in elsewhere


@pytest.mark.parametrize("has_metadata", [True, False])
def test_copy_whose_source_is_gone_is_copied(has_metadata: bool, tmp_path: Path, ask: Ask) -> None:
    gone = {"url": (tmp_path / "gone").as_uri(), "dir_info": {}}
    found, here, elsewhere = ask(gone, has_metadata=has_metadata)
    assert found is None
    assert here.startswith(f"cp -r {tmp_path / 'site' / 'trl_lora_sync'} ")
    assert "PYTHONPATH" in elsewhere
    # Typed as printed, with an interpreter that is there.
    target = tmp_path / "target"
    target.mkdir()
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {target}\n")
    python.chmod(0o755)
    subprocess.run(["sh", "-c", here.replace("/env/bin/python", str(python))], check=True, timeout=60)
    assert (target / "trl_lora_sync" / "origin.py").is_file()


def test_no_message_names_the_package_alone() -> None:
    sources = {file: file.read_text() for file in PACKAGE.rglob("*.py")}
    assert not [file for file, text in sources.items() if "--no-deps trl-lora-sync" in text]
