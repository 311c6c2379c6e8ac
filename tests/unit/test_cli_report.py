"""Unit tier: what is read of a run, and what the page of one run or of several shows of it."""

import importlib.util
import json
import math
import re
import shlex
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from trl_lora_sync.cli.figures import Line, line_figure, outliers, stacked_figure
from trl_lora_sync.cli.main import main
from trl_lora_sync.cli.run_history import read_runs

FULL = {
    "reward": 0.5,
    "reward_std": 0.1,
    "loss": 0.01,
    "entropy": 1.5,
    "kl": 0.1,
    "grad_norm": 0.3,
    "learning_rate": 1e-4,
    "completions/mean_length": 20.0,
    "completions/min_length": 10.0,
    "completions/max_length": 30.0,
    "completions/clipped_ratio": 0.25,
    "lora_sync/version": 1,
    "lora_sync/total_s": 0.1,
    "lora_sync/gather_s": 0.02,
    "lora_sync/write_s": 0.03,
    "lora_sync/load_s": 0.04,
    "lora_sync/generate_s": 0.5,
    "lora_sync/bytes": 2_000_000,
    "lora_sync/retries": 1,
    "lora_sync/verify_s": 0.005,
    "lora_sync/verify_gap": 0.01,
    "lora_sync/servers": 2,
    "lora_sync/load_s/0": 0.03,
    "lora_sync/load_s/1": 0.04,
    "sampling/sampling_logp_difference/mean": 0.01,
    "sampling/sampling_logp_difference/max": 0.2,
    "sampling/importance_sampling_ratio/mean": 1.0,
    "sampling/importance_sampling_ratio/min": 0.9,
    "sampling/importance_sampling_ratio/max": 1.1,
    "step_time": 1.0,
}
HEADER = {
    "started": "2026-05-04T10:00:00+00:00",
    "from_step": 0,
    "max_steps": 100,
    "model": "Qwen/Qwen3-0.6B",
    "lora_rank": 16,
    "lora_alpha": 32,
    "engine": "vllm",
    "engine_version": "0.31.0",
    "servers": 2,
    "processes": 4,
    "versions": {"trl-lora-sync": "0.2.0", "trl": "1.16.0", "peft": "0.21.2", "torch": "2.13.0", "python": "3.12.1"},
    "settings": {"learning_rate": 1e-4, "lora_sync_verify": "first"},
}
HEADINGS = [
    "Reward",
    "Where the time of a step goes",
    "Training",
    "Sync time by phase",
    "Verification",
    "Server and trainer",
    "Servers",
    "Out of the ordinary",
]


class Page(HTMLParser):
    """The text of a page outside its scripts, its headings, and everything that names another place."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.policy = ""
        self._inside = ""
        self.feed(text)
        figures = re.search(r"^const figures = (\[\n.*?\n\]);$", text, re.DOTALL | re.MULTILINE)
        assert figures is not None
        self.figures = json.loads(figures[1])
        titles = re.findall(r'id="chart-\d+" role="img" aria-label="(.*?)"', text)
        self.charts = dict(zip(titles, self.figures, strict=True))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"] or ""

    def handle_data(self, data: str) -> None:
        if self._inside == "h2":
            self.headings.append(data)
        if self._inside not in ("script", "style") and data.strip():
            self.texts.append(data.strip())
        if self._inside != "script":
            self._inside = ""

    def traces(self, chart: str) -> dict[str, dict[str, Any]]:
        return {trace["name"]: trace for trace in self.charts[chart]["data"] if "name" in trace}


def write_state(folder: Path, rows: list[dict[str, Any]], step: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    state = {"global_step": step or len(rows), "log_history": rows}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


def write_log(folder: Path, *entries: dict[str, Any], end: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lora_sync.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in entries) + end)
    return folder


def steps(*numbers: int, **changes: Any) -> list[dict[str, Any]]:
    return [
        {"time": "2026-05-04T10:01:00+00:00", "step": n} | FULL | {"lora_sync/version": n} | changes for n in numbers
    ]


def report_of(*folders: Path) -> Page:
    assert main(["report", *map(str, folders)]) == 0
    return Page((folders[0] / "lora-sync-report.html").read_text())


# What is read


def test_a_running_job_is_read_before_it_has_saved_anything(tmp_path: Path) -> None:
    page = report_of(write_log(tmp_path, HEADER, *steps(1, 2, 3), end='{"time": "2026-05-04T10:0'))
    assert "step 3 of 100, last log 2026-05-04 10:01 UTC; running, or it was ended" in page.texts


def test_a_run_that_came_to_its_end_is_not_called_running(tmp_path: Path) -> None:
    page = report_of(write_log(tmp_path, HEADER, *steps(1), {"step": 100, "train_runtime": 60.0}))
    assert "step 100 of 100" in page.texts


def test_a_run_that_is_resumed_after_its_end_has_not_ended(tmp_path: Path) -> None:
    resumed = HEADER | {"from_step": 2}
    end = {"step": 2, "train_runtime": 60.0}
    (run,) = read_runs([write_log(tmp_path, HEADER, *steps(1, 2), end, resumed, *steps(3))])
    assert not run.has_ended


@pytest.mark.parametrize("state", ["[]", '{"log_history": null}', '{"log_history": ["step", {"step": null}]}'])
def test_state_without_rows_ends_with_2(state: str, tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(state)
    assert main(["report", str(tmp_path)]) == 2


def test_values_whose_sum_is_no_float_are_shown(tmp_path: Path) -> None:
    report_of(write_log(tmp_path, HEADER, *steps(*range(1, 30), reward=1e308)))


def test_a_server_without_a_number_is_left_out(tmp_path: Path) -> None:
    page = report_of(write_log(tmp_path, HEADER, *steps(*range(1, 4), **{"lora_sync/load_s/x": 0.1})))
    assert page.traces("Load time of each server").keys() == {"server 0", "server 1"}


def test_row_without_a_step_is_left_out(tmp_path: Path) -> None:
    (run,) = read_runs([write_log(tmp_path, HEADER, *steps(1), {"step": None, "reward": 0.9})])
    assert run.series("reward") == [(1, 0.5)]


def test_a_resumed_run_is_one_run_without_the_steps_that_were_trained_again(tmp_path: Path) -> None:
    resumed = HEADER | {"from_step": 2, "started": "2026-05-05T10:00:00+00:00"}
    (run,) = read_runs([write_log(tmp_path, HEADER, *steps(1, 2, 3), resumed, *steps(3, 4, reward=0.9))])
    assert run.series("reward") == [(1, 0.5), (2, 0.5), (3, 0.9), (4, 0.9)]
    assert run.header["started"] == HEADER["started"]


def test_only_the_newest_of_several_trainings_in_a_folder_is_shown(tmp_path: Path) -> None:
    newer = HEADER | {"lora_rank": 8}
    (run,) = read_runs([write_log(tmp_path, HEADER, *steps(1, 2, 3), newer, *steps(1, reward=0.9))])
    assert run.series("reward") == [(1, 0.9)]
    assert run.header["lora_rank"] == 8
    assert run.earlier == [HEADER["started"]]
    assert "earlier trainings in this folder, begun 2026-05-04 10:00 UTC" in report_of(tmp_path).texts


def test_newest_checkpoint_is_read_where_there_is_no_log(tmp_path: Path) -> None:
    write_state(tmp_path / "checkpoint-2", [{"step": 2, "reward": 0.2}], step=2)
    write_state(tmp_path / "checkpoint-10", [{"step": 10, "reward": 0.1}], step=10)
    assert "step 10" in report_of(tmp_path).texts


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (None, "", "There is no lora_sync.jsonl"),
        ("lora_sync.jsonl", "", "lora_sync.jsonl has no line of a run"),
        ("trainer_state.json", "{", "cannot be read"),
        ("trainer_state.json", '{"global_step": 1, "log_history": [{"step": 1, "loss": 1}]}', "no reward and no sync"),
        ("lora_sync.jsonl", json.dumps(HEADER), "began at 2026-05-04T10:00:00+00:00 and has not logged a step yet"),
    ],
)
def test_folder_without_a_log_says_what_is_missing(
    name: str | None, content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name is not None:
        (tmp_path / name).write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


def test_one_folder_given_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path, HEADER, *steps(1))
    assert main(["report", str(tmp_path), str(tmp_path)]) == 2
    assert "Give each run once" in capsys.readouterr().err


def test_without_plotly_the_command_that_installs_it_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["report", str(write_log(tmp_path, HEADER, *steps(1)))]) == 2
    command = shlex.split(capsys.readouterr().err.partition("Install it with: ")[2])
    assert command == [sys.executable, "-m", "pip", "install", "plotly>=6.3"]


def test_page_goes_where_it_is_wanted(tmp_path: Path) -> None:
    run = write_log(tmp_path / "run", HEADER, *steps(1))
    assert main(["report", str(run), "--out", str(tmp_path / "new" / "page.html")]) == 0
    assert (tmp_path / "new" / "page.html").exists()


@pytest.mark.parametrize("place", [".", "run/lora_sync.jsonl/page.html"])
def test_page_that_cannot_be_written_ends_with_2(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_log(tmp_path / "run", HEADER, *steps(1))
    assert main(["report", str(run), "--out", str(tmp_path / place)]) == 2
    assert "Name another file with --out" in capsys.readouterr().err


# One run


def test_page_shows_every_chart(tmp_path: Path) -> None:
    page = report_of(write_log(tmp_path / "run", HEADER, *steps(*range(1, 6))))
    assert page.headings == HEADINGS
    assert not any("left out" in text for text in page.texts)
    assert {
        "Loss",
        "Entropy",
        "KL divergence",
        "Gradient norm",
        "Learning rate",
        "Completion length",
    } <= page.charts.keys()
    assert page.traces("Load time of each server").keys() == {"server 0", "server 1"}
    for value in ("100 ms", "2.0 MB", "Seconds of the load on each server. In use: 2."):
        assert value in page.texts


def test_page_is_titled_by_model_and_rank_and_says_what_was_run(tmp_path: Path) -> None:
    page = report_of(write_log(tmp_path / "run", HEADER, *steps(1)))
    assert "Qwen/Qwen3-0.6B, LoRA rank 16" in page.texts
    for words in ("vLLM 0.31.0, 2 servers", "rank 16, alpha 32", "4 processes", "2026-05-04 10:00 UTC"):
        assert words in page.texts
    assert "trl_lora_sync 0.2.0, trl 1.16.0, peft 0.21.2, torch 2.13.0, python 3.12.1" in page.texts


@pytest.mark.parametrize(
    ("model", "title"),
    [
        ("/data/models/mine/", "mine"),
        ("/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/0123456789", "Qwen/Qwen3-8B"),
        ("gpt2", "gpt2"),
    ],
)
def test_a_model_in_a_folder_is_titled_by_its_name(model: str, title: str, tmp_path: Path) -> None:
    page = report_of(write_log(tmp_path, HEADER | {"model": model}, *steps(1)))
    assert f"{title}, LoRA rank 16" in page.texts


def test_page_loads_nothing_and_sends_nothing(tmp_path: Path) -> None:
    page = report_of(write_log(tmp_path / "run", HEADER, *steps(1)))
    text = (tmp_path / "run" / "lora-sync-report.html").read_text()
    assert not page.links
    assert page.policy.startswith("default-src 'none';")
    assert "http" not in page.policy
    assert '"showSendToCloud": false' in text  # plotly.js has a button that uploads the chart
    assert len(text) < 6_000_000


def test_metrics_that_are_absent_are_left_out_with_a_word(tmp_path: Path) -> None:
    page = report_of(write_state(tmp_path / "run", [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.6}]))
    assert page.charts.keys() == {"Reward"}
    assert any(text.startswith("Not in the log, so left out: Time of a step, Loss, ") for text in page.texts)
    assert "run" in page.texts  # the title, as the model is not known


@pytest.mark.parametrize("value", ["<b>run", "</script><script>alert(1)</script>"])
def test_names_are_no_markup(value: str, tmp_path: Path) -> None:
    other = write_log(tmp_path / "other", HEADER | {"model": value}, *steps(1))
    run = write_log(tmp_path / value.replace("/", ":"), HEADER | {"model": value}, *steps(1))
    report_of(run, other)
    text = (run / "lora-sync-report.html").read_text()
    assert "<b>run" not in text
    assert "alert(1)<" not in text
    assert text.count("</script>") == 2


def test_a_step_is_split_into_generation_training_and_sync(tmp_path: Path) -> None:
    page = report_of(write_log(tmp_path, HEADER, *steps(*range(1, 6))))
    traces = page.traces("Time of a step")
    assert [traces[name]["y"] for name in ("generate", "train", "sync")] == [
        pytest.approx([0.5] * 5), pytest.approx([0.4] * 5), pytest.approx([0.1] * 5)
    ]  # fmt: skip
    assert "50 / 40 / 10 %" in page.texts


def test_a_sync_for_several_steps_is_counted_once(tmp_path: Path) -> None:
    """Logged every fourth step, with one sync for two steps, each row has the mean of two syncs."""
    rows = [row | {"lora_sync/version": row["step"] // 2} for row in steps(4, 8)]
    (run,) = read_runs([write_log(tmp_path, HEADER, *rows)])
    assert run.step_parts()["sync"] == [(4, pytest.approx(0.05)), (8, pytest.approx(0.05))]
    assert run.step_parts()["train"] == [(4, pytest.approx(0.45)), (8, pytest.approx(0.45))]


def test_requests_sent_again_are_summed_over_all_syncs_of_a_row(tmp_path: Path) -> None:
    rows = [row | {"lora_sync/version": row["step"], "lora_sync/retries": 0.1} for row in steps(10, 20)]
    page = report_of(write_log(tmp_path, HEADER, *rows))
    assert page.texts[page.texts.index("requests sent again") - 1] == "2"


def test_verified_syncs_do_not_flatten_the_phases(tmp_path: Path) -> None:
    rows = steps(*range(1, 21))
    for row in rows[:2]:
        row |= {"lora_sync/verify_s": 9.0, "lora_sync/total_s": 9.1}
    page = report_of(write_log(tmp_path, HEADER, *rows))
    figure = page.charts["Sync time by phase"]
    assert page.traces("Sync time by phase").keys() == {"gather", "write", "load", "rest"}
    assert figure["layout"]["yaxis"]["range"][1] < 0.2
    assert max(page.traces("Verification time")["verify"]["y"]) == 9.0


def test_a_slow_step_is_marked_at_the_edge_and_listed_with_its_value(tmp_path: Path) -> None:
    rows = steps(*range(1, 21))
    rows[9] |= {"lora_sync/load_s": 7.04, "lora_sync/total_s": 7.1}
    page = report_of(write_log(tmp_path, HEADER, *rows))
    figure = page.charts["Sync time by phase"]
    mark = page.traces("Sync time by phase")["outlier"]
    assert (mark["x"], mark["customdata"]) == ([10], [pytest.approx(7.095)])
    assert mark["y"] == [figure["layout"]["yaxis"]["range"][1]]
    start = page.texts.index("lora_sync/total_s")
    assert page.texts[start : start + 4] == ["lora_sync/total_s", "10", "7.1", "0.1"]


# Several runs


def test_two_runs_stand_side_by_side_with_what_differs_emphasised(tmp_path: Path) -> None:
    first = write_log(tmp_path / "a" / "out", HEADER, *steps(1, 2, 3))
    second = write_log(tmp_path / "b" / "out", HEADER | {"lora_rank": 64}, *steps(1, 2, 3, reward=0.9))
    page = report_of(first, second)
    assert "Qwen/Qwen3-0.6B, LoRA rank 16 and Qwen/Qwen3-0.6B, LoRA rank 64" in page.texts
    assert page.traces("Reward").keys() == {"a/out", "b/out"}
    stacked = [figure for title, figure in page.charts.items() if title in ("a/out", "b/out")]
    assert len(stacked) == 2
    text = (first / "lora-sync-report.html").read_text()
    assert '<tr class="differs"><td>adapter</td><td>rank 16, alpha 32</td><td>rank 64, alpha 32</td></tr>' in text
    assert "<tr><td>engine</td><td>vLLM 0.31.0, 2 servers</td><td>vLLM 0.31.0, 2 servers</td></tr>" in text


def test_stacked_charts_of_two_runs_have_the_same_axis(tmp_path: Path) -> None:
    first = write_log(tmp_path / "a", HEADER, *steps(*range(1, 10)))
    second = write_log(tmp_path / "b", HEADER, *steps(*range(1, 10), step_time=4.0))
    page = report_of(first, second)
    ranges = [
        figure["layout"]["yaxis"]["range"]
        for figure in page.figures
        if "generate" in [t.get("name") for t in figure["data"]]
    ]
    assert len(ranges) == 2
    assert ranges[0] == ranges[1]
    assert ranges[0][1] > 4.0


# Outliers and figures


def test_a_trend_has_no_outliers_and_a_spike_in_it_is_one() -> None:
    rising = [(float(step), 1.0 + 0.1 * step + 0.02 * (step % 3)) for step in range(40)]
    assert outliers(rising) == []
    rising[20] = (20.0, 9.0)
    assert [outlier.step for outlier in outliers(rising)] == [20.0]


def test_values_that_are_no_numbers_are_outliers() -> None:
    found = outliers([(1.0, 0.5), (2.0, math.nan), (3.0, math.inf)])
    assert [outlier.step for outlier in found] == [2.0, 3.0]


def test_a_few_points_have_no_outliers() -> None:
    assert outliers([(1.0, 1.0), (2.0, 50.0), (3.0, 1.0)]) == []


def test_a_band_has_no_markers_of_its_own() -> None:
    """By default plotly marks the points of a trace that has fewer than 20."""
    line = Line(name="reward", points=[(1.0, 1.0), (2.0, 2.0)], band=[(1.0, 0.0, 2.0), (2.0, 1.0, 3.0)])
    band, _ = line_figure([line], unit="reward").data
    assert (band.fill, band.mode) == ("toself", "lines")


@pytest.mark.parametrize("count", [1, 2, 50, 1000])
def test_figures_are_json_whatever_the_values(count: int) -> None:
    points = [(float(step), math.nan if step % 11 == 5 else step % 7 + 0.5) for step in range(1, count + 1)]
    lines = [Line(name="a & b", points=points, band=[(x, y - 1, y + 1) for x, y in points])]
    for figure in (line_figure(lines, unit="y", reference=1.0), stacked_figure(lines, unit="y", top=2.0)):
        text = figure.to_json()
        assert "NaN" not in text
        assert json.loads(text)["data"]


def test_a_series_without_a_single_number_is_drawn_all_the_same() -> None:
    line = Line(name="a", points=[(1.0, math.nan), (2.0, math.inf)])
    assert json.loads(line_figure([line], unit="y").to_json())["data"]
