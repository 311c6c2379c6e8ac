"""No decision of the package rests on the wall clock, which jumps."""

import ast
from pathlib import Path

import pytest

import trl_lora_sync

SOURCES = sorted(Path(trl_lora_sync.__file__).parent.rglob("*.py"))
WALL_CLOCK = {"time", "time_ns", "ctime", "gmtime", "localtime", "now", "utcnow", "today", "st_mtime", "st_ctime"}
# Only to name a run, which random bits make unique, to date a page and a log, and for a pause that a server
# gives as a date, which is bounded by a deadline.
ALLOWED = {
    ("store.py", "strftime"),
    ("run_log.py", "now"),
    *(("report_page.py", asked) for asked in ("strftime", "gmtime")),
    ("http.py", "time"),
    ("rollouts.py", "time"),  # TRL's rollout loop writes it into its heartbeat (1.16)
}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_no_module_asks_the_wall_clock(source: Path) -> None:
    asked = {
        (source.name, node.attr)
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in WALL_CLOCK | {"strftime"}
    }
    assert asked <= ALLOWED
