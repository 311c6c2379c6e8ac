"""Make one HTML page of a run's logs: reward, sync time by phase, log-probability gaps, importance ratio, servers.

Reads the log history in trainer_state.json, of RUN_DIR itself or of its newest checkpoint. The page holds all it needs,
so it can be sent and opened anywhere, without a network.
"""

import argparse
import html
import json
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trl_lora_sync.cli.charts import Line, line_chart, stacked_chart
from trl_lora_sync.cli.console import UsageError, out
from trl_lora_sync.metrics import PREFIX, VERIFY_GAP, percentile

Row = dict[str, Any]
PHASES = ("gather", "write", "push", "load", "verify")
RATIO, GAP = "sampling/importance_sampling_ratio", "sampling/sampling_logp_difference"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="output_dir of the run, or one of its checkpoints"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: lora-sync-report.html in RUN_DIR")


def run(args: argparse.Namespace, rest: list[str]) -> int:
    if rest:
        raise UsageError(f"nothing may follow --, but {' '.join(rest)} does.")
    history = read_history(args.run_dir)
    file = args.out or args.run_dir / "lora-sync-report.html"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page(args.run_dir.resolve().name, history), encoding="utf-8")
    out().print(f"Written to {os.path.relpath(file)}: {len(history)} logged steps.")
    return 0


def read_history(run_dir: Path) -> list[Row]:
    """What the trainer logged while training, one row per log; the newest state there is.

    Raises:
        UsageError: there is none, or nothing of training in it.
    """
    states = [*run_dir.glob("trainer_state.json"), *run_dir.glob("checkpoint-*/trainer_state.json")]
    found: dict[str, Any] = {}
    for file in states:
        try:
            state = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise UsageError(f"{file} cannot be read ({error}). Is the run still writing it?") from error
        if not found or state.get("global_step", 0) > found.get("global_step", 0):
            found = state
    if not found:
        raise UsageError(
            f"There is no trainer_state.json in {run_dir} or its checkpoints. The trainer writes one with each "
            "checkpoint (save_strategy), and with trainer.save_state()."
        )
    rows = [row for row in found.get("log_history", []) if "reward" in row or f"{PREFIX}version" in row]
    if not rows:
        raise UsageError(f"The log history in {run_dir} has no reward and no sync in it. Is it a GRPO run?")
    return rows


def page(title: str, history: Sequence[Row]) -> str:
    """The whole page."""
    sections = [
        _reward(history),
        _sync_time(history),
        _verify_gap(history),
        _logprob_gap(history),
        _ratio(history),
        _servers(history),
    ]
    drawn = [f"<section><h2>{html.escape(name)}</h2>{body}</section>" for name, body in sections if body is not None]
    missing = [name for name, body in sections if body is None]
    left_out = (
        f'<p class="missing">Not in the log of this run, so left out: {html.escape(", ".join(missing))}.</p>'
        if missing
        else ""
    )
    return _PAGE.format(
        title=html.escape(title),
        made=time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        tiles="".join(_tile(name, value) for name, value in _facts(history)),
        sections="\n".join(drawn),
        missing=left_out,
        table=_table(history),
    )


def series(history: Iterable[Row], metric: str) -> list[tuple[float, float]]:
    """(step, value) of the rows that have the metric."""
    return [(float(row["step"]), float(row[metric])) for row in history if isinstance(row.get(metric), int | float)]


def _reward(history: Sequence[Row]) -> tuple[str, str | None]:
    reward, spread = series(history, "reward"), dict(series(history, "reward_std"))
    if not reward:
        return "Reward", None
    band = [(x, y - spread[x], y + spread[x]) for x, y in reward if x in spread]
    note = "Mean of each step; the band is one standard deviation within the batch." if band else "Mean of each step."
    return "Reward", line_chart([Line("reward", reward, band=band)], y_label="reward") + _note(note)


def _sync_time(history: Sequence[Row]) -> tuple[str, str | None]:
    total = series(history, f"{PREFIX}total_s")
    if not total:
        return "Sync time by phase", None
    parts = [Line(phase, found) for phase in PHASES if (found := series(history, f"{PREFIX}{phase}_s"))]
    named = [sum(dict(part.points).get(x, 0.0) for part in parts) for x, _ in total]
    parts.append(Line("rest", [(x, max(0.0, y - known)) for (x, y), known in zip(total, named, strict=True)]))
    seconds = [y for _, y in total]
    note = f"Median {_seconds(statistics.median(seconds))}, 99th percentile {_seconds(percentile(seconds, 99))}."
    return "Sync time by phase", stacked_chart(parts, y_label="seconds") + _note(note)


def _verify_gap(history: Sequence[Row]) -> tuple[str, str | None]:
    name = "Verify gap"
    mean = series(history, VERIFY_GAP) or series(history, f"{VERIFY_GAP}/mean")
    if not mean:
        return name, None
    lines = [Line("mean", mean)]
    if largest := series(history, f"{VERIFY_GAP}/max") or series(history, f"{VERIFY_GAP}_max"):
        lines.append(Line("max", largest))
    note = "|served - trained log-probability| of the probe prompt, where a version was verified."
    return name, line_chart(lines, y_label="nats", from_zero=True) + _note(note)


def _logprob_gap(history: Sequence[Row]) -> tuple[str, str | None]:
    name = "Log-probability gap of the completions"
    lines = [Line(which, found) for which in ("mean", "max") if (found := series(history, f"{GAP}/{which}"))]
    note = "|server - trainer| over the sampled tokens, as TRL logs it. It should stay small and flat."
    return name, line_chart(lines, y_label="nats", from_zero=True) + _note(note) if lines else None


def _ratio(history: Sequence[Row]) -> tuple[str, str | None]:
    mean = series(history, f"{RATIO}/mean")
    if not mean:
        return "Importance ratio", None
    low, high = dict(series(history, f"{RATIO}/min")), dict(series(history, f"{RATIO}/max"))
    band = [(x, low[x], high[x]) for x, _ in mean if x in low and x in high]
    note = "Trainer's over server's probability of what was sampled; the band is from least to most. Near 1 is right."
    chart = line_chart([Line("mean", mean, band=band)], y_label="ratio", reference=1.0)
    return "Importance ratio", chart + _note(note)


def _servers(history: Sequence[Row]) -> tuple[str, str | None]:
    places = sorted({key for row in history for key in row if key.startswith(f"{PREFIX}load_s/")}, key=_place)
    lines = [Line(f"server {_place(key)}", series(history, key)) for key in places]
    if not lines:
        return "Servers", None
    count = series(history, f"{PREFIX}servers")
    note = "Seconds of the load on each server."
    if count:
        fewest, most = (int(pick(y for _, y in count)) for pick in (min, max))
        note += f" In use: {most}." if fewest == most else f" In use: {fewest} to {most}."
    return "Servers", line_chart(lines, y_label="seconds", from_zero=True) + _note(note)


def _place(key: str) -> int | str:
    place = key.rpartition("/")[2]
    return int(place) if place.isdecimal() else place


def _facts(history: Sequence[Row]) -> list[tuple[str, str]]:
    facts = [("steps", f"{int(history[-1]['step'])}")]
    rewards = [y for _, y in series(history, "reward")]
    if rewards:
        edge = min(5, len(rewards))
        first, last = statistics.fmean(rewards[:edge]), statistics.fmean(rewards[-edge:])
        facts.append((f"reward, first to last {edge}", f"{first:.3g} → {last:.3g}"))
    seconds = [y for _, y in series(history, f"{PREFIX}total_s")]
    if seconds:
        facts.append(("median sync", _seconds(statistics.median(seconds))))
        facts.append(("p99 sync", _seconds(percentile(seconds, 99))))
        steps = [y for _, y in series(history, "step_time")]
        if steps:
            facts.append(("of the step time", f"{sum(seconds) / sum(steps):.1%}"))
    sizes = [y for _, y in series(history, f"{PREFIX}bytes")]
    if sizes:
        facts.append(("per sync", _bytes(statistics.median(sizes))))
    versions = [y for _, y in series(history, f"{PREFIX}version")]
    if versions:
        facts.append(("adapter version", f"{versions[-1]:.0f}"))
    retries = series(history, f"{PREFIX}retries")
    if retries:
        facts.append(("sent again", f"{sum(y for _, y in retries):.0f}"))
    return facts


def _seconds(value: float) -> str:
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"


def _bytes(value: float) -> str:
    return f"{value / 1e6:.1f} MB" if value >= 1e6 else f"{value / 1e3:.0f} kB"


def _tile(name: str, value: str) -> str:
    return f"<div><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>"


def _note(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _table(history: Sequence[Row]) -> str:
    wanted = ("reward", f"{PREFIX}version", f"{PREFIX}total_s", f"{GAP}/mean", f"{RATIO}/mean")
    columns = [metric for metric in wanted if series(history, metric)]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("step", *columns))
    rows = []
    for row in history:
        cells = "".join(f"<td>{row[name]:.4g}</td>" if name in row else "<td></td>" for name in columns)
        rows.append(f"<tr><td>{row['step']}</td>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}: LoRA adapter sync</title>
<style>
:root {{ color-scheme: light dark; --ink: #1c2430; --soft: #5d6878; --line: #dde2e9; --page: #fff; --card: #f6f7f9;
  --s0: #2563c9; --s1: #d9730d; --s2: #16836b; --s3: #9244b8; --s4: #b8324f; --s5: #6b7684; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e8ecf2; --soft: #9aa6b6; --line: #313a47; --page: #12161c;
  --card: #1b212a; --s0: #6ea3ff; --s1: #f2a04a; --s2: #4cc3a5; --s3: #c58be6; --s4: #f07a92; --s5: #98a3b1; }} }}
* {{ box-sizing: border-box; }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0 auto;
  max-width: 980px; padding: 32px 20px 64px; }}
h1 {{ font-size: 24px; margin: 0; }} h2 {{ font-size: 17px; margin: 0 0 8px; }}
header p, section p, .missing {{ color: var(--soft); margin: 4px 0 0; }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 10px; margin: 20px 0; }}
.tiles div {{ background: var(--card); border-radius: 8px; padding: 10px 12px; }}
.tiles b {{ display: block; font-size: 18px; white-space: nowrap; }}
.tiles span {{ color: var(--soft); font-size: 13px; }}
section {{ margin: 28px 0; }} .missing {{ font-style: italic; }}
svg {{ display: block; width: 100%; height: auto; }}
svg text {{ fill: var(--soft); font: 12px system-ui, sans-serif; }}
details {{ margin-top: 28px; }} summary {{ cursor: pointer; }}
table {{ border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; display: block;
  overflow-x: auto; margin-top: 8px; }}
th, td {{ text-align: right; padding: 3px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }}
</style>
</head>
<body>
<header><h1>{title}</h1><p>LoRA adapter sync, made {made} UTC from the trainer's log</p></header>
<div class="tiles">{tiles}</div>
{sections}
{missing}
<details><summary>All steps as a table</summary>{table}</details>
</body>
</html>
"""
