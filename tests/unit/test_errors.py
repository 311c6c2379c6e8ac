"""The error hierarchy: as drawn in the module, and able to travel between processes."""

import pickle
import re

import pytest

from trl_lora_sync import errors
from trl_lora_sync.errors import LoRASyncError

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, BaseException)]
_LINE = re.compile(r"^    (?P<branch>[│├└─ ]*)(?P<name>\w+) *(?:\((?P<standard>\w+)\))?(?: .*)?$")


def drawn_tree() -> dict[str, tuple[str | None, str | None]]:
    """Class name to its parent and standard type, as the module's docstring draws them."""
    tree: dict[str, tuple[str | None, str | None]] = {}
    path: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = _LINE.match(line)
        if not found or not found["name"].endswith("Error"):
            continue
        depth = len(found["branch"])
        while path and path[-1][0] >= depth:
            path.pop()
        tree[found["name"]] = (path[-1][1] if path else None, found["standard"])
        path.append((depth, found["name"]))
    return tree


def test_docstring_draws_every_class() -> None:
    assert set(drawn_tree()) == {error.__name__ for error in CLASSES}
    assert len(CLASSES) > 10


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_class_inherits_what_the_docstring_draws(error: type[Exception]) -> None:
    parent, standard = drawn_tree()[error.__name__]
    bases = {base.__name__ for base in error.__bases__}
    assert bases == {name for name in (parent or "Exception", standard) if name}
    assert issubclass(error, LoRASyncError)


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_error_pickles_with_its_message(error: type[Exception]) -> None:
    message = "What was wrong. What was expected.\nWhat to do: 'trl>=1.11'"
    copy = pickle.loads(pickle.dumps(error(message)))
    assert type(copy) is error
    assert copy.args == (message,)
    assert str(copy) == message


@pytest.mark.parametrize(
    ("error", "standard"),
    [
        (errors.UnsupportedTRLError, ImportError),
        (errors.UnsupportedSettingError, ValueError),
        (errors.UnsupportedAdapterError, ValueError),
        (errors.AdapterExportError, OSError),
        (errors.DeadlineExceededError, TimeoutError),
        (errors.ServerUnreachableError, ConnectionError),
        (errors.ServerAuthError, PermissionError),
        (errors.AdapterRejectedError, RuntimeError),
    ],
)
def test_error_is_caught_by_the_standard_type_callers_already_catch(
    error: type[Exception], standard: type[Exception]
) -> None:
    with pytest.raises(standard, match="words"):
        raise error("words")
