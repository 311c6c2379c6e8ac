"""Messages about arguments that a command does not have."""

import argparse
import contextlib
import io
import shlex
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from trl_lora_sync.cli.launch import without_keys

# `--lora-rnak` is as close to `--lora-rank` as 0.91, and `--max-lora-rank` of vLLM 0.85.
_CLOSE = 0.86


def similar_flag(flag: str, known: Iterable[str]) -> str | None:
    """The flag that was probably meant; with `_` where a flag is spelt with `_` and with `-`, as TRL's are."""
    by_spelling = {name.replace("-", "_"): name for name in sorted(known)}
    found = get_close_matches(flag.partition("=")[0].replace("-", "_"), by_spelling, n=1, cutoff=_CLOSE)
    return by_spelling[found[0]] if found else None


def explain_unknown(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str],
    unknown: Sequence[str],
    rest: Sequence[str],
    *,
    passes_on: bool,
) -> str:
    """One message for `unknown`, with what to type instead.

    Args:
        arguments: what was typed before `--`.
        rest: what was typed after it.
        passes_on: whether the command hands on what follows `--`.
    """
    known = parser._option_string_actions
    for argument in unknown:
        if argument.startswith("-") and (meant := similar_flag(argument, known)):
            return f"{argument.partition('=')[0]} is not known. Did you mean {meant}?"
    flags = [argument.partition("=")[0] for argument in unknown if argument.startswith("-")]
    shown = f"{', '.join(flags or unknown)} {'is' if len(flags or unknown) == 1 else 'are'} not known"
    if passes_on and (moved := _moved(parser, arguments)):
        kept, engines = moved
        command = [*shlex.split(parser.prog), *kept, "--", *engines, *rest]
        return f"{shown}. Arguments of the engine follow --: {shlex.join(without_keys(command))}"
    return f"{shown}. See `{parser.prog} --help`."


def _moved(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """The arguments that the parser takes, and the others; None if the two cannot be separated."""
    for most_values in (len(arguments), 1, 0):
        kept: list[str] = []
        others: list[str] = []
        values_left = 0
        for argument in arguments:
            if argument.startswith("-"):
                is_known = argument.partition("=")[0] in parser._option_string_actions
                values_left = 0 if is_known or "=" in argument else most_values
                (kept if is_known else others).append(argument)
            elif values_left:
                values_left -= 1
                others.append(argument)
            else:
                kept.append(argument)
        if others and _takes(parser, kept):
            return kept, others
    return None


def _takes(parser: argparse.ArgumentParser, arguments: list[str]) -> bool:
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return not parser.parse_known_args(arguments)[1]
    except SystemExit:
        return False
