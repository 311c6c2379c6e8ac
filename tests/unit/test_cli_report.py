"""Unit tier: the page of a run, and the charts in it."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from trl_lora_sync.cli.charts import Line, line_chart, nice_ticks, stacked_chart
from trl_lora_sync.cli.main import main

FULL = {
    "reward": 0.5,
    "reward_std": 0.1,
    "lora_sync/version": 1,
    "lora_sync/total_s": 0.1,
    "lora_sync/gather_s": 0.02,
    "lora_sync/write_s": 0.03,
    "lora_sync/load_s": 0.04,
    "lora_sync/bytes": 2_000_000,
    "lora_sync/retries": 1,
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
HEADINGS = [
    "Reward",
    "Sync time by phase",
    "Verify gap",
    "Log-probability gap of the completions",
    "Importance ratio",
    "Servers",
]


class Page(HTMLParser):
    """Headings, and everything that names another place."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.links: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self._inside == "h2":
            self.headings.append(data)
        self._inside = ""


def write_state(folder: Path, rows: list[dict[str, Any]], step: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    state = {"global_step": step or len(rows), "log_history": rows}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


def report_of(folder: Path) -> str:
    assert main(["report", str(folder)]) == 0
    return (folder / "lora-sync-report.html").read_text()


def test_page_shows_every_chart_and_needs_nothing_else(tmp_path: Path) -> None:
    text = report_of(write_state(tmp_path / "run", [FULL | {"step": step} for step in range(1, 6)]))
    page = Page(text)
    assert page.headings == HEADINGS
    assert not page.links
    assert "http" not in text
    assert "url(" not in text
    assert "left out" not in text
    for value in ("100 ms", "2.0 MB", "server 0", "server 1", "In use: 2."):
        assert value in text


def test_metrics_that_are_absent_are_left_out_with_a_word(tmp_path: Path) -> None:
    text = report_of(write_state(tmp_path / "run", [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.6}]))
    assert Page(text).headings == ["Reward"]
    assert f"left out: {', '.join(HEADINGS[1:])}." in text


def test_newest_checkpoint_is_read(tmp_path: Path) -> None:
    write_state(tmp_path / "checkpoint-2", [{"step": 2, "reward": 0.2}], step=2)
    write_state(tmp_path / "checkpoint-10", [{"step": 10, "reward": 0.1}], step=10)
    assert "<b>10</b><span>steps</span>" in report_of(tmp_path)


def test_page_goes_where_it_is_wanted(tmp_path: Path) -> None:
    run = write_state(tmp_path / "run", [FULL | {"step": 1}])
    assert main(["report", str(run), "--out", str(tmp_path / "new" / "page.html")]) == 0
    assert (tmp_path / "new" / "page.html").exists()


def test_name_of_the_run_is_no_markup(tmp_path: Path) -> None:
    text = report_of(write_state(tmp_path / "<b>run", [FULL | {"step": 1}]))
    assert "<h1>&lt;b&gt;run</h1>" in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "There is no trainer_state.json"),
        ("{", "cannot be read"),
        ('{"global_step": 1, "log_history": [{"step": 1, "loss": 1}]}', "has no reward and no sync"),
    ],
)
def test_folder_that_is_no_run_says_what_is_missing(
    content: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "trainer_state.json").write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 2, 50, 1000])
def test_charts_are_whole_svg_within_their_frame(count: int) -> None:
    points = [(float(step), step % 7 + 0.5) for step in range(1, count + 1)]
    lines = [Line("a & b", points, band=[(x, y - 1, y + 1) for x, y in points]), Line("c", points)]
    for text in (line_chart(lines, y_label="<y>", reference=1.0), stacked_chart(lines, y_label="<y>")):
        root = ElementTree.fromstring(text)
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        for rect in root.iter("rect"):
            x, y, wide, high = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
            assert -0.1 <= x <= x + wide <= width + 0.1
            assert -0.1 <= y <= y + high <= height + 0.1
        for line in root.iter("polyline"):
            for x, y in re.findall(r"([-\d.]+),([-\d.]+)", line.attrib["points"]):
                assert 0 <= float(x) <= width
                assert 0 <= float(y) <= height


def test_not_a_number_is_not_drawn() -> None:
    text = line_chart([Line("a", [(1.0, float("nan")), (2.0, 1.0), (3.0, float("inf"))])], y_label="y")
    assert "nan" not in text
    assert "inf" not in text


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.13, 0.17), (-3, 12), (5, 5), (0, 0), (1e-6, 3e-6), (0, 123456)])
def test_ticks_are_few_and_enclose_the_values(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 2 <= len(ticks) <= 9
    assert len(set(ticks)) == len(ticks)
