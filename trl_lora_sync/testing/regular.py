"""Which characters may follow while a text grows towards a regular expression; what a grammar backend knows."""

import importlib
import sys
from collections.abc import Iterable
from typing import Any

# The parser of the standard library; its tree is stable, its name became private in 3.11.
_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_ANY = frozenset(map(chr, range(32, 127)))
_CATEGORIES = {
    "CATEGORY_DIGIT": frozenset("0123456789"),
    "CATEGORY_SPACE": frozenset(" \t\n\r\f\v"),
    "CATEGORY_WORD": frozenset(c for c in _ANY if c.isalnum() or c == "_"),
}
_CATEGORIES |= {name.replace("_", "_NOT_"): _ANY - characters for name, characters in _CATEGORIES.items()}


class Regular:
    """A non-deterministic automaton over characters; state 0 is the start."""

    def __init__(self, pattern: str) -> None:
        self._edges: list[list[tuple[frozenset[str] | None, int]]] = [[]]
        self._accept = self._sequence(_parser.parse(pattern), 0)

    def start(self) -> frozenset[int]:
        return self._closure({0})

    def after(self, states: frozenset[int], text: str) -> frozenset[int]:
        for character in text:
            targets = {to for at in states for allowed, to in self._edges[at] if allowed and character in allowed}
            states = self._closure(targets)
        return states

    def may_end(self, states: frozenset[int]) -> bool:
        return self._accept in states

    def _closure(self, states: Iterable[int]) -> frozenset[int]:
        found, todo = set(states), list(states)
        while todo:
            for allowed, to in self._edges[todo.pop()]:
                if allowed is None and to not in found:
                    found.add(to)
                    todo.append(to)
        return frozenset(found)

    def _new(self) -> int:
        self._edges.append([])
        return len(self._edges) - 1

    def _edge(self, at: int, allowed: frozenset[str] | None) -> int:
        to = self._new()
        self._edges[at].append((allowed, to))
        return to

    def _sequence(self, tree: Iterable[tuple[Any, Any]], at: int) -> int:
        for operation, value in tree:
            at = self._one(str(operation), value, at)
        return at

    def _one(self, operation: str, value: Any, at: int) -> int:
        if operation == "LITERAL":
            return self._edge(at, frozenset(chr(value)))
        # What `[^x]` is parsed to.
        if operation == "NOT_LITERAL":
            return self._edge(at, _ANY - {chr(value)})
        if operation == "ANY":
            return self._edge(at, _ANY)
        if operation == "IN":
            return self._edge(at, _characters(value))
        if operation == "SUBPATTERN":
            return self._sequence(value[3], at)
        if operation == "BRANCH":
            end = self._new()
            for branch in value[1]:
                self._edges[self._sequence(branch, at)].append((None, end))
            return end
        if operation in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, inner = value
            return self._repeat(least, most, inner, at)
        # `^` and `$` add nothing, as the whole text must match in any case.
        if operation == "AT":
            return at
        raise ValueError(f"the fake does not know the regular expression element {operation}")

    def _repeat(self, least: int, most: int, tree: Any, at: int) -> int:
        for _ in range(least):
            at = self._sequence(tree, at)
        # A fresh state, so that a repetition leads back to here and not into what comes before.
        end = self._edge(at, None)
        if most is _parser.MAXREPEAT:
            self._edges[self._sequence(tree, end)].append((None, end))
            return end
        # Each optional repetition is a copy that may be left out, as an automaton does not count.
        for _ in range(most - least):
            at = self._sequence(tree, at)
            self._edges[at].append((None, end))
        return end


def _characters(items: list[tuple[Any, Any]]) -> frozenset[str]:
    found: set[str] = set()
    negated = False
    for kind, value in items:
        if str(kind) == "NEGATE":
            negated = True
        elif str(kind) == "LITERAL":
            found.add(chr(value))
        elif str(kind) == "RANGE":
            found.update(map(chr, range(value[0], value[1] + 1)))
        else:
            found |= _CATEGORIES[str(value)]
    # Of printable ASCII: with all of Unicode, `[^xy]` would be a set of a million characters.
    return frozenset(_ANY - found if negated else found)
