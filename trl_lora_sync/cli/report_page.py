"""What the report shows of one run or of several: which charts, from which metrics, and the page around them."""

import html
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from trl_lora_sync.cli.figures import Line, line_figure, outliers, share_steps, stack_top, stacked_figure, sums
from trl_lora_sync.cli.run_history import Point, Run
from trl_lora_sync.engines.registry import ENGINES
from trl_lora_sync.metrics import GENERATE, PREFIX, VERIFY_GAP, percentile

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PHASES = ("gather", "write", "load")  # verification has a chart by itself, as it may take longer than all of them
RATIO, GAP = "sampling/importance_sampling_ratio", "sampling/sampling_logp_difference"
_CLIPPED = "completions/clipped_ratio"
# Title, metric, unit, and the text below the chart.
TRAINING = (
    ("Loss", "loss", "loss", "It need not fall: the advantages of a group add up to zero."),
    ("Entropy", "entropy", "nats per token", "Of the policy. A quick fall to zero is a collapse."),
    ("KL divergence", "kl", "nats per token", "From the reference model; TRL logs it if beta is above 0."),
    ("Gradient norm", "grad_norm", "norm", "Before clipping."),
    ("Learning rate", "learning_rate", "rate", ""),
)
# What is searched for values out of the ordinary.
WATCHED = (
    "step_time", GENERATE, f"{PREFIX}total_s", f"{PREFIX}load_s", "loss", "entropy", "kl", "grad_norm",
    "completions/mean_length", f"{GAP}/mean", f"{RATIO}/mean",
)  # fmt: skip
_CONFIG = {
    "responsive": True,
    "displaylogo": False,
    "modeBarButtons": [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    # By default plotly.js 7 has a button that uploads the chart.
    "showSendToCloud": False,
    "plotlyServerURL": "",
}
_MOST_OUTLIERS = 30
_EDGE_STEPS = 5  # averaged at either end of a run to show how much the reward rose


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    figure: "Figure | None"  # None if no run has logged it
    note: str = ""


def page(runs: Sequence[Run]) -> str:
    """The whole page."""
    from plotly.offline import get_plotlyjs

    sections = [
        ("Reward", [_reward(runs)]),
        ("Where the time of a step goes", _step_time(runs)),
        ("Training", [*_training(runs), _lengths(runs)]),
        ("Sync time by phase", _sync_time(runs)),
        ("Verification", [_verify_time(runs), _verify_gap(runs)]),
        ("Server and trainer", [_logprob_gap(runs), _ratio(runs)]),
        ("Servers", [_servers(runs)]),
    ]
    # Before `_section`, which turns the figures into JSON.
    shown = [chart.figure for _, charts in sections for chart in charts if chart.figure is not None]
    share_steps(shown, min(run.rows[0]["step"] for run in runs), max(run.last_step for run in runs))
    # Filled by `_section`, which numbers the charts by it, so it is complete after the next line only.
    figures: list[str] = []
    drawn = [_section(title, charts, figures) for title, charts in sections]
    missing = [chart.title for _, charts in sections for chart in charts if chart.figure is None]
    return _PAGE.format(
        title=html.escape(_title(runs)),
        subtitle=html.escape(", ".join(run.name for run in runs)),
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        facts=_facts(runs),
        sections="\n".join(filter(None, drawn)),
        missing=f"<p>Not in the log, so left out: {html.escape(', '.join(missing))}.</p>" if missing else "",
        outliers=_outlier_table(runs),
        settings=_settings(runs),
        steps="".join(_step_table(run) for run in runs),
        plotly=get_plotlyjs(),
        figures=",\n".join(figures),
        config=json.dumps(_CONFIG),
    )


# Charts

Band = list[tuple[float, float, float]]


def _lines(
    runs: Sequence[Run],
    *metrics: tuple[str, str],
    band: Callable[[Run], Band] = lambda run: [],
    marks_outliers: bool = True,
) -> list[Line]:
    """A line per run and metric, given as its label and its name; colours separate runs, or the metrics of one run.

    Args:
        band: that of the first metric.
    """
    found = []
    for number, run in enumerate(runs):
        for place, (label, metric) in enumerate(metrics):
            points = run.series(metric)
            if points and len(runs) == 1:
                line = Line(name=label, points=points, colour=place)
            elif points:
                name = f"{run.name}, {label}" if len(metrics) > 1 else run.name
                line = Line(name=name, points=points, colour=number, is_dashed=place > 0)
            else:
                continue
            # A maximum over all tokens varies too much from step to step for a mark to mean anything.
            marks = marks_outliers and label != "max"
            found.append(replace(line, band=band(run) if place == 0 else [], marks_outliers=marks))
    return found


def _chart(title: str, lines: Sequence[Line], unit: str, note: str = "", **look: Any) -> Chart:
    return Chart(title=title, figure=line_figure(lines, unit=unit, **look) if lines else None, note=note)


def _between(low: str, high: str) -> Callable[[Run], Band]:
    """A band from one metric to another, where both are there."""

    def band(run: Run) -> Band:
        tops = dict(run.series(high))
        return [(step, bottom, tops[step]) for step, bottom in run.series(low) if step in tops]

    return band


def _reward(runs: Sequence[Run]) -> Chart:
    def deviation(run: Run) -> Band:
        spread = dict(run.series("reward_std"))
        return [(x, y - spread[x], y + spread[x]) for x, y in run.series("reward") if x in spread]

    metrics = [("reward", "reward")]
    if any(run.series("eval_reward") for run in runs):
        metrics.append(("evaluation", "eval_reward"))
    note = "Mean of each step; the band is one standard deviation within the batch."
    return _chart("Reward", _lines(runs, *metrics, band=deviation, marks_outliers=False), "reward", note)


def _training(runs: Sequence[Run]) -> list[Chart]:
    return [
        _chart(title, _lines(runs, (metric, metric), marks_outliers=metric != "learning_rate"), unit, note)
        for title, metric, unit, note in TRAINING
    ]


def _lengths(runs: Sequence[Run]) -> Chart:
    name = "completions/mean_length"
    lines = _lines(runs, ("mean", name), band=_between("completions/min_length", "completions/max_length"))
    note = "The band is from the shortest to the longest."
    if cut := [f"{100 * statistics.fmean(values):.0f} %" for run in runs if (values := run.finite(_CLIPPED))]:
        note += f" Cut off at max_completion_length: {' and '.join(cut)} of all."
    return _chart("Completion length", lines, "tokens", note, from_zero=True)


def _step_time(runs: Sequence[Run]) -> list[Chart]:
    return _stacks(
        runs,
        "Time of a step",
        [run.step_parts() for run in runs],
        "Generation and sync are measured; train is the rest of TRL's step_time, rewards included.",
        lambda run: "",
    )


def _sync_time(runs: Sequence[Run]) -> list[Chart]:
    def parts(run: Run) -> dict[str, list[Point]]:
        total = run.series(f"{PREFIX}total_s")
        known = {phase: run.series(f"{PREFIX}{phase}_s") for phase in PHASES}
        verified = dict(run.series(f"{PREFIX}verify_s"))
        at = [dict(points) for points in known.values()]
        rest = [(x, max(0.0, y - verified.get(x, 0.0) - sum(one.get(x, 0.0) for one in at))) for x, y in total]
        return {phase: points for phase, points in {**known, "rest": rest}.items() if points}

    def note(run: Run) -> str:
        seconds = run.finite(f"{PREFIX}total_s")
        if not seconds:
            return ""
        return (
            f" With it, the median is {_seconds(statistics.median(seconds))}, "
            f"the 99th percentile {_seconds(percentile(seconds, 99))}."
        )

    return _stacks(runs, "Sync time by phase", [parts(run) for run in runs], "Without verification.", note)


def _stacks(
    runs: Sequence[Run],
    title: str,
    parts: Sequence[dict[str, list[Point]]],
    note: str,
    more: Callable[[Run], str],
) -> list[Chart]:
    """A stacked chart for each run that has the parts, all with the same axis."""
    stacks = [[Line(name=name, points=points) for name, points in one.items()] for one in parts]
    top = stack_top(sums(stack) for stack in stacks if stack)
    return [
        Chart(
            title=run.name if len(runs) > 1 else title,
            figure=stacked_figure(stack, unit="seconds", top=top),
            note=note + more(run),
        )
        for run, stack in zip(runs, stacks, strict=True)
        if stack
    ] or [Chart(title=title, figure=None)]


def _verify_time(runs: Sequence[Run]) -> Chart:
    lines = _lines(runs, ("verify", f"{PREFIX}verify_s"), marks_outliers=False)
    counts = [f"{len(run.series(f'{PREFIX}verify_s'))} of {len(run.series(f'{PREFIX}total_s'))}" for run in runs]
    note = f"Of the syncs, verified were: {', '.join(counts)}."
    return _chart("Verification time", lines, "seconds", note, from_zero=True, is_sparse=True)


def _verify_gap(runs: Sequence[Run]) -> Chart:
    lines = _lines(runs, ("mean", VERIFY_GAP), ("max", f"{VERIFY_GAP}_max"), marks_outliers=False)
    note = "|served - trained log-probability| of the probe prompt, where a version was verified."
    return _chart("Verify gap", lines, "nats", note, from_zero=True, is_sparse=True)


def _logprob_gap(runs: Sequence[Run]) -> Chart:
    lines = _lines(runs, ("mean", f"{GAP}/mean"), ("max", f"{GAP}/max"))
    note = "|server - trainer| over the sampled tokens, as TRL logs it. It should stay small and flat."
    return _chart("Log-probability gap of the completions", lines, "nats", note, from_zero=True)


def _ratio(runs: Sequence[Run]) -> Chart:
    lines = _lines(runs, ("mean", f"{RATIO}/mean"), band=_between(f"{RATIO}/min", f"{RATIO}/max"))
    note = "Trainer's over server's probability of what was sampled; the band is from least to most. Near 1 is right."
    return _chart("Importance ratio", lines, "ratio", note, reference=1.0)


def _servers(runs: Sequence[Run]) -> Chart:
    start = f"{PREFIX}load_s/"
    # As numbers: as text, server 10 would come before server 2.
    found = {key.removeprefix(start) for run in runs for row in run.rows for key in row if key.startswith(start)}
    places = sorted(int(place) for place in found if place.isdecimal())
    lines = _lines(runs, *((f"server {place}", f"{start}{place}") for place in places))
    note = "Seconds of the load on each server."
    if count := [value for run in runs for value in run.finite(f"{PREFIX}servers")]:
        fewest, most = int(min(count)), int(max(count))
        note += f" In use: {most}." if fewest == most else f" In use: {fewest} to {most}."
    return _chart("Load time of each server", lines, "seconds", note, from_zero=True)


def _section(title: str, charts: Sequence[Chart], figures: list[str]) -> str:
    """The charts that have something to show; their figures are appended to `figures`."""
    drawn = []
    for chart in charts:
        if chart.figure is None:
            continue
        heading = f"<h3>{html.escape(chart.title)}</h3>" if len(charts) > 1 else ""
        # The text of a script element ends at the first "</", wherever that stands.
        figures.append(chart.figure.to_json().replace("</", "<\\/"))
        drawn.append(
            f'<figure>{heading}<div class="chart" id="chart-{len(figures) - 1}" role="img" '
            f'aria-label="{html.escape(chart.title)}"></div><figcaption>{html.escape(chart.note)}</figcaption></figure>'
        )
    return (
        f'<section><h2>{html.escape(title)}</h2><div class="charts">{"".join(drawn)}</div></section>' if drawn else ""
    )


# Words and numbers


def _title(runs: Sequence[Run]) -> str:
    """Model and rank, of all runs if they differ; the runs' names where that is not known."""
    titles = [
        f"{_model_name(run.header['model'])}, LoRA rank {run.header['lora_rank']}" if run.header else run.name
        for run in runs
    ]
    return " and ".join(dict.fromkeys(titles))


def _model_name(name: str) -> str:
    """A name on the hub, or the last part of a path; a snapshot in the hub's cache is named by its repository."""
    repository = name.partition("/snapshots/")[0]
    if repository == name and not name.startswith((".", "/", "~")):
        return name
    return repository.rstrip("/").rpartition("/")[2].removeprefix("models--").replace("--", "/")


def _about(run: Run) -> dict[str, str]:
    """What was run."""
    header = run.header
    if not header:
        return {"progress": f"step {run.last_step}"}
    servers = header["servers"]
    versions = {"trl_lora_sync": header["versions"].get("trl-lora-sync")} | header["versions"]
    known = [f"{name} {version}" for name, version in versions.items() if version and name != "trl-lora-sync"]
    progress = f"step {run.last_step} of {header['max_steps']}"
    if not run.has_ended:
        progress += f", last log {_moment(run.rows[-1].get('time', header['started']))}; running, or it was ended"
    engine = ENGINES.get(header["engine"])
    left_out = {}
    if run.earlier:
        left_out["left out"] = f"earlier trainings in this folder, begun {', '.join(map(_moment, run.earlier))}"
    return {
        "model": str(header["model"]),
        "adapter": f"rank {header['lora_rank']}, alpha {header['lora_alpha']}",
        "engine": f"{engine.versions.title if engine else header['engine']} {header['engine_version']}, "
        f"{servers} server{'' if servers == 1 else 's'}",
        "trainer": f"{header['processes']} process{'' if header['processes'] == 1 else 'es'}",
        "versions": ", ".join(known),
        "started": _moment(header["started"]),
        "progress": progress,
        **left_out,
    }


def _numbers(run: Run) -> dict[str, str]:
    """What came out."""
    found = {}
    if rewards := run.finite("reward"):
        edge = min(_EDGE_STEPS, len(rewards))
        # Not `fmean`, whose sum may overflow.
        first, last = statistics.mean(rewards[:edge]), statistics.mean(rewards[-edge:])
        found[f"reward, mean of the first and the last {edge} logged steps"] = f"{first:.3g} → {last:.3g}"
    if steps := run.finite("step_time"):
        found["median step"] = _seconds(statistics.median(steps))
    if parts := run.step_parts():
        whole = {name: sum(value for _, value in points) for name, points in parts.items()}
        every = sum(whole.values()) or 1.0
        found["generate / train / sync"] = " / ".join(f"{100 * part / every:.0f}" for part in whole.values()) + " %"
    if syncs := run.finite(f"{PREFIX}total_s"):
        found["median sync"] = _seconds(statistics.median(syncs))
        found["p99 sync"] = _seconds(percentile(syncs, 99))
    if sizes := run.finite(f"{PREFIX}bytes"):
        found["per sync"] = _bytes(statistics.median(sizes))
    if versions := run.finite(f"{PREFIX}version"):
        found["adapter version"] = f"{versions[-1]:.0f}"
    if retries := run.series(f"{PREFIX}retries"):  # the mean of the syncs that a row stands for
        counts = run.syncs()
        found["requests sent again"] = f"{sum(value * counts.get(step, 1.0) for step, value in retries):.0f}"
    return found


def _facts(runs: Sequence[Run]) -> str:
    """Of one run a list and tiles; of several one table, so that they stand side by side."""
    if len(runs) > 1:
        return _compared("", runs, [_about(run) | _numbers(run) for run in runs])
    about = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in _about(runs[0]).items()
    )
    tiles = "".join(
        f"<div><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>"
        for name, value in _numbers(runs[0]).items()
    )
    return f'<dl>{about}</dl><div class="tiles">{tiles}</div>'


def _settings(runs: Sequence[Run]) -> str:
    found = [{name: json.dumps(value) for name, value in run.header.get("settings", {}).items()} for run in runs]
    return _compared("Settings", runs, found) if any(found) else ""


def _compared(title: str, runs: Sequence[Run], columns: Sequence[dict[str, str]]) -> str:
    """A table with a column per run; rows in which they differ are emphasised."""
    rows = []
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(name, "") for column in columns]
        mark = ' class="differs"' if len(set(values)) > 1 else ""
        rows.append([mark, name, *values])
    head = _cells("th", ["", *(run.name for run in runs)]) if len(runs) > 1 else ""
    body = "".join(f"<tr{mark}>{_cells('td', cells)}</tr>" for mark, *cells in rows)
    table = f'<div class="wide"><table class="text"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    return f"<details><summary>{title}</summary>{table}</details>" if title else table


def _outlier_table(runs: Sequence[Run]) -> str:
    """The steps at which something was far above its neighbours."""
    found = [
        (run.name, metric, outlier) for run in runs for metric in WATCHED for outlier in outliers(run.series(metric))
    ]
    if not found:
        return "<p>Nothing: no value is far above the values of the steps around it.</p>"
    found.sort(key=lambda one: one[2].step)
    rows = "".join(
        "<tr>"
        + _cells(
            "td",
            [*([name] if len(runs) > 1 else []), metric, f"{one.step:.0f}", f"{one.value:.4g}", f"{one.usual:.4g}"],
        )
        + "</tr>"
        for name, metric, one in found[:_MOST_OUTLIERS]
    )
    head = _cells("th", [*(["run"] if len(runs) > 1 else []), "metric", "step", "value", "around it"])
    more = f"<p>And {len(found) - _MOST_OUTLIERS} more.</p>" if len(found) > _MOST_OUTLIERS else ""
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{more}'


def _step_table(run: Run) -> str:
    wanted = ("reward", "loss", "step_time", GENERATE, f"{PREFIX}total_s", f"{PREFIX}version", f"{GAP}/mean")
    columns = [metric for metric in wanted if run.series(metric)]
    rows = "".join(
        f"<tr>{_cells('td', [str(row['step']), *(_cell(row.get(name)) for name in columns)])}</tr>"
        for row in run.rows
        if any(name in row for name in columns)
    )
    head = _cells("th", ["step", *columns])
    return (
        f"<details><summary>All steps of {html.escape(run.name)}</summary>"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>'
    )


def _cells(tag: str, texts: Sequence[str]) -> str:
    return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""


def _seconds(value: float) -> str:
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"


def _bytes(value: float) -> str:
    return f"{value / 1e6:.1f} MB" if value >= 1e6 else f"{value / 1e3:.0f} kB"


def _moment(text: str) -> str:
    # A page is read elsewhere, where the local time of the run means nothing.
    return datetime.fromisoformat(text).astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


# The policy keeps the page from loading anything: it must show the same wherever it is opened.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:">
<title>{title}: LoRA adapter sync</title>
<style>
:root {{ color-scheme: light dark; --ink: #1c2430; --soft: #5d6878; --line: #dde2e9; --page: #fff; --card: #f6f7f9; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e8ecf2; --soft: #9aa6b6; --line: #313a47; --page: #12161c;
  --card: #1b212a; }} }}
* {{ box-sizing: border-box; }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0 auto;
  max-width: 1080px; padding: 32px 20px 64px; }}
h1 {{ font-size: 24px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }}
h2 {{ font-size: 19px; margin: 0 0 8px; }}
h3 {{ font-size: 15px; margin: 0 0 2px; overflow-wrap: anywhere; }}
p, figcaption {{ color: var(--soft); margin: 4px 0 0; }} figcaption {{ font-size: 13px; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 16px 0 0; font-size: 14px; }}
dt {{ color: var(--soft); }} dd {{ margin: 0; overflow-wrap: anywhere; }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(170px, 1fr)); gap: 10px; margin: 20px 0; }}
.tiles div {{ background: var(--card); border-radius: 8px; padding: 10px 12px; }}
.tiles b {{ display: block; font-size: 18px; }}
.tiles span {{ color: var(--soft); font-size: 13px; }}
section {{ margin: 36px 0; }} figure {{ margin: 0; min-width: 0; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 24px; }}
.chart {{ height: 270px; }}
.chart .xtick text, .chart .ytick text, .chart .xtitle, .chart .ytitle, .chart .legendtext {{
  fill: var(--soft) !important; }}
.chart .hoverlayer .bg {{ fill: var(--card) !important; stroke: var(--line) !important; }}
.chart .hoverlayer .spikeline {{ stroke: var(--soft) !important; stroke-width: 1px !important; }}
.chart .hoverlayer text {{ fill: var(--ink) !important; }}
details {{ margin-top: 20px; }} summary {{ cursor: pointer; }}
.wide {{ overflow-x: auto; margin-top: 8px; }}
table {{ border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; padding: 3px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }}
td:first-child, th:first-child, .text td, .text th {{ text-align: left; }}
.text td {{ white-space: normal; overflow-wrap: anywhere; min-width: 130px; }}
.differs {{ font-weight: 600; }}
@media (pointer: coarse) {{ .modebar {{ display: none; }} }}
</style>
</head>
<body>
<header><h1>{title}</h1><p>LoRA adapter sync: {subtitle}. Page made {made}.</p></header>
<noscript><p>The charts are drawn with JavaScript, which is turned off here.</p></noscript>
{facts}
{sections}
{missing}
<section><h2>Out of the ordinary</h2>{outliers}</section>
{settings}
{steps}
<script>{plotly}</script>
<script>
const figures = [
{figures}
];
const byTouch = matchMedia("(pointer: coarse)").matches;  // there, a drag scrolls the page
figures.forEach((figure, number) => Plotly.newPlot(
  `chart-${{number}}`, figure.data, {{...figure.layout, dragmode: byTouch ? false : "zoom"}},
  {config}));
</script>
</body>
</html>
"""
