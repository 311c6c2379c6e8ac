"""Messages about arguments that a command does not have."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice

from trl_lora_sync.cli.launch import without_keys
from trl_lora_sync.engines.registry import ENGINES

# The engines and `trl vllm-serve` name the model by one of these, and `serve` takes it without a flag.
_MODEL_FLAGS = ("--model", "--model-path", "--model_path")
# `--lora-rnak` is as close to `--lora-rank` as 0.91, and `--max-lora-rank` of vLLM 0.85.
_CLOSE = 0.86


def similar_flag(flag: str, known: Iterable[str]) -> str | None:
    """The flag that was probably meant; with `_` where a flag is spelt with `_` and with `-`, as TRL's are."""
    # `_` sorts after `-`, so of two spellings the one with `_` stays, in which TRL documents its flags.
    by_spelling = {name.replace("-", "_"): name for name in sorted(known)}
    found = get_close_matches(flag.partition("=")[0].replace("-", "_"), by_spelling, n=1, cutoff=_CLOSE)
    return by_spelling[found[0]] if found else None


def explain_unknown(serve: str, known: Mapping[str, bool], typed: Sequence[str], rest: Sequence[str]) -> str | None:
    """One message for the flags that `serve` does not have, with the command that works; None if it has all.

    Args:
        serve: the words before the arguments.
        known: its flags, and whether each takes a value.
        typed: what was typed before `--`.
        rest: what was typed after it.
    """
    # Without values, as an unknown flag is an error whatever follows it.
    _, others, _ = _separate(known, typed, 0)
    if not others:
        return None
    flags = [other.partition("=")[0] for other in others]
    if found := next((flag for flag in flags if flag in _MODEL_FLAGS), None):
        engine = next((word for word in typed if word in ENGINES), next(iter(ENGINES)))
        return f"{found} is not known. The model follows the engine, without a flag: {serve} {engine} MODEL"
    for flag in flags:
        if meant := similar_flag(flag, known):
            return f"{flag} is not known. Did you mean {meant}?"
    shown = f"{', '.join(flags)} {'is' if len(flags) == 1 else 'are'} not known"
    # An unknown flag may take any number of values. The first count that leaves an engine and a model is the likely
    # one.
    for most_values in (len(typed), 1, 0):
        kept, others, places = _separate(known, typed, most_values)
        if len(places) == 2 and places[0] in ENGINES:
            command = [*shlex.split(serve), *kept, "--", *others, *rest]
            return f"{shown}. Arguments of the engine follow --: {shlex.join(without_keys(command))}"
    return f"{shown}. See `{serve} --help`."


def _separate(
    known: Mapping[str, bool], typed: Sequence[str], most_values: int
) -> tuple[list[str], list[str], list[str]]:
    """What `serve` takes, the flags that it does not have with their values, and the positional ones of the former."""
    kept: list[str] = []
    others: list[str] = []
    places: list[str] = []
    values_left = 0
    words = iter(typed)
    for word in words:
        flag = word.partition("=")[0]
        if flag in known:
            # From the same iterator, so that a value such as -1 is not taken for a flag.
            kept += [word, *islice(words, int(known[flag] and "=" not in word))]
            values_left = 0
        elif word.startswith("-"):
            others.append(word)
            values_left = 0 if "=" in word else most_values
        elif values_left:
            others.append(word)
            values_left -= 1
        else:
            kept.append(word)
            places.append(word)
    return kept, others, places
