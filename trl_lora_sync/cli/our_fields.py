"""The fields that this package adds to TRL's configuration, read from the source, so that no one waits for torch."""

import ast
from pathlib import Path

from trl_lora_sync import cli

_SOURCE = Path(cli.__file__).parents[1] / "config.py"


def our_flags() -> dict[str, tuple[str, str]]:
    """By the names of the fields, in the order of the source: the flag with its values, and its description."""
    # Unpacked, so that a class that was renamed fails here and not as a help text without fields.
    (config,) = [
        node
        for node in ast.parse(_SOURCE.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "LoRASyncConfig"
    ]
    return dict(_read(node) for node in config.body if isinstance(node, ast.AnnAssign))


def _read(node: ast.AnnAssign) -> tuple[str, tuple[str, str]]:
    assert isinstance(node.target, ast.Name)
    assert isinstance(node.value, ast.Call)
    name, kind = node.target.id, node.annotation
    # Defaults and help texts must be literals: what is computed there would need the import of TRL.
    given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.value.keywords}
    # `Literal[...]` is the only subscript among the annotations.
    if isinstance(kind, ast.Subscript):
        values = f"<{'|'.join(map(str, ast.literal_eval(kind.slice)))}>"
    else:
        # `| None` means that the flag may be left out, which holds for every flag.
        values = ast.unparse(kind).partition(" | ")[0].upper()
    default = "" if given["default"] is None else f"  [default: {given['default']}]"
    return name, (f"--{name} {values}", f"{given['metadata']['help']}{default}")
