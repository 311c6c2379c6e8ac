"""Writes the numbers in the documentation from benchmarks/results/: docs/benchmarks.md, its chart, and the README.

    python benchmarks/page.py

Both files are prose with sections between two markers, such as `<!-- soak: begin -->` and `<!-- soak: end -->`. This
command replaces each section.
"""

import json
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from versus import table, timelines  # noqa: E402
from versus.table import Row, markdown  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
CHART = ROOT / "docs" / "assets" / "vs-weights.svg"
OVERLAP_CHART = ROOT / "docs" / "assets" / "overlap-2xh100.svg"
# The newest run of each way of serving beside TRL's own sync that has all of it.
NEWEST = dict.fromkeys(("runtime", "fused"), "vs-weights-8b-whole-2xh200")
# The same in colocate mode.
NEWEST_COLOCATE = {"fused-shared": "colocate-8b-no-text-h100", "runtime-shared": "colocate-8b-shared-h100"}
# Runs beside TRL's own sync, and what differs in them. The tables order them by date; within a day this order counts.
SYNC_RUNS = {
    "vs-weights-2xh100-host-base": "the copy of the base for `fused` is in host memory",
    "vs-weights-2xh100-fused": "that copy is on the GPU, as in all later runs; the arms followed one another",
    "vs-weights-2xh100-again": "an adapter is read and written by CUDA graphs; the trainer's base is checked meanwhile",
    "vs-weights-32b-2xh200": "one server at a time, so the arms followed one another",
    "vs-weights-0.6b-2xh100": "",
    "vs-weights-8b-2xh200": "CUDA graph for the checksum; base checked after the load requests are sent",
    "vs-weights-8b-2xh100": "`fused`: adapter is read before the engine pauses; faster kernel",
    "vs-weights-8b-file-2xh100": "`runtime by file`: base checked after the file is complete",
    "vs-weights-8b-parts-2xh200": "a file is read in parts while the trainer writes it",
    "vs-weights-32b-file-2xh200": "the same host; one server at a time, so the arms followed one another",
    "vs-weights-8b-before-2xh200": "for comparison, the package of November 22, before its core was rebuilt",
    "vs-weights-8b-after-2xh200": "the same host, the package of November 26",
    "vs-weights-8b-not-ahead-2xh200": "for comparison, without the next change",
    "vs-weights-8b-ahead-2xh200": (
        "the same host; workers copy a version before its load; the engine pauses while an adapter to be fused is read"
    ),
    "vs-weights-32b-ahead-2xh200": "the same host; one server at a time, so the arms followed one another",
    "vs-weights-32b-ahead-fused-2xh200": "the same host; one server at a time, so the arms followed one another",
    "vs-weights-8b-noted-2xh200": "`runtime by file`: the trainer's GPU notes each part that is complete",
    "vs-weights-8b-4xh100": "four GPUs, each server apart from the trainer",
    "vs-weights-32b-noted-2xh200": "room for one base at a time, so `weights` and `fused` were alone",
    "vs-weights-8b-held-2xh200": "`fused`: faster kernel up to rank 32; servers with `--enforce-eager`",
    "vs-weights-8b-caches-2xh200": "`fused`: caches are reset behind the pause; servers with `--enforce-eager`",
    "vs-weights-32b-caches-2xh200": "the same host; one server at a time, so the arms followed one another",
    "vs-weights-8b-again-2xh200": "another host, the package of November 28",
    "vs-weights-32b-again-2xh200": "another host; one server at a time, so the arms followed one another",
    "vs-weights-8b-reserved-2xh200": "`runtime`: slots are reserved and filled past the engine; `--enforce-eager`",
    "vs-weights-32b-reserved-2xh200": "the same host; one server at a time, so the arms followed one another",
    "vs-weights-8b-past-http-2xh200": (
        "`fused`: loads by messages, and the engine pauses while a version is written; checksums in one pass"
    ),
    "vs-weights-32b-past-http-2xh200": "the same host; one server at a time, so the arms followed one another",
    "vs-weights-8b-one-launch-2xh200": "an adapter is exported by one kernel; servers with `--enforce-eager`",
    "vs-weights-32b-one-launch-2xh200": "the same host; one server at a time, so the arms followed one another",
    "vs-weights-32b-both-kernels-2xh200": "and its fingerprint computed by one; one server at a time",
    "vs-weights-8b-both-kernels-2xh200": "the same host; servers with `--enforce-eager`",
    "vs-weights-8b-whole-2xh200": "another host, the same package; servers with CUDA graphs",
    "vs-weights-8b-ranks-2xh200": "another host, the same package; servers with `--enforce-eager`",
}
# Runs with two workers a server, and where these are.
TENSOR_PARALLEL_RUNS = {
    "vs-weights-8b-tp2-4xh100": "4 H100, none on the trainer's",
    "vs-weights-8b-tp2-2xh200": "2 H200, one on the trainer's",
}
# Syncs to several servers, and where these are.
FLEET_RUNS = {"vs-weights-0.6b-2xh100": "one H100", "vs-weights-8b-4xh100": "an H100 each"}
# Whole GRPO steps in such runs, and the completions of a step.
STEP_RUNS = {
    "vs-weights-2xh100-again": "64 of 128 tokens",
    "vs-weights-8b-2xh100": "128 of 256 tokens",
    "vs-weights-8b-steps-2xh200": "128 of 256 tokens",
    "vs-weights-8b-whole-2xh200": "64 of 128 tokens",
}
# The first one has the timelines that are drawn.
OVERLAPS = ("overlap-2xh100", "overlap-256x256-2xh100", "overlap-fused-2xh100")
MB = 1e6
WHERE = ("shape", "GPU", "arm", "day")
DECODING = ("tokens/s, 32 at once", "TRL's own", "ratio", "tokens/s, 256 at once", "TRL's own", "ratio")
TRLS_OWN = "TRL's own"
PACKAGES = {"trl": "TRL", "torch": "torch", "peft": "PEFT", "deepspeed": "DeepSpeed", "bitsandbytes": "bitsandbytes"}
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}


def read(name: str) -> Any:
    """The content of one file of benchmarks/results/."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def versus_summary() -> str:
    return table.summary({arm: read(name) for arm, name in NEWEST.items()})


def versus_tables() -> str:
    return table.tables(read("vs-weights"))


def by_date(names: Iterable[str]) -> list[tuple[str, str, str, Any]]:
    """The name, day, GPU and shapes of each run, from the oldest to the newest."""
    runs = []
    for name in names:
        found = read(name)
        last = found["runs"][-1]
        runs.append((name, last["date"], last["gpus"][0].split()[1], found["shapes"]))
    return sorted(runs, key=lambda run: run[1])


def newest(phase: str, names: Iterable[str]) -> list[tuple[Row, Any, Any]]:
    """Where and when each arm was measured last at rank 32 beside TRL's own, what was found of it, and of TRL's own."""
    arms = ("runtime", "runtime by file", "fused")
    found = {}
    for _, date, gpu, shapes in by_date(names):
        for shape, measured in shapes.items():
            of_phase = measured["ranks"].get("32", {}).get(phase, {})
            for place, arm in enumerate(arms):
                if phase == "decode" and "256" not in of_phase.get(arm, ()):
                    continue  # a run with 32 at once only
                if arm in of_phase and "weights" in of_phase:
                    where = (shape.upper(), gpu, f"`{arm}`", date)
                    found[float(shape[:-1]), gpu, place] = (where, of_phase[arm], of_phase["weights"])
    return [found[key] for key in sorted(found)]


def newest_syncs() -> str:
    """With the decoding speed from the newest run that measured it, on the same kind of GPU if there is one."""
    speeds: dict[Row, str] = {}
    for (shape, gpu, arm, _), ours, theirs in newest("decode", ("vs-weights", *SYNC_RUNS)):
        speeds[shape, arm] = speeds[shape, gpu, arm] = ", ".join(_speeds(ours, theirs)[2::3])
    rows = []
    for where, ours, theirs in newest("sync", SYNC_RUNS):
        shape, gpu, arm, _ = where
        served = arm.replace(" by file", "")
        seconds = [one["median"]["sync_s"] for one in (ours, theirs)]
        rows.append((*where, *(f"{_ms(one)} ms" for one in seconds), f"{seconds[0] / seconds[1]:.2f}",
                     speeds.get((shape, gpu, served)) or speeds.get((shape, served), "")))  # fmt: skip
    return markdown((*WHERE, "sync", "TRL's own sync", "ratio", "tokens/s / TRL's own, 32 and 256 at once"), rows)


def newest_decoding() -> str:
    found = newest("decode", ("vs-weights", *SYNC_RUNS))
    return markdown((*WHERE, *DECODING), [(*where, *_speeds(ours, theirs)) for where, ours, theirs in found])


def headline_decoding() -> str:
    """In the runs of the headline."""
    rows: list[Row] = []
    for arm, name in NEWEST.items():
        arms = read(name)["shapes"]["8b"]["ranks"]["32"]["decode"]
        rows.append((f"`{arm}`", *_speeds(arms[arm], arms["weights"])))
    return markdown(("LoRA r=32, 8B", *DECODING), rows)


def _speeds(ours: Any, theirs: Any) -> list[str]:
    cells = []
    for load in ("32", "256"):
        if load in ours and load in theirs:
            speeds = [one[load]["median"] for one in (ours, theirs)]
            cells += [*(f"{one:,.0f}" for one in speeds), f"{speeds[0] / speeds[1]:.2f}"]
        else:
            cells += [""] * 3
    return cells


def newest_drift() -> str:
    """What syncs left of the base weights."""
    rows = []
    for where, *both in newest("drift", ("vs-weights", *SYNC_RUNS)):
        changed = ["none" if one["trainer_bit_identical"] else f"{one['trainer_changed_share']:.1%}" for one in both]
        served = [f"{one['served_max_logprob_gap']:.2g}" for one in both]
        rows.append((*where, str(both[0]["syncs"]), *changed, *served))
    header = (*WHERE, "syncs", "base weights changed", "by TRL's own",
              "largest change of a log-probability of the served base", "by TRL's own")  # fmt: skip
    return markdown(header, rows)


def parts_of_syncs() -> str:
    """The parts of each arm's sync, run by run."""
    rows = []
    for name, date, gpu, shapes in by_date(SYNC_RUNS):
        for shape, measured in shapes.items():
            where, about = (date, gpu, shape.upper()), SYNC_RUNS[name]
            for rank, found in measured["ranks"].items():
                arms = found.get("sync", {})
                stock = arms.get("weights", {}).get("median", {})
                for arm, one in arms.items():
                    parts = [_ms(one["split"][f"{part}_s"]) for part in ("gather", "write", "load")]
                    seconds: list[str] = []
                    for end in ("returned_s", "sync_s"):
                        both = [median.get(end) for median in (one["median"], stock)]
                        ratio = f"{both[0] / both[1]:.3f}" if all(both) else ""
                        seconds += [_ms(both[0]) if both[0] else "", ratio]
                    rows.append((*where, rank, f"`{arm}`", *parts, *seconds, about))
                    where, about = ("", "", ""), ""
    return markdown(("day", "GPU", "shape", "rank", "arm", "gather ms", "write ms", "load ms", "returns ms",
                     "/ `weights`", "sync ms", "/ `weights`", "what differs"), rows)  # fmt: skip


def steps_with_syncs() -> str:
    """Whole GRPO steps of each arm, which take turns."""
    rows = []
    for name, date, gpu, shapes in by_date(STEP_RUNS):
        arms = shapes["8b"]["ranks"]["32"]["steps"]
        stock_s = arms["weights"]["median"]["step_s"]
        for arm, found in arms.items():
            median = found["median"]
            parts = [f"{median[part]:.1f}" for part in ("generate_s", "train_s", "step_s")]
            ratio = f"{median['step_s'] / stock_s:.2f}"
            rows.append((date, gpu, STEP_RUNS[name], f"`{arm}`", str(len(found["samples"])), _ms(median["sync_s"]),
                         *parts, ratio))  # fmt: skip
    return markdown(("day", "GPU", "completions", "arm", "steps", "sync ms", "generation s", "training s", "step s",
                     "/ `weights`"), rows)  # fmt: skip


def several_servers() -> str:
    """Syncs to several servers, which share a GPU or have one each."""
    counts = ("1", "2", "3", "4")
    rows = [
        (shape.upper(), where, f"`{arm}`", *(_ms(one[n]["median"]["sync_s"]) if n in one else "" for n in counts))
        for name, where in FLEET_RUNS.items()
        for shape, found in read(name)["shapes"].items()
        for arm, one in found["fleet"].items()
    ]
    return markdown(("shape", "servers on", "arm", *(f"sync ms, {n} server" + "s" * (n != "1") for n in counts)), rows)


def tensor_parallel() -> str:
    """Syncs to a server of two workers, decoding, and what is left of the base."""
    rows = []
    for name, where in TENSOR_PARALLEL_RUNS.items():
        found = read(name)["shapes"]["8b"]["ranks"]["32"]
        syncs, speeds, drifts = found["sync"], found.get("decode", {}), found["drift"]
        for arm in filter(syncs.get, ("runtime", "runtime by file", "fused", "weights")):
            sync_s, drift = syncs[arm]["median"]["sync_s"], drifts[arm]
            ratio = f"{sync_s / syncs['weights']['median']['sync_s']:.2f}" if "weights" in syncs else ""
            speed = speeds[arm]["32"]["median"] if arm in speeds else None
            share = f"{speed:,.0f} ({speed / speeds['weights']['32']['median']:.2f})" if speed else ""
            changed = "none" if drift["trainer_bit_identical"] else f"{drift['trainer_changed_share']:.0%}"
            rows.append((where, f"`{arm}`", _ms(sync_s), ratio, share, f"{changed} in {drift['syncs']} syncs"))
            where = ""
    return markdown(("GPUs", "arm", "sync ms", "/ `weights`", "tokens/s, 32 at once (/ `weights`)",
                     "base weights changed"), rows)  # fmt: skip


def ahead_sentence() -> str:
    """Whole runs with sampling ahead and without, for the README."""
    plain, ahead = read("overlap-2xh100")["summary"]
    syncs = {arm: [one["sync_s"] for one in found["samples"]] for arm, found in whole_steps().items()}
    ours, theirs = syncs["runtime"], syncs["weights"]
    return textwrap.fill(
        f"In whole GRPO steps of the same run, a sync took {_ms(statistics.median(ours))} ms (median of {len(ours)}, "
        f"at most {_ms(max(ours))}) with `runtime`, and TRL's own {_ms(statistics.median(theirs))} ms. In another run, "
        "on two H100 with [sampling ahead](docs/overlap.md), where servers sample the next batch while the trainer "
        f"computes, a step took {ahead['step_s_median']:.1f} s instead of {plain['step_s_median']:.1f} s.",
        width=120,
    )


def whole_steps() -> Any:
    """The GRPO steps of each arm in the newest run with `runtime`."""
    return read(NEWEST["runtime"])["shapes"]["8b"]["ranks"]["32"]["steps"]


def overlap() -> str:
    header = ("completions", "serving", "arm", "step s", "/ no overlap", "generation s", "generation hidden",
              "waited for it s", "mean importance ratio")  # fmt: skip
    rows = []
    for found in map(read, OVERLAPS):
        generation_s = {run["arm"]: run["generation_s_median"] for run in found["runs"]}
        workload = f"{found['completions']} of {found['completion_tokens']} tokens"
        for one in found["summary"]:
            ahead = (f"{100 * one['hidden']:.0f} %", f"{one['wait_s']:.2f}") if "hidden" in one else ("", "")
            rows.append((
                workload, f"`{_serving(found)}`", one["arm"], f"{one['step_s_median']:.1f}",
                f"{one['step_against_no_overlap']:.2f}", f"{generation_s[one['arm']]:.1f}", *ahead,
                f"{one['importance_ratio_mean']:.2f}",
            ))  # fmt: skip
    return markdown(header, rows)


def async_grpo() -> str:
    found = read("async-grpo-2xh100")["summary"]
    rows = []
    for name in ("trl-lora-sync", TRLS_OWN):
        parts = {part.removesuffix("_s").replace("_", " "): seconds for part, seconds in found[name].items()}
        total_s = parts.pop("total")
        told = ", ".join(f"{part} {_ms(seconds)}" for part, seconds in parts.items())
        rows.append((name, _ms(total_s), f"{total_s / found[TRLS_OWN]['total_s']:.3f}", told))
    return markdown(("sync", "ms", "/ TRL's own", "its parts, ms"), rows)


def default_runs() -> str:
    parts = ("total", "gather", "write", "load", "verify")
    rows = []
    for one in read("default-runs"):
        median, first = one["median_after_the_first"], [run["syncs"][0]["total_s"] for run in one["runs"]]
        count = sum(len(run["syncs"]) - 1 for run in one["runs"])
        rows.append((
            f"`{_serving(one)}`", str(count), *(_ms(median[f"{part}_s"]) for part in parts),
            _ms(one["largest_after_the_first_s"]), f"{min(first):.2f} to {max(first):.2f}",
            "yes" if one["all_verified"] else "no",
        ))  # fmt: skip
    return markdown(("serving", "syncs after the first", "median ms", *parts[1:], "largest ms", "first sync s",
                     "all verified"), rows)  # fmt: skip


def _serving(one: dict[str, Any]) -> str:
    return "fused" if "--fused" in one["serve"] else "runtime"


def other_arms() -> str:
    """Two measurements beside the main comparison: loads without `--quick-load`, and the base copy in host memory."""
    plain, host, main = read("vs-weights-plain-load"), read("vs-weights-base-in-host-memory"), read("vs-weights")
    rows = [
        (f"8b r=32, `{arm}`, `--no-quick-load`", _sync_ms(plain, 32, arm), _sync_ms(main, 32, arm))
        for arm in ("weights", "runtime", "fused")
    ]
    rows += [
        (f"8b r={rank}, `fused`, copy of the base in host memory", _sync_ms(host, rank, "fused"),
         _sync_ms(main, rank, "fused"))
        for rank in (8, 128, 256)
    ]  # fmt: skip
    return markdown(("arm", "sync ms", "sync ms in the main comparison"), rows)


def _sync_ms(results: dict[str, Any], rank: int, arm: str) -> str:
    return _ms(results["shapes"]["8b"]["ranks"][str(rank)]["sync"][arm]["median"]["sync_s"])


SYNC_COSTS = {"qwen3-1024x8-cpu": "vLLM, CPU", "vllm-0.26.0-h200-sync-cost": "vLLM, H200"}


EXPORTS = {
    "save_pretrained": "PEFT's `save_pretrained`, float32",
    "export bfloat16": "ours, bfloat16",
    "export float32": "ours, float32",
}


def sync_cost() -> str:
    header = ("server", "rank", "export", "MB", "gather ms", "write ms", "load ms", "sync ms", "/ `save_pretrained`")
    rows = []
    for name, title in SYNC_COSTS.items():
        for rank in read(name)["ranks"]:
            plain = rank["sync"]["save_pretrained"]["median"]["sync_s"]
            for arm, found in rank["sync"].items():
                median = found["median"]
                parts = [_ms(median[f"{part}_s"]) for part in ("gather", "write", "load", "sync")]
                rows.append((title, str(rank["lora_rank"]), EXPORTS[arm], f"{median['payload_bytes'] / MB:.1f}", *parts,
                             f"{median['sync_s'] / plain:.2f}"))  # fmt: skip
    return markdown(header, rows)


def decoding() -> str:
    header = ("server", "rank", "concurrent requests", "base tokens/s", "adapter tokens/s", "adapter / base")
    rows = [
        (title, str(rank["lora_rank"]), str(one["concurrency"]), f"{one['base']:,.0f}", f"{one['adapter']:,.0f}",
         f"{one['adapter_over_base']:.2f}")
        for name, title in SYNC_COSTS.items()
        for rank in read(name)["ranks"]
        for one in rank["tokens_per_s"]
    ]  # fmt: skip
    return markdown(header, rows)


TRANSPORTS = {
    "disk": "disk, in `/dev/shm`",
    "tensors": "tensors",
    "naive tensors": "tensors, pickled one by one",
}


def transports() -> str:
    header = ("SGLang, 40 MB (r=32)", "until the request is ready", "the request", "both", "first token after it")
    rows = []
    for arm, found in read("sglang-0.5.15-h200-transports")["median"].items():
        build, load = found["build_s"], found["load_s"]
        rows.append(
            (TRANSPORTS[arm], *(f"{_ms(value)} ms" for value in (build, load, build + load, found["first_token_s"])))
        )
    return markdown(header, rows)


def push() -> str:
    rates = {"1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s", "unlimited": "unlimited"}
    found = sorted(read("push-vllm-0.31.0-cpu")["results"], key=lambda one: list(rates).index(one["rate"]))
    rows = [
        (rates[one["rate"]], f"{one['megabytes']:.0f}", f"{one['mb_per_s']['tcp']:.0f}",
         f"{one['mb_per_s']['push']:.0f}", f"{one['push_over_tcp']:.2f}")
        for one in found
    ]  # fmt: skip
    return markdown(("link", "MB", "TCP MB/s", "push MB/s", "push / TCP"), rows)


def completions() -> str:
    found = read("completions-cpu")
    rows = [
        (arm, f"{one['wall_s']:.1f}", f"{one['cpu_s']:.2f}",
         ", ".join(f"`{called['function']}` {called['own_s']:.1f}" for called in one["functions"][:3]))
        for arm, one in found["arms"].items()
    ]  # fmt: skip
    ratios = found["now_over_before"]
    rows.append(("now / before", f"{ratios['wall_s']:.2f}", f"{ratios['cpu_s']:.2f}", ""))
    return markdown(("256 completions of 4,096 tokens", "s", "s of computing", "most, with tracing, s"), rows)


def faults() -> str:
    found = read("vllm-0.31.0-cpu-faults")
    raised, happened = found["errors_raised"], found["faults_that_happened"]
    asked = found["completions_asked_of_each_server_after_a_sync"]
    own, other = found["largest_distance_to_own_version"], found["smallest_distance_to_another_version"]
    rows = [
        ("random schedules of faults", f"{found['schedules']}"),
        ("faults that happened", f"{sum(happened.values()):,} of {len(happened)} kinds"),
        ("errors raised", f"{sum(raised.values())}"),
        ("completions accepted", f"{found['completions_accepted']:,}"),
        ("schedules in which a guarantee was broken", f"{len(found['broken'])}"),
        ("completions requested from each server after a sync", f"{asked:,}"),
        ("largest distance to the active version's log-probabilities", f"{own:.3f}"),
        ("smallest distance to another version's", f"{other:.2f}"),
        ("schedules that left an unused adapter name on a server", f"{_schedules_that_left(found, 'adapter')}"),
        ("schedules that left the record of one for the next run", f"{_schedules_that_left(found, 'file')}"),
    ]  # fmt: skip
    return markdown(("", ""), rows)


def _schedules_that_left(found: dict[str, Any], what: str) -> int:
    seeds = [left.partition(": ") for left in found["left_behind"]]
    return len({seed for seed, _, left in seeds if left.startswith(f"{what} ")})


def own_tests() -> str:
    found = read("trls-own-tests-cpu")
    first, second = found["outcomes"]
    rows = [
        (outcome, str(found["outcomes"][first].get(key, 0)), str(found["outcomes"][second].get(key, 0)))
        for outcome, key in (("passed", "passed"), ("failed", "failure"), ("skipped", "skipped"))
    ]
    return markdown(
        ("", f"{first} classes", f"{second} classes"),
        [*rows, ("ended otherwise than with TRL's", "", f"{len(found['different'])}")],
    )


def kills() -> str:
    found = read("vllm-0.31.0-cpu-kills")["killed"]
    arms = list(found)
    rows = [(point, *(_kill(found[arm][point]) for arm in arms)) for point in found[arms[0]]]
    return markdown(("killed", *arms), rows)


def _kill(one: dict[str, Any]) -> str:
    if one["violations"]:
        return "; ".join(map(str, one["violations"]))
    return f"`{one['raised']}` after {one['took_s']:.0f} s" if one["raised"] else f"continued, {one['took_s']:.0f} s"


SOAKS = {
    "vllm-0.31.0-cpu-soak": "vLLM, CPU",
    "sglang-0.5.15-h200-soak": "SGLang 0.5.15, H200",
    "sglang-0.5.17-h200-soak": "SGLang 0.5.17, H200",
    "vllm-0.26.0-h200-sleep": "vLLM, H200, sleeping between syncs",
    "sglang-0.5.15-h200-sleep": "SGLang, H200, sleeping between syncs",
}


def soak() -> str:
    """Rises per 100 syncs. Start-up effects dominate the short runs, so those show GPU memory only."""
    header = ("server", "syncs", "rank", "MB", "sync ms", "rise of a sync, ms", "of the trainer, MB",
              "of the server, MB", "of the GPU, MB", "adapters left at the end")  # fmt: skip
    rows = []
    for name, title in SOAKS.items():
        found = read(name)
        slope = found["slope_per_100_syncs"]
        rises = (f"{1000 * slope['total_s']:+.1f}", f"{slope['trainer_rss_mb']:+.1f}", f"{slope['server_rss_mb']:+.1f}")
        rows.append((
            title, f"{found['syncs']:,}", str(found["lora_rank"]), f"{found['payload_bytes'] / MB:.1f}",
            _ms(found["median"]["total_s"]), *(rises if found["syncs"] >= 100 else ("", "", "")),
            f"{slope['gpu_used_mb']:+.1f}", str(len(found["adapters_left_on_server"])),
        ))  # fmt: skip
    return markdown(header, rows)


def soak_controls() -> str:
    found = read("vllm-0.31.0-cpu-soak")
    added, rounds = found["server_rss_mb_added_by_100_rounds"], found["rounds"]
    later = [one["trainer_rss_mb"] for one in rounds[len(rounds) // 2 :]]
    apart = found["syncs"] / len(rounds)
    slope, _ = statistics.linear_regression([place * apart / 100 for place in range(len(later))], later)
    server = [one["server_rss_mb"] for one in rounds]
    begin, half = len(server) // 10, len(server) // 2  # the first tenth is warm-up
    rows = [
        ("server MB added by 100 rounds of a sync and samples", f"{added['with a sync']:+.1f}"),
        ("server MB added by 100 rounds of samples only", f"{added['without']:+.1f}"),
        ("server MB added from the first tenth of the run to its half, and from there to its end",
         f"{server[half] - server[begin]:+.0f} and {server[-1] - server[half]:+.0f}"),
        ("trainer MB added by 100 syncs, second half of the run", f"{slope:+.1f}"),
        *(
            (f"{what}, median and maximum", f"{found['median'][key]:.0f} and {found['max'][key]:.0f}")
            for key, what in (
                ("server_threads", "threads of the server"), ("trainer_threads", "threads of the trainer"),
                ("server_open_files", "open files of the server"), ("trainer_open_files", "open files of the trainer"),
                ("adapters_on_server", "adapters on the server"), ("files", "files of adapters"),
                ("disk_mb", "MB of disk"),
            )
        ),
    ]  # fmt: skip
    return markdown(("vLLM, CPU", ""), rows)


def grpo_runs() -> str:
    header = ("run", "steps", "rank", "reward, first 5 steps", "reward, last 5", "sync ms", "step s")
    rows: list[Row] = []
    for version in ("0.5.15", "0.5.17"):
        found = read(f"sglang-{version}-h200-grpo")
        median = found["median"]
        rows.append((
            f"SGLang {version}, H200", str(len(found["steps"])), str(found["lora_rank"]),
            f"{found['reward_first_5']:.2f}", f"{found['reward_last_5']:.2f}", _ms(median["sync_s"]),
            f"{median['step_s']:.2f}",
        ))  # fmt: skip
    images = read(SGLANG_IMAGES)["cases"]["images"]["run"]
    rows.append((
        "SGLang 0.5.15, H100, tiny Qwen2.5-VL, an image in every prompt", str(len(images["logp_gap"])), "8",
        f"{images['reward_first_five']:.2f}", f"{images['reward_last_five']:.2f}", _ms(images["sync_s"]), "",
    ))  # fmt: skip
    return markdown(header, rows)


def demo_seeds() -> str:
    header = ("seed", "reward, first 5 steps", "reward, last 5", "learned", "mean gap", "gap of the worst step",
              "importance ratio")  # fmt: skip
    rows = [
        (str(one["seed"]), f"{one['reward_first_steps']:.2f}", f"{one['reward_last_steps']:.2f}",
         "yes" if one["learned"] else "no", f"{one['logprob_gap_mean']:.1e}", f"{one['logprob_gap_of_worst_step']:.1e}",
         f"{one['importance_ratio_min']:.2f} to {one['importance_ratio_max']:.2f}")
        for one in read("demo-seeds-cpu")["runs"]
        if one["arm"] == "demo"
    ]  # fmt: skip
    return markdown(header, rows)


BASES = {
    "bf16": "the unquantised base in bfloat16",
    "dequantised": "the values of the 4-bit base, in bfloat16",
    "4bit": "the same base in 4 bits",
}


def qlora() -> str:
    header = ("trainer and server", "the server has", "mean gap", "largest gap", "gap in a GRPO run",
              "importance ratios of the run")  # fmt: skip
    rows = []
    for name, title in (("qlora-gap-cpu", "CPU"), ("qlora-gap-h200", "H200")):
        for base, found in read(name)["gaps"].items():
            steps = found.get("grpo_steps", [])
            gaps = [step["logp_difference_mean"] for step in steps]
            ratios = [step["importance_ratio_mean"] for step in steps]
            rows.append((
                title, BASES[base], _short(found["mean"]), _short(found["max"]),
                f"{_short(min(gaps))} to {_short(max(gaps))}" if gaps else "refused as another base model",
                f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "",
            ))  # fmt: skip
    return markdown(header, rows)


def qlora_colocate() -> str:
    header = ("hardware", "`vllm_sync_strategy`", "mean gap at each step", "largest gap",
              "base weights changed in the run")  # fmt: skip
    rows = []
    for name, hardware in (("qlora-colocate-cpu", "CPU"), ("qlora-colocate-h100", "H100")):
        for strategy, found in read(name)["runs"].items():
            steps, changed = found["steps"], found["base_elements_changed"]
            rows.append((
                hardware, f"`{strategy}`", ", ".join(_short(step["gap_mean"]) for step in steps),
                _short(max(step["gap_max"] for step in steps)),
                f"{changed:,} of {found['base_elements']:,} ({changed / found['base_elements']:.0%})",
            ))  # fmt: skip
    return markdown(header, rows)


WAYS_OF_LOADING = {
    "ipc": "trainer's GPU to slots",
    "slots": "file to slots",
    "files": "file, read with several threads",
    "vllm": "file, by vLLM alone",
}


def floor() -> str:
    header = ("shape", "way", "sync ms", "reading it", "writing it", "load", "tokens/s at 64 at once, of quiet")
    rows = []
    for case in read("floor-8b-h100")["cases"]:
        shape, rank = case["case"].split(":")
        for way, title in WAYS_OF_LOADING.items():
            ms, share = case["syncs_in_turns"]["ms"][way], case["decoding"].get(way)
            rows.append((
                f"{shape.upper()} r={rank}", title, *(f"{ms[part]:.1f}" for part in ("sync", "read", "write", "load")),
                f"{share['share']:.2f}, {share['syncs']} syncs meanwhile" if share else "",
            ))  # fmt: skip
    return markdown(header, rows)


EXPERT_CASES = {
    "experts_and_attention": "attention, experts",
    "experts_and_attention_per_expert": "attention, experts",
    "down_proj_only": "attention, `down_proj` of the experts",
    "all_linear_with_router": "attention, experts, router",
}


def experts() -> str:
    header = ("model", "serving", "trained", "tensors", "mean gap to the trainer", "to the base model",
              "to the adapter without its experts", "reward, first and last 5 of 20 steps")  # fmt: skip
    rows = []
    for name in ("vllm-0.26.0-h100-moe", "vllm-0.26.0-h100-moe-per-expert", "vllm-0.26.0-h100-moe-fused"):
        for case_name, found in read(name)["cases"].items():
            family = case_name.removeprefix("fused-")
            serving = "runtime" if family == case_name else "fused"
            run = found["run"]
            for case, what in EXPERT_CASES.items():
                if case in found:
                    gaps = found[case]
                    is_stacked = gaps.get("one_tensor_for_all_experts_of_a_layer")
                    rows.append((
                        f"`{family}`", f"`{serving}`", what, "for a layer" if is_stacked else "for each expert",
                        *(_short(gaps[key]) for key in ("trained", "base", "without_experts")),
                        f"{run['reward_first_five']:.2f}, {run['reward_last_five']:.2f}"
                        if case == "experts_and_attention" else "",
                    ))  # fmt: skip
    return markdown(header, rows)


SGLANG, SGLANG_IMAGES = "sglang-0.5.15-h100", "sglang-0.5.15-h100-images"
SGLANG_VL_EXPERTS = "sglang-0.5.15-h100-qwen3-vl-moe"
SGLANG_PARTS = ("read", "write", "load", "listing", "first_token", "second_token")


def sglang_adapters() -> str:
    """How far SGLang's log-probabilities are from the trainer's, with adapters on experts and with images."""
    cases = read(SGLANG)["cases"] | read(SGLANG_VL_EXPERTS)["cases"]
    rows = [
        (f"`{family}`", EXPERT_CASES[case], *(_short(cases[family][case][key]) for key in ("trained", "base")))
        for family in ("qwen3_moe", "mixtral", "qwen3_vl_moe")
        for case in ("experts_and_attention", "down_proj_only")
    ]
    images = read(SGLANG_IMAGES)["cases"]["images"]
    for kind, what in (("text", "prompts of text"), ("image", "prompts with images")):
        answered = [one for one in images[kind] if one["model"] == "adapter" and one["status"] == 200]
        gaps = [statistics.fmean(one[key] for one in answered) for key in ("gap_to_trained", "gap_to_base")]
        rows.append(("`qwen2_5_vl`", f"language model; {what}", *map(_short, gaps)))
        sampled = [one["gap_to_trained"] for one in images["engine"] if one["has_image"] is (kind == "image")]
        rows.append(("`qwen2_5_vl`", f"likewise, as a run samples; {what}", _short(statistics.fmean(sampled)), ""))
    return markdown(("model", "trained", "mean gap to the trainer", "to the base model"), rows)


def sglang_sync() -> str:
    header = ("shape", "MB", "read ms", "write ms", "load ms", "listing ms", "first token ms", "second token ms",
              "base tokens/s", "adapter tokens/s", "adapter / base")  # fmt: skip
    rows = []
    for shape in ("0.6b", "8b"):
        found = read(SGLANG)["cases"][shape]
        parts = [_ms(found["sync"]["median"][part]) for part in SGLANG_PARTS]
        speed = [f"{found['tokens_per_s'][name]['median']:,.0f}" for name in ("base", "adapter")]
        megabytes = f"{found['payload_bytes'] / MB:.0f}"
        rows.append((shape.upper(), megabytes, *parts, *speed, f"{found['adapter_over_base']:.2f}"))
    return markdown(header, rows)


EXPERT_SYNCS = ("vllm-0.26.0-h100-moe-sync", "vllm-0.26.0-h100-moe-sync-again")


def expert_sync() -> str:
    header = ("run", "tensors", "how many", "MB", "export ms", "writing the file ms", "load ms", "sync ms",
              "very first sync s")  # fmt: skip
    rows = []
    exports = read(EXPERT_SYNCS[0])["cases"]
    for number, name in enumerate(EXPERT_SYNCS, 1):
        for form, title in {"stacked": "for a layer", "per_expert": "for each expert"}.items():
            exported, synced = exports[f"export-{form}"], read(name)["cases"]["sync"][form]
            median = synced["median"]
            rows.append((
                str(number), title, f"{exported['tensors']:,}", f"{exported['bytes'] / MB:.0f}",
                _ms(median["export_s"]), _ms(median["write_s"]), _ms(median["load_s"]),
                _ms(synced["total_median_s"]), f"{sum(synced['very_first'].values()):.1f}",
            ))  # fmt: skip
    return markdown(header, rows)


COLOCATE_RUNS = {
    "colocate-8b-shared-h100": "8B",
    "colocate-8b-own-h100": "8B, at the same time on another GPU",
    "colocate-8b-no-text-h100": "8B, tokens not decoded to text",
    "colocate-8b-256x128-h100": "8B, 256 completions of 128 tokens, 32 at a time",
    "colocate-8b-h200": "8B, on an H200, `vllm_gpu_memory_utilization=0.3`",
    "colocate-0.6b-h100": "0.6B",
}
# With less memory, or of another kind.
COLOCATE_OTHERS = {
    "colocate-0.6b-sleep-h100": "0.6B, `vllm_enable_sleep_mode`, on a busy host",
    "colocate-32b-h100": "32B, 8 x 128 tokens, not compiled",
    "colocate-8b-liger-h100": "8B, 4 at a time, KV cache 3 GiB",
    "colocate-8b-folding-h100": "8B, folding in one pass",
    "colocate-8b-kv26-h100": "8B, KV cache 26 GiB",
    "colocate-8b-kv26-liger-h100": "8B, 2 at a time, KV cache 26 GiB",
    "colocate-8b-small-h100": "8B, 2 at a time, KV cache 2.6 GiB",
}


def colocate_summary() -> str:
    header = ("LoRA r=32, 8B", "sync", "TRL's own sync", "ratio", "decoding speed / TRL's own", "most GPU memory",
              "TRL's own", "base weights changed", "by TRL's own", "after")  # fmt: skip
    rows = []
    for arm, name in NEWEST_COLOCATE.items():
        found = read(name)
        ours, theirs = found["arms"][arm], found["arms"]["weights"]
        speeds = sorted(ours["tokens_per_s"][load] / theirs["tokens_per_s"][load] for load in ("32", "256"))
        rows.append((
            f"`{arm}`", *(f"{one['median_sync_ms']:.0f} ms" for one in (ours, theirs)),
            f"{ours['median_sync_ms'] / theirs['median_sync_ms']:.2f}", " to ".join(f"{one:.2f}" for one in speeds),
            *(f"{one['allocated_peak_gib']:.1f} GiB" for one in (ours, theirs)),
            *(f"{one['changed_share_after_syncs']:.1%}" for one in (ours, theirs)),
            "{steps} steps and {syncs} syncs".format_map(found["settings"]),
        ))  # fmt: skip
    return markdown(header, rows)


# Of each column the key, the form, and whether the ratio to `weights` in the same run follows in brackets.
COLOCATE_SPEED = {
    "sync": ("median_sync_ms", "{:.0f} ms", True),
    "generation of a step": ("median_generate_s", "{:.2f} s", True),
    "whole step": ("median_step_s", "{:.2f} s", True),
    "tokens/s, 32 at once": ("32", "{:,.0f}", True),
    "256 at once": ("256", "{:,.0f}", True),
    "base weights changed": ("changed", "{:.1%}", False),
}
COLOCATE_MEMORY = {
    "most GPU memory, by the driver": ("driver_peak_gib", "{:.1f} GiB", True),
    "of it allocated by torch": ("allocated_peak_gib", "{:.1f} GiB", True),
    "ready after": ("ready_s", "{:.0f} s", False),
}


def colocate(runs: Mapping[str, str], figures: Mapping[str, tuple[str, str, bool]]) -> str:
    rows = []
    for name, title in runs.items():
        theirs: dict[str, Any] = {}
        results = read(name)
        for arm, measured in results["arms"].items():
            found = measured | measured.get("tokens_per_s", {})
            is_complete = "median_sync_ms" in found
            if is_complete:
                found["changed"] = found.get("changed_share_after_syncs", found["changed_share_after_training"])
            cells = []
            for key, form, has_ratio in figures.values():
                cell = form.format(found[key]) if key in found else ""
                if has_ratio and key in found and key in theirs:
                    cell += f" ({found[key] / theirs[key]:.3f})"
                cells.append(cell)
            if arm == "weights" and is_complete:
                theirs = found
            shown = f"`{arm}`" if is_complete else f"`{arm}`, out of memory"
            rows.append((results["date"], title, shown, *cells))
    return markdown(("day", "run", "arm", *figures), rows)


def trls_generate() -> str:
    """Tokens per second of TRL's `generate`, with log-probabilities, beside `weights` in the same run."""
    rows = []
    for name, title in (COLOCATE_RUNS | COLOCATE_OTHERS).items():
        arms = read(name)["arms"]
        speeds = arms.get("weights", {}).get("tokens_per_s_by_trl", {})
        for load, theirs in speeds.items():
            ours = arms["fused-shared"]["tokens_per_s_by_trl"][load]
            rows.append((title, load, f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.3f}"))
    return markdown(("run", "requests at once", "tokens/s with `fused-shared`", "with `weights`", "ratio"), rows)


def colocate_two_gpus() -> str:
    header = ("launcher", "`vllm_tensor_parallel_size`", "sync", "of it gathering", "mean gap of the steps",
              "verified", "GPU memory of process 0", "base weights changed")  # fmt: skip
    rows = []
    for launch, size in (("ddp", 2), ("fsdp2", 1)):
        found = read(f"colocate-0.6b-2xh100-{launch}")["arms"]["runtime"]
        rows.append((
            f"`{launch}`", str(size), f"{found['median_sync_ms']:.0f} ms",
            f"{_ms(statistics.median(found['gather_s'][1:]))} ms", _short(statistics.fmean(found["logprob_gap"])),
            "yes" if all(found["verified"]) else "no", f"{found['driver_peak_gib']:.1f} GiB",
            f"{found['changed_share_after_syncs']:.1%}",
        ))  # fmt: skip
    return markdown(header, rows)


def folding() -> str:
    found = read("colocate-8b-folding-h100")["arms"]["fused-shared"]
    return (
        f"Folding took {found['fold_ms']:.0f} ms and unfolding {found['unfold_ms']:.0f} ms for each generation at 8B, "
        f"and {found['kept_mib']:.0f} MiB were kept meanwhile."
    )


WAYS = {
    "vllm-0.26.0-2xh200-ways": "bfloat16 base",
    "vllm-0.26.0-2xh200-fsdp2-offload": 'bfloat16 base, `lora_sync_verify="every"`',
    "vllm-0.26.0-2xh200-ways-4bit": "4-bit base, sharded by ZeRO-3 and FSDP",
    "vllm-0.26.0-2xh200-ways-4bit-whole": "4-bit base, whole on each GPU; another model",
    "vllm-0.26.0-2xh200-ways-bf16": "bfloat16 base; that other model",
    "vllm-0.26.0-2xh200-ways-4bit-refused": "4-bit base, sharded, with the check of this package",
    "vllm-0.26.0-4xh100-ways": "bfloat16 base; three processes on H100, the server on a fourth",
    "vllm-0.26.0-4xh200-ways": "bfloat16 base; three processes, the server on a fourth",
}


def launchers() -> str:
    header = ("launcher", "base model", "MB of the adapter", "MB reduced", "MB of GPU memory on process 0",
              "gap of log-probabilities", "verified")  # fmt: skip
    rows = []
    for name, base in WAYS.items():
        for way, found in sorted(read(name)["ways"].items()):
            if "failed" in found:
                refused = "UnsupportedSettingError" in found["failed"]
                rows.append((f"`{way}`", base, "", "", "", "refused" if refused else "fails in TRL", ""))
                continue
            gaps = found["logp_difference"]
            rows.append((
                f"`{way}`", base, f"{found['adapter_bytes'] / MB:.0f}",
                f"{found['collective_bytes'].get('reduce_', 0) / MB:.0f}", f"{found['peak_bytes'][0] / MB:.0f}",
                f"{_short(min(gaps))} to {_short(max(gaps))}", "yes" if all(found["verified"]) else "no",
            ))  # fmt: skip
    return markdown(header, rows)


def fused_tp() -> str:
    found = read("vllm-0.26.0-2xh200-fused-tp2")
    gaps, back = found["gap_to_float32"], found["back_to_base"]
    adapters = statistics.fmean(one["mean"] for one in gaps["adapters"])
    rows = [
        ("tensor-parallel workers", str(found["workers"])),
        ("MB of the adapter", f"{found['adapter_bytes'] / MB:.0f}"),
        ("first sync s", f"{found['first_sync_s']['client']:.2f}"),
        ("later syncs, median ms", _ms(found["sync_s_median"]["client"])),
        (f"mean gap of {len(gaps['adapters'])} adapters to PEFT in float32", _short(adapters)),
        ("mean gap of the base model to float32", _short(gaps["base"]["mean"])),
        ("base weights different after the run", str(sum(one["different"] for one in back["weights_compared"]))),
    ]
    return markdown(("", ""), rows)


# By how the names of their files begin.
GROUPS = {
    "vs-weights": "Syncs and decoding beside TRL's own",
    "colocate": "Colocate mode",
    "sglang": "SGLang",
    "vllm": "vLLM: experts, launchers, faults, long runs",
    "": "Others",
}


def how_it_was_run() -> str:
    """Each file of results with its versions, hardware, day and commands; then the servers started by hand."""
    groups: dict[str, list[str]] = {title: [] for title in GROUPS.values()}
    servers: dict[tuple[str, str], list[str]] = {}
    for file in sorted(RESULTS.glob("*.json")):
        found = json.loads(file.read_text())
        runs = found if isinstance(found, list) else [found] if "command" in found else found["runs"]
        about = "; ".join(dict.fromkeys(_about(run) for run in runs))
        commands = dict.fromkeys(command for run in runs for command in run["command"].split("; "))
        note = f" {found['note'].rstrip('.')}." if "note" in found else ""
        title = next(title for start, title in GROUPS.items() if file.name.startswith(start))
        groups[title].append(f"**{file.name}**: {about}.{note}\n\n" + _code(commands))
        if "server_command" in runs[0]:
            servers.setdefault((runs[0]["server_command"], runs[0]["model"]), []).append(file.name)
    groups["Servers that were started by hand"] = [
        f"The server of {', '.join(f'`{name}`' for name in files)}; the model: {model}.\n\n" + _code([command])
        for (command, model), files in servers.items()
    ]
    return "\n\n".join(
        "\n\n".join((f'<details markdown="1">\n<summary>{title}</summary>', *parts, "</details>"))
        for title, parts in groups.items()
    )


def _code(commands: Iterable[str]) -> str:
    return "```bash\n" + "\n".join(commands) + "\n```"


def _about(run: dict[str, Any]) -> str:
    engine, versions = run.get("server"), run["versions"]
    known = [f"{ENGINES[engine['engine']]} {engine['version']}"] if engine else []
    known += [f"{title} {versions[name]}" for name, title in PACKAGES.items() if name in versions]
    return f"{', '.join(known)}; {table.hardware(run)}; {run['date']}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"


def _short(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


README_SECTIONS: Mapping[str, Callable[[], str]] = {
    "vs-weights-summary": versus_summary,
    "sampling-ahead": ahead_sentence,
}
PAGE_SECTIONS: Mapping[str, Callable[[], str]] = {
    "vs-weights-summary": versus_summary,
    "newest-syncs": newest_syncs,
    "newest-decoding": newest_decoding,
    "newest-drift": newest_drift,
    "headline-decoding": headline_decoding,
    "parts-of-syncs": parts_of_syncs,
    "several-servers": several_servers,
    "tensor-parallel": tensor_parallel,
    "steps-with-syncs": steps_with_syncs,
    "overlap": overlap,
    "async-grpo": async_grpo,
    "default-runs": default_runs,
    "vs-weights": versus_tables,
    "other-arms": other_arms,
    "sync-cost": sync_cost,
    "decoding": decoding,
    "transports": transports,
    "push": push,
    "completions": completions,
    "faults": faults,
    "kills": kills,
    "own-tests": own_tests,
    "soak": soak,
    "soak-controls": soak_controls,
    "grpo-runs": grpo_runs,
    "demo-seeds": demo_seeds,
    "qlora": qlora,
    "qlora-colocate": qlora_colocate,
    "floor": floor,
    "experts": experts,
    "expert-sync": expert_sync,
    "sglang-adapters": sglang_adapters,
    "sglang-sync": sglang_sync,
    "colocate-summary": colocate_summary,
    "colocate": lambda: colocate(COLOCATE_RUNS, COLOCATE_SPEED),
    "colocate-others": lambda: colocate(COLOCATE_OTHERS, COLOCATE_SPEED),
    "memory": lambda: colocate(COLOCATE_RUNS, COLOCATE_MEMORY),
    "memory-others": lambda: colocate(COLOCATE_OTHERS, COLOCATE_MEMORY),
    "trls-generate": trls_generate,
    "colocate-two-gpus": colocate_two_gpus,
    "folding": folding,
    "launchers": launchers,
    "fused-tp": fused_tp,
    "how-it-was-run": how_it_was_run,
}


def markers(name: str) -> tuple[str, str]:
    """The lines before and after a section."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def fill(text: str, sections: Mapping[str, Callable[[], str]]) -> str:
    """The text with each section made again.

    Raises:
        ValueError: the text lacks the markers of a section.
    """
    for name, make in sections.items():
        begin, end = markers(name)
        before, has_begin, rest = text.partition(begin)
        _, has_end, after = rest.partition(end)
        if not has_begin or not has_end:
            raise ValueError(f"The text has no lines {begin} and {end}.")
        text = f"{before}{begin}\n{make()}\n{end}{after}"
    return text


def pages() -> Iterator[tuple[Path, Mapping[str, Callable[[], str]]]]:
    """Each file that holds numbers, with its sections."""
    yield PAGE, PAGE_SECTIONS
    yield README, README_SECTIONS


def write() -> None:
    """Bring the files and the chart up to date."""
    for file, sections in pages():
        file.write_text(fill(file.read_text(), sections))
    CHART.write_text(table.chart(read("vs-weights")))
    OVERLAP_CHART.write_text(timelines.chart(read("overlap-2xh100")["timelines"]))


if __name__ == "__main__":
    write()
