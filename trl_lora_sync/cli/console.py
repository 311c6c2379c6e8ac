"""Where commands write: results to standard output, everything else to standard error; colour on a terminal only."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


class UsageError(Exception):
    """What was typed cannot be done; ends the command with exit status 2."""


@cache
def out() -> "Console":
    """Standard output. Lines are never cut or wrapped, so that they can be searched and copied."""
    from rich.console import Console

    # Without markup, for which rich would take text in square brackets.
    return Console(soft_wrap=True, highlight=False, markup=False, emoji=False)


@cache
def err() -> "Console":
    """Standard error."""
    from rich.console import Console

    # One for all, as rich keeps lines above a spinner only if the spinner's own console prints them.
    return Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show that something takes its time: a spinner with the seconds on a terminal, one line elsewhere."""
    if not err().is_terminal:
        err().print(f"{what} ...")
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    # The text may be a URL, and an IPv6 address has square brackets.
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=err(), transient=True) as progress:
        progress.add_task(what, total=None)
        yield
