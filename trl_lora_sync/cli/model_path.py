"""The name of a base model on a command line: a path that must exist, or a name on the Hub."""

from difflib import get_close_matches
from pathlib import Path

from trl_lora_sync.cli.console import UsageError

# A name on the Hub has one slash at most. Source: huggingface_hub/utils/_validators.py `validate_repo_id`, 1.2.
_HUB_NAME_PARTS = 2


def check_exists(model: str) -> None:
    """Refuse a path that leads nowhere; what may be a name on the Hub is left to those who load it.

    Raises:
        UsageError: it does not exist.
    """
    path = Path(model)
    is_path = model.startswith((".", "/", "~")) or len(path.parts) > _HUB_NAME_PARTS
    if is_path and not path.exists():
        raise UsageError(
            f"{model} does not exist{_similar(path)}. Give the folder of the base model, or its name on the Hub."
        )


def _similar(path: Path) -> str:
    """The folder that was probably meant, as a part of a sentence."""
    found = get_close_matches(
        path.name, [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    )
    return f"; {path.parent / found[0]} does" if found else ""
