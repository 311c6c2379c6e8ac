"""Unit tier: the README and the other files of the project's root say what the project is, briefly, and agree."""

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import docs_hooks
import pytest
import yaml
from versus import table

from trl_lora_sync.engines.known import KNOWN_VERSIONS
from trl_lora_sync.versions import PEFT, TRL

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = sorted((ROOT / "docs").glob("*.md"))
PROSE = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")] + PAGES
# Of [project] the plain values; tomllib comes with Python 3.11 only.
_METADATA = (ROOT / "pyproject.toml").read_text().partition("[project]\n")[2].partition("\n[")[0]
PROJECT = dict(re.findall(r'^([\w-]+) = "(.*)"$', _METADATA, re.MULTILINE))
# Words that a plain sentence about software does without.
MARKERS = (
    r"somebody|nobody|anybody|everybody|whoever|whichever|anew|afresh|of (?:its|their) own|as it is|as ever|"
    r"(?<!there )(?:is|are) no(?! longer)|sa(?:ys|id|y) so|said|told|asked|dies?|died|forgets?|forgot(?:ten)?|"
    r"takes? back|took back|taken back|looks? whether|those that|one that|those of|without a word"
)
SOURCES = sorted(docs_hooks.PACKAGE.rglob("*.py"))
# Not yet held to them.
EXEMPT = {
    docs_hooks.PACKAGE / name
    for name in ("_trl.py", "generation.py", "scoring.py", "sync.py", "trainers.py", "trl_checks.py", "verify.py")
} | {file for file in SOURCES if file.parent.name == "engine_plugins"}


def plain(text: str) -> str:
    """The text of a page without its code, links and quoted messages."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->|`[^`]*`", " ", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\]\([^)]*\)", " ", text)


def sentences(text: str) -> list[list[str]]:
    """The words of each sentence, where an item of a list is a sentence too."""
    prose = re.sub(r"^\|.*$|^#.*$", " ", plain(text), flags=re.MULTILINE)
    parts = re.split(r"(?<=[.:!?])\s|\n\s*\n|^\s*[-*] ", prose, flags=re.MULTILINE)
    return [words for part in parts if len(words := re.findall(r"[\w'-]+", part)) > 2]


@cache
def anchors(file: Path) -> set[str]:
    text = docs_hooks.on_page_markdown(file.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'id="([\w-]+)"', text))


def test_readme_is_read_in_a_minute() -> None:
    assert len(README.encode()) <= 10_000
    lengths = [len(words) for words in sentences(README)]
    assert len(lengths) > 30
    assert sum(lengths) / len(lengths) <= 18


@pytest.mark.parametrize("file", PROSE, ids=lambda file: file.name)
def test_prose_is_plain(file: Path) -> None:
    text = " ".join(plain(file.read_text()).split())
    assert re.findall(rf".{{0,30}}\b(?:{MARKERS})\b.{{0,20}}", text, re.IGNORECASE) == []


def written_in(source: str) -> Iterator[str]:
    """The strings of Python source, and its comments; lines that belong together as one text, without values."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
    block, end = "", 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] > end + 1:
                yield block
                block = ""
            block, end = f"{block} {token.string.lstrip('# ')}", token.start[0]
    yield block


def test_texts_of_the_source_are_put_together() -> None:
    source = (
        "# one\n# two\nvalue = 3\n"
        "def told():\n"
        '    """Four `told` and\n    five."""\n'
        '    raise E(f"six {told} " "seven.")  # eight\n'
    )
    texts = {" ".join(plain(text).split()) for text in written_in(source)}
    assert texts >= {"one two", "Four and five.", "six … seven.", "eight"}
    assert "told" not in " ".join(texts)


@pytest.mark.parametrize("file", [file for file in SOURCES if file not in EXEMPT], ids=lambda file: file.name)
def test_messages_docstrings_and_comments_are_plain(file: Path) -> None:
    texts = [" ".join(plain(text).split()) for text in written_in(file.read_text())]
    found = [
        re.findall(rf".{{0,60}}\b(?:{MARKERS}|says?|tells?|asks?)\b.{{0,40}}", text, re.IGNORECASE) for text in texts
    ]
    assert [one for some in found for one in some] == []


@pytest.mark.parametrize("file", PROSE, ids=lambda file: file.name)
def test_links_lead_somewhere(file: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]*)\)", file.read_text()):
        path, _, anchor = link.partition("#")
        target = file.parent / path if path else file
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_readme_says_how_to_install_serve_check_and_test() -> None:
    for command in ("pip install .", "trl-lora-sync serve vllm ", "trl-lora-sync doctor ", "make demo", "make test"):
        assert command in README
    assert '+    vllm_sync_strategy="lora_adapter",' in README


def test_readme_links_to_every_page_that_a_newcomer_needs() -> None:
    linked = set(re.findall(r"\((?:docs/)?([\w.-]+\.(?:md|cff))", README))
    assert {page.name for page in PAGES} - linked <= {"security.md"}  # SECURITY.md is that page
    assert {"CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff"} <= linked


def test_readme_has_six_guarantees_and_ten_rows_of_support() -> None:
    guaranteed, supported = (README.partition(f"## What is {word}\n")[2] for word in ("guaranteed", "supported"))
    assert len(re.findall(r"^- \*\*", guaranteed.partition("\n## ")[0], re.MULTILINE)) == 6
    rows = re.findall(r"^\| .*", supported.partition("\n## ")[0], re.MULTILINE)
    assert len([row for row in rows if re.search(r"\w", row)]) == 10


def test_readme_names_the_versions_that_the_code_knows() -> None:
    for known in (*KNOWN_VERSIONS.values(), TRL, PEFT):
        assert f"| {known.title} {known.oldest} to {known.newest} |" in README
    for known in KNOWN_VERSIONS.values():
        [row] = re.findall(rf"^\| {known.title} .*$", README, re.MULTILINE)
        assert all(version in row for version in known.run)


def test_documentation_names_the_oldest_python_of_the_metadata() -> None:
    oldest = PROJECT["requires-python"].removeprefix(">=")
    for file in (README, (ROOT / "docs" / "index.md").read_text(), (ROOT / "CONTRIBUTING.md").read_text()):
        assert f"Python {oldest} " in file


def test_changelog_is_about_this_version_and_has_the_figures_of_the_results() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## \[(.*?)\]", changelog, re.MULTILINE) == [PROJECT["version"]]
    results = json.loads((ROOT / "benchmarks" / "results" / "vs-weights.json").read_text())
    ratios = {limit.what: limit.found for limit in table.limits(results)}
    words = " ".join(changelog.split())
    assert (
        f"takes {ratios['8b r=32 sync, runtime']:.2f} of the time of TRL's own at 8B and "
        f"{ratios['32b r=32 sync, runtime']:.2f} at 32B" in words
    )


def test_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["title"] == PROJECT["name"]
    assert citation["license"] == PROJECT["license"]


def test_workflow_and_hooks_run_the_commands_of_the_checks() -> None:
    """So neither can drift from what must pass before a change goes in."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands == [".ci/run", "make test-python-${{ matrix.python }}"]
    [pythons] = re.findall(r"^PYTHONS := (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert workflow["jobs"]["pythons"]["strategy"]["matrix"]["python"] == pythons.split()
    checks = (ROOT / ".ci" / "run").read_text()
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"] for repository in hooks for hook in repository["hooks"]]
    assert [repository["repo"] for repository in hooks] == ["local"]
    assert {"make lint", "make docs"} == set(entries)
    assert all(f"\n{entry}\n" in checks for entry in entries)


def test_no_page_names_a_host_of_this_project_that_does_not_exist() -> None:
    assert "[project.urls]" not in (ROOT / "pyproject.toml").read_text()
    for file in [*PROSE, ROOT / "CITATION.cff", ROOT / ".github" / "workflows" / "ci.yml"]:
        assert not re.findall(r"https?://\S*trl-lora-sync", file.read_text())
