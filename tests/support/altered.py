"""Copies of installed libraries with a change in them, and what adapter sync makes of each.

    python altered.py ORDERS    # a JSON list of {"folder": ..., "action": ...}; prints one answer for each

Each copy is imported in a separate process, forked from a parent that has loaded the common modules.
"""

import gc
import importlib
import importlib.metadata
import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Edits = Mapping[str, Mapping[str, str]]


def altered_copy(
    package: str, folder: Path, edits: Edits, *, version: str, moved: Mapping[str, str] | None = None
) -> None:
    """Copy an installed package into `folder`, of links where nothing is changed.

    Args:
        edits: by file of the package, the text to replace and what to put there; each must be found.
        version: the version that the copy declares.
        moved: files of the package and where they are in the copy; a file that goes to "" is left out.
    """
    distribution = importlib.metadata.distribution(package)
    original = Path(str(distribution.locate_file(package)))
    copy = folder / package
    shutil.copytree(original, copy, copy_function=os.symlink)
    edits = (
        {**edits, "__init__.py": {distribution.version: version, **edits.get("__init__.py", {})}}
        if package == "peft"
        else edits
    )
    for name, replacements in edits.items():
        file = copy / name
        text = file.read_text()
        for old, new in replacements.items():
            assert old in text, f"{old!r} is not in {name} of {package} {distribution.version}"
            text = text.replace(old, new)
        file.unlink()
        file.write_text(text)
    for old, new in (moved or {}).items():
        if new:
            (copy / new).parent.mkdir(parents=True, exist_ok=True)
            (copy / old).rename(copy / new)
        else:
            (copy / old).unlink()
    information = folder / f"{package}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


def act(action: str) -> None:
    """Do with the copy what a training script would make of it."""
    kind, _, name = action.partition(":")
    if kind == "trainer":
        import trl_lora_sync
        from trl_lora_sync.trl_checks import check_trainer

        check_trainer(getattr(trl_lora_sync, name))
    elif kind == "overlap":
        import trl_lora_sync
        from trl_lora_sync.trl_checks import check_overlap

        check_overlap(getattr(trl_lora_sync, name))
    elif kind == "async":
        from trl_lora_sync import async_grpo
        from trl_lora_sync.trl_checks import check_async

        check_async(getattr(async_grpo, name))
    elif kind == "script":
        importlib.import_module(f"trl_lora_sync.scripts.{name}").make_parser()
    elif kind == "command":
        from trl_lora_sync import _trl

        _trl.accelerate_options(["--num_processes", "2"])
    else:
        from peft import LoraConfig

        from trl_lora_sync.adapter.support import check_peft_config

        check_peft_config(LoraConfig())
        check_peft_config(LoraConfig())


def answer(order: dict[str, str]) -> dict[str, Any]:
    """In a forked process: what came of it, and what was warned of."""
    warned: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warned.append(record.getMessage())

    logging.getLogger("trl_lora_sync").addHandler(Listener())
    sys.path.insert(0, order["folder"])
    try:
        act(order["action"])
    except BaseException as error:
        return {"error": type(error).__name__, "message": str(error), "warned": warned}
    return {"error": None, "warned": warned}


def in_a_fork(order: dict[str, str]) -> dict[str, Any]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        with os.fdopen(write, "w") as pipe:
            json.dump(answer(order), pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    found: dict[str, Any] = json.loads(text)
    return found


def main(orders: str) -> None:
    wanted = json.loads(orders)
    modules = ["torch", "torch._dynamo", "transformers", "accelerate", "datasets", "httpx"]
    if all(order["action"] != "peft" for order in wanted):
        # Most of what TRL's trainers take to import; Transformers' trainer imports PEFT.
        modules += ["peft", "transformers.trainer", "transformers.models.auto.modeling_auto", "pandas"]
    gc.disable()  # also in the forks, which do little but import; looking for garbage takes a fifth of that time
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    assert "trl" not in sys.modules, "a copy could not take its place"
    assert "peft" in modules or "peft" not in sys.modules, "a copy could not take its place"
    print(json.dumps([in_a_fork(order) for order in wanted]))


if __name__ == "__main__":
    main(sys.argv[1])
