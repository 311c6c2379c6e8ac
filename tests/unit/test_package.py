"""Unit tier: the package as others get it, a wheel in a separate environment."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import trl_lora_sync
from trl_lora_sync.cli.main import COMMANDS, TRAINING

ROOT = Path(__file__).parents[2]
IMPORT = """
import pathlib, sys
import trl_lora_sync
from trl_lora_sync import ExportedAdapter, GRPOConfig, GRPOTrainer, LoRASyncError, export_adapter
print(pathlib.Path(trl_lora_sync.__file__).parent, trl_lora_sync.__version__, sep="\\n")
"""


def run(*command: object, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    ended = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | (env or {}),
        cwd=cwd,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    [built] = folder.glob("*.whl")
    return built


@pytest.mark.outside
@pytest.mark.slow
def test_wheel_installs_and_imports_elsewhere(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel)
    where, version = run(sys.executable, "-c", IMPORT, env={"PYTHONPATH": str(site)}, cwd=tmp_path).split()
    assert Path(where) == site / "trl_lora_sync"
    assert version == wheel.name.split("-")[1]
    said = run(sys.executable, "-m", "trl_lora_sync.cli.main", "--version", env={"PYTHONPATH": str(site)}, cwd=tmp_path)
    assert said.split() == ["trl-lora-sync", version]


@pytest.mark.outside
@pytest.mark.slow
def test_wheel_without_its_dependencies_serves_the_plugins(wheel: Path, tmp_path: Path) -> None:
    """As next to vLLM, which brings torch and Starlette; what trainer and server agree on needs not even these."""
    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel)
    names = "import trl_lora_sync; from trl_lora_sync.engine_plugins.vllm_push import MIDDLEWARE; "
    printed = run(
        *(sys.executable, "-S", "-c", f"{names}print(MIDDLEWARE, trl_lora_sync.__version__)"),
        env={"PYTHONPATH": str(site)},
        cwd=tmp_path,
    )
    dotted, version = printed.split()
    assert version == wheel.name.split("-")[1]

    module, _, name = dotted.rpartition(".")
    blocked = "import sys; sys.modules |= dict.fromkeys(('trl', 'peft', 'httpx', 'safetensors')); "
    source = f"{blocked}from {module} import {name} as found; print(found.__name__)"
    assert run(sys.executable, "-c", source, env={"PYTHONPATH": str(site)}, cwd=tmp_path).split() == [name]


@pytest.mark.slow
def test_wheel_holds_the_package_its_types_and_its_licence_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "trl_lora_sync/py.typed" in names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"trl_lora_sync"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def imported(name: str, source: str) -> set[str]:
    """The modules of the package that the module `name` names: in an import, or as a text for `import_module`."""
    found = set(re.findall(r"trl_lora_sync(?:\.\w+)+", source))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            package = ".".join(name.split(".")[: -node.level]) if node.level else ""
            module = ".".join(part for part in (package, node.module) if part)
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.slow
def test_wheel_holds_no_benchmark_and_no_module_that_only_benchmarks_use(wheel: Path) -> None:
    is_benchmark = re.compile(r'"benchmark": "\w+"').search  # what a benchmark writes into its result
    assert is_benchmark((ROOT / "benchmarks" / "sync_measure.py").read_text())
    archive = zipfile.ZipFile(wheel)
    sources = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): archive.read(name).decode()
        for name in archive.namelist()
        if name.endswith(".py")
    }
    assert [name for name, source in sources.items() if is_benchmark(source)] == []
    # What users start: the commands, the scripts, the plugins inside an engine, what their tests import, and the
    # package's own names, which `trl_lora_sync` imports for the type checker.
    used = {"trl_lora_sync", "trl_lora_sync.cli.main", "trl_lora_sync.testing"}
    used |= {f"trl_lora_sync.cli.{'training' if name in TRAINING else name}" for name in COMMANDS}
    used |= {name for name in sources if name.startswith(("trl_lora_sync.scripts.", "trl_lora_sync.engine_plugins."))}
    new = set(used)
    while new:
        new = {one for name in new for one in imported(name, sources[name]) if one in sources} - used
        used |= new
    packages = {name for name in sources if any(other.startswith(f"{name}.") for other in sources)}
    assert sources.keys() - used - packages == set()


@pytest.mark.slow
def test_wheel_brings_the_command_and_the_script_that_it_launches(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    [entry_points] = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    assert "trl-lora-sync = trl_lora_sync.cli.main:main" in archive.read(entry_points).decode()
    assert {f"trl_lora_sync/scripts/{name}.py" for name in ("grpo", "rloo", "distillation")} <= {*archive.namelist()}


@pytest.mark.parametrize("name", ["SFTTrainer", "SFTConfig", "OnlineDPOTrainer"])
def test_importing_a_trainer_that_there_is_not_says_what_there_is(name: str) -> None:
    """Python's own words named neither the reason nor what to import."""
    with pytest.raises(ImportError, match=rf"'{name}'.*it has .*GRPOConfig, GRPOTrainer.*import {name} from trl"):
        exec(f"from trl_lora_sync import {name}")


def test_a_name_that_is_no_trainer_is_not_there_as_usual() -> None:
    assert not hasattr(trl_lora_sync, "no_such_name")
    with pytest.raises(ImportError, match="cannot import name 'no_such_name'"):
        exec("from trl_lora_sync import no_such_name")
