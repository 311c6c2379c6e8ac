"""The fields that this package adds to TRL's configuration, read from the source, so that no one waits for torch."""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_lora_sync import cli

_SOURCE = Path(cli.__file__).parents[1] / "config.py"


@dataclass(frozen=True, kw_only=True)
class OurField:
    """A field of `LoRASyncConfig`: its values if these are few, otherwise its type."""

    name: str
    choices: tuple[Any, ...]
    type: str
    default: Any
    help: str

    def row(self) -> tuple[str, str]:
        """The flag and its description, for a list."""
        values = f"<{'|'.join(map(str, self.choices))}>" if self.choices else self.type.upper()
        return (
            f"--{self.name} {values}",
            self.help if self.default is None else f"{self.help}  [default: {self.default}]",
        )


def our_fields() -> list[OurField]:
    """The fields in the order of the source."""
    # Unpacked, so that a class that was renamed fails here and not as a help text without fields.
    (config,) = [
        node
        for node in ast.parse(_SOURCE.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "LoRASyncConfig"
    ]
    return [_read(node) for node in config.body if isinstance(node, ast.AnnAssign)]


def _read(node: ast.AnnAssign) -> OurField:
    assert isinstance(node.target, ast.Name)
    assert isinstance(node.value, ast.Call)
    # Defaults and help texts must be literals: what is computed there would need the import of TRL.
    given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.value.keywords}
    annotation = node.annotation
    # `Literal[...]` is the only subscript among the annotations.
    is_literal = isinstance(annotation, ast.Subscript)
    return OurField(
        name=node.target.id,
        choices=tuple(ast.literal_eval(annotation.slice)) if isinstance(annotation, ast.Subscript) else (),
        # `| None` means that the flag may be left out, which holds for every flag.
        type="" if is_literal else ast.unparse(annotation).partition(" | ")[0],
        default=given["default"],
        help=given["metadata"]["help"],
    )
