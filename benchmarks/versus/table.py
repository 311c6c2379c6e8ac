"""The tables, the chart and the limits of a comparison, all made from its JSON."""

import io
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from versus.kinds import ARMS

_NOT_RUN = "Not run for this release."
_STOCK = "weights"
Row = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What a number should reach.

    Attributes:
        at_most: whether it is an upper limit.
        found: None if it was not measured.
    """

    what: str
    limit: float
    found: float | None
    at_most: bool = True

    @property
    def is_reached(self) -> bool | None:
        if self.found is None:
            return None
        return self.found <= self.limit if self.at_most else self.found >= self.limit


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How the seconds of a sync grow with the bytes of the adapter, by least squares.

    Attributes:
        exponent: of the bytes in a power law; 1 is linear, less is better than that.
        r_squared: how well the straight line fits.
    """

    fixed_s: float
    s_per_gb: float
    r_squared: float
    exponent: float


def text(results: dict[str, Any]) -> str:
    """All tables for the terminal, below the versions, the hardware and the commands."""
    return f"{_about(results)}\n\n{tables(results)}" if results.get("shapes") else _NOT_RUN


def tables(results: dict[str, Any]) -> str:
    """All tables with their headings, for the terminal and for docs/benchmarks.md."""
    if not results.get("shapes"):
        return _NOT_RUN
    return "\n\n".join(
        "\n\n".join(part for part in (f"### {heading}", note, markdown(header, rows)) if part)
        for heading, note, header, rows in _tables(results)
        if rows
    )


def summary(runs: Mapping[str, dict[str, Any]], shape: str = "8b", rank: int = 32) -> str:
    """What matters most: each arm beside TRL's own sync in the same run.

    Args:
        runs: the results that an arm is taken from.
    """
    header = (
        f"LoRA r={rank}, {shape.upper()}", "sync", "TRL's own sync", "ratio", "decoding speed / TRL's own",
        "base weights changed", "base weights changed by TRL's own",
    )  # fmt: skip
    rows = []
    for arm, results in runs.items():
        ratio = _ratio(results, shape, rank, arm)
        rows.append((
            f"`{arm}`", _sync_cell(results, shape, rank, arm), _sync_cell(results, shape, rank, _STOCK),
            f"{ratio:.2f}" if ratio is not None else "", _speed_cell(results, shape, rank, arm),
            _drift_cell(results, shape, rank, arm), _drift_cell(results, shape, rank, _STOCK),
        ))  # fmt: skip
    return markdown(header, rows)


def limits(results: dict[str, Any]) -> list[Limit]:
    """What was set out to be reached, all against TRL's own sync in the same run."""
    found = [
        Limit(what=f"{shape} r=32 sync, {arm}", limit=limit, found=_ratio(results, shape, 32, arm))
        for shape, arm, limit in (
            ("8b", "runtime", 0.30), ("8b", "fused", 0.35), ("32b", "runtime", 0.18), ("32b", "fused", 0.20),
        )
    ]  # fmt: skip
    found += [
        Limit(
            what=f"{shape} tokens/s at {concurrency}, fused",
            limit=0.98,
            found=_speed_ratio(results, shape, 32, "fused", str(concurrency)),
            at_most=False,
        )
        for shape in ("8b", "32b")
        for concurrency in (32, 256)
    ]
    steps = _at(results, "8b", 32, "steps")
    step_s = {arm: steps[arm]["median"]["step_s"] for arm in steps if "median" in steps[arm]}
    ratio = step_s["fused"] / step_s[_STOCK] if {"fused", _STOCK} <= step_s.keys() else None
    found.append(Limit(what="8b whole GRPO step, fused", limit=1.0, found=ratio))
    for shape, drift in ((shape, _at(results, shape, 32, "drift")) for shape in ("0.6b", "8b", "32b")):
        for arm in ("runtime", "fused"):
            if arm in drift:
                served = drift[arm].get("served_max_logprob_gap")
                changed = None if served is None else drift[arm]["trainer_changed_share"] + served
                found.append(
                    Limit(what=f"{shape} base after {drift[arm]['syncs']} syncs, {arm}", limit=0, found=changed)
                )
    return found


def growth(results: dict[str, Any], shape: str, arm: str) -> Growth | None:
    """Over the ranks that were measured; None for fewer than three."""
    points = [
        (found["split"]["payload_bytes"], found["median"]["sync_s"])
        for _, ranks in _ranks(results, shape)
        if "split" in (found := ranks.get("sync", {}).get(arm, {}))
    ]
    if len(points) < 3:
        return None
    gigabytes, seconds = [size / 1e9 for size, _ in points], [sync_s for _, sync_s in points]
    s_per_gb, fixed_s = statistics.linear_regression(gigabytes, seconds)
    exponent, _ = statistics.linear_regression(list(map(math.log, gigabytes)), list(map(math.log, seconds)))
    r_squared = statistics.correlation(gigabytes, seconds) ** 2
    return Growth(fixed_s=fixed_s, s_per_gb=s_per_gb, r_squared=r_squared, exponent=exponent)


def chart(results: dict[str, Any]) -> str:
    """One picture: the parts of a sync of each arm, by shape at the first rank, and how ours grow with the bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    plots: list[Callable[[Any], None]] = []
    for shape, found in results.get("shapes", {}).items():
        rank, first = next(iter(found.get("ranks", {}).items()), ("", {}))
        arms = {arm: value["split"] for arm, value in _in_order(first.get("sync", {})) if "split" in value}
        if arms:
            plots.append(partial(_draw_parts, arms=arms, title=f"{shape} r={rank}"))
        grown = {arm: _points(results, shape, arm) for arm in ("async trainer", "runtime", "fused")}
        if any(len(points) > 2 for points in grown.values()):
            plots.append(partial(_draw_growth, grown=grown, title=shape))
    # Text stays text, in a grey that can be read on a light and on a dark page. The same numbers make the same file.
    grey = "#7f8a98"
    style = {"svg.fonttype": "none", "svg.hashsalt": "", "axes.grid": True, "axes.grid.axis": "y", "grid.alpha": 0.3}
    style |= {"axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    style |= {f"{part}.color": grey for part in ("text", "xtick", "ytick", "grid")}
    with matplotlib.rc_context(style | {"axes.edgecolor": grey, "axes.labelcolor": grey}):
        figure = Figure(figsize=(10, 3 * max(1, len(plots))), layout="constrained")
        for plot, axes in zip(plots, figure.subplots(max(1, len(plots)), squeeze=False)[:, 0], strict=False):
            plot(axes)
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    return written.getvalue()


def _draw_parts(axes: Any, *, arms: dict[str, Any], title: str) -> None:
    below = [0.0] * len(arms)
    for part in ("gather", "write", "load"):
        values = [1000 * split[f"{part}_s"] for split in arms.values()]
        axes.bar(list(arms), values, 0.5, bottom=below, label=part)
        below = [start + value for start, value in zip(below, values, strict=True)]
    axes.set(ylabel="ms per sync", title=title)
    axes.legend(ncols=3, loc="upper right")


def _draw_growth(axes: Any, *, grown: dict[str, list[tuple[float, float]]], title: str) -> None:
    for arm, points in grown.items():
        if len(points) > 2:
            axes.plot(*zip(*points, strict=True), marker="o", label=arm)
    axes.set(xlabel="MB of the adapter", ylabel="ms per sync", title=title, ylim=(0, None))
    axes.legend(ncols=3, loc="upper left")


def _points(results: dict[str, Any], shape: str, arm: str) -> list[tuple[float, float]]:
    found = [ranks.get("sync", {}).get(arm, {}) for _, ranks in _ranks(results, shape)]
    return sorted((v["split"]["payload_bytes"] / 1e6, 1000 * v["median"]["sync_s"]) for v in found if "split" in v)


def _about(results: dict[str, Any]) -> str:
    """Versions and day of the last run, and on what hardware each command ran."""
    last = results["runs"][-1]
    versions = ", ".join(
        f"{name} {last['versions'][name]}" for name in ("trl", "torch", "peft") if name in last["versions"]
    )
    commands: dict[str, list[str]] = {}
    for run in results["runs"]:
        of_hardware = commands.setdefault(hardware(run), [])
        if run["command"] not in of_hardware:
            of_hardware.append(run["command"])
    ran = " ".join(f"{where}: {'; '.join(f'`{one}`' for one in found)}." for where, found in commands.items())
    return f"{last['server']['engine']} {last['server']['version']}, {versions}, {last['date']}. {ran}"


def hardware(run: dict[str, Any]) -> str:
    """The GPUs that a run had, or the CPU."""
    gpus = run["gpus"]
    return f"{len(gpus)} {gpus[0]}" if gpus else f"CPU ({run['cpu_cores']} cores)"


def _tables(results: dict[str, Any]) -> Iterator[tuple[str, str, Row, list[Row]]]:
    """Heading, note, header and rows."""
    yield (
        "One sync",
        f"Medians. The parts of `{_STOCK}` overlap, so they were measured in separate syncs. Its gather is merging and "
        "unmerging.",
        ("shape", "rank", "arm", "MB", "gather ms", "write ms", "load ms", "sync ms", f"/ {_STOCK}", "first token ms"),
        [_sync_row(results, shape, rank, arm, found) for shape, rank, arm, found in _found(results, "sync")],
    )
    loads = sorted({int(load) for _, _, _, found in _found(results, "decode") for load in found if load.isdigit()})
    yield (
        "Serving",
        f"Completion tokens per second, with the ratio to `{_STOCK}` in brackets, and memory.",
        ("shape", "rank", "arm", *(f"tokens/s, {load} at once" for load in loads), "trainer rise MB", "server GB"),
        [_serving_row(results, shape, rank, arm, loads) for shape, rank, arm, _ in _found(results, "sync")],
    )
    yield (
        "The base weights after many syncs",
        "The adapter changes at each sync.",
        ("shape", "arm", "syncs", "trainer's base: changed", "largest change", "served base: largest logprob change"),
        [
            (
                shape,
                arm,
                str(found["syncs"]),
                "bit-identical" if found["trainer_bit_identical"] else f"{found['trainer_changed_share']:.1%}",
                f"{found['trainer_max_abs']:.2g}",
                f"{found['served_max_logprob_gap']:.2g}" if "served_max_logprob_gap" in found else "",
            )
            for shape, _, arm, found in _found(results, "drift")
        ],
    )
    yield (
        "A whole GRPO step",
        "",
        ("shape", "arm", "sync s", "generate s", "train s", "step s", f"/ {_STOCK}"),
        [_step_row(results, shape, rank, arm, found) for shape, rank, arm, found in _found(results, "steps")],
    )
    yield (
        "Growth with the adapter",
        "A straight line and a power law through the ranks, by least squares. An exponent of 1 is linear growth.",
        ("shape", "arm", "fixed ms", "ms per 100 MB", "R²", "exponent"),
        [
            (
                shape,
                arm,
                f"{1000 * grown.fixed_s:.0f}",
                f"{100 * grown.s_per_gb:.1f}",
                f"{grown.r_squared:.3f}",
                f"{grown.exponent:.2f}",
            )
            for shape in results["shapes"]
            for arm in ("async trainer", "runtime", "fused")
            if (grown := growth(results, shape, arm)) is not None
        ],
    )
    yield (
        "Growth with the number of servers",
        "",
        ("shape", "arm", "servers", "load ms", "sync ms"),
        [
            (
                shape,
                arm,
                count,
                f"{1000 * value['median']['load_s']:.0f}",
                f"{1000 * value['median']['sync_s']:.0f}",
            )
            for shape, found in results["shapes"].items()
            for arm, counts in found.get("fleet", {}).items()
            for count, value in counts.items()
            if count.isdigit()
        ],
    )
    yield (
        "Goals",
        f"Each limit is a ratio to `{_STOCK}` in the same run, or a change of the base weights.",
        ("", "limit", "measured", ""),
        [
            (
                limit.what,
                f"{'≤' if limit.at_most else '≥'} {limit.limit:g}",
                f"{limit.found:.3g}",
                "reached" if limit.is_reached else "missed",
            )
            for limit in limits(results)
            if limit.found is not None
        ],
    )
    yield (
        "Failed or left out",
        "",
        ("shape", "arm", "why"),
        [
            (shape, name, _short(why))
            for shape, found in results["shapes"].items()
            for group in [
                found.get("left_out", {}),
                *(ranks.get("failed", {}) for ranks in found.get("ranks", {}).values()),
            ]
            for name, why in group.items()
        ],
    )


def _short(why: str) -> str:
    """The first line and the last one, where a log has the cause."""
    first, *rest = why.strip().splitlines()
    return f"{first} … {rest[-1][:200]}" if rest else first


def _sync_row(results: dict[str, Any], shape: str, rank: str, arm: str, found: dict[str, Any]) -> Row:
    split, median = found.get("split"), found["median"]
    ratio = _ratio(results, shape, int(rank), arm)
    parts = [f"{1000 * split[part]:.0f}" for part in ("gather_s", "write_s", "load_s")] if split else [""] * 3
    return (
        shape,
        rank,
        arm,
        f"{split['payload_bytes'] / 1e6:,.1f}" if split else "",
        *parts,
        f"{1000 * median['sync_s']:.0f}",
        "" if ratio is None else f"{ratio:.2f}",
        f"{1000 * median['first_token_s']:.0f}",
    )


def _serving_row(results: dict[str, Any], shape: str, rank: str, arm: str, loads: Sequence[int]) -> Row:
    ranks = results["shapes"][shape]["ranks"][rank]
    speeds = []
    for concurrency in map(str, loads):
        median = ranks.get("decode", {}).get(arm, {}).get(concurrency, {}).get("median")
        ratio = _speed_ratio(results, shape, int(rank), arm, concurrency)
        speeds.append("" if median is None else f"{median:,.0f}" + ("" if ratio is None else f" ({ratio:.2f})"))
    rise = ranks["sync"][arm]["median"].get("trainer_rise_bytes")
    memory = ranks.get("server_memory", {}).get(arm, {}).get("bytes")
    return (
        shape,
        rank,
        arm,
        *speeds,
        "" if rise is None else f"{rise / 1e6:,.0f}",
        "" if not memory else f"{memory / 1e9:.1f}",
    )


def _sync_cell(results: dict[str, Any], shape: str, rank: int, arm: str) -> str:
    median = _at(results, shape, rank, "sync").get(arm, {}).get("median")
    if median is None:
        return ""
    return f"{1000 * median['sync_s']:.0f} ms"


def _speed_cell(results: dict[str, Any], shape: str, rank: int, arm: str) -> str:
    """The least and the most of TRL's tokens per second, over all loads."""
    loads = [load for load in _at(results, shape, rank, "decode").get(_STOCK, {}) if load.isdigit()]
    found = {_speed_ratio(results, shape, rank, arm, load) for load in loads} - {None}
    return " to ".join(dict.fromkeys(f"{ratio:.2f}" for ratio in (min(found), max(found)))) if found else ""


def _drift_cell(results: dict[str, Any], shape: str, rank: int, arm: str) -> str:
    drift = _at(results, shape, rank, "drift").get(arm)
    if drift is None:
        return ""
    changed = "none" if drift["trainer_bit_identical"] else f"{drift['trainer_changed_share']:.0%}"
    return f"{changed} in {drift['syncs']} syncs"


def _step_row(results: dict[str, Any], shape: str, rank: str, arm: str, found: dict[str, Any]) -> Row:
    median = found["median"]
    stock = _at(results, shape, int(rank), "steps").get(_STOCK, {}).get("median")
    seconds = [f"{median[part]:.3f}" for part in ("sync_s", "generate_s", "train_s", "step_s")]
    return (shape, arm, *seconds, f"{median['step_s'] / stock['step_s']:.2f}" if stock else "")


def _found(results: dict[str, Any], phase: str) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Shape, rank, arm and what was found, where something was."""
    for shape in results["shapes"]:
        for rank, ranks in _ranks(results, shape):
            for arm, found in _in_order(ranks.get(phase, {})):
                if phase in ("drift", "decode") or "median" in found:
                    yield shape, rank, arm, found


def _in_order(of_arm: dict[str, Any]) -> list[tuple[str, Any]]:
    """The same order of the arms everywhere, independent of the measured order."""
    return sorted(of_arm.items(), key=lambda item: ARMS.index(item[0]))


def _ranks(results: dict[str, Any], shape: str) -> list[tuple[str, dict[str, Any]]]:
    return sorted(results["shapes"].get(shape, {}).get("ranks", {}).items(), key=lambda item: int(item[0]))


def _at(results: dict[str, Any], shape: str, rank: int, phase: str) -> dict[str, Any]:
    found = results["shapes"].get(shape, {}).get("ranks", {}).get(str(rank), {}).get(phase, {})
    return dict(found)


def _ratio(results: dict[str, Any], shape: str, rank: int, arm: str) -> float | None:
    sync = _at(results, shape, rank, "sync")
    if "median" not in sync.get(arm, {}) or "median" not in sync.get(_STOCK, {}):
        return None
    return float(sync[arm]["median"]["sync_s"] / sync[_STOCK]["median"]["sync_s"])


def _speed_ratio(results: dict[str, Any], shape: str, rank: int, arm: str, concurrency: str) -> float | None:
    decode = _at(results, shape, rank, "decode")
    speeds = [decode.get(name, {}).get(concurrency, {}).get("median") for name in (arm, _STOCK)]
    return None if None in speeds else float(speeds[0] / speeds[1])


def markdown(header: Row, rows: Sequence[Row]) -> str:
    """A table."""
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
