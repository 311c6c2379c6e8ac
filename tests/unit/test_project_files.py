"""Unit tier: the README and the other files of the project's root describe the project briefly, and agree."""

import ast
import re
from collections.abc import Iterable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import docs_hooks
import page
import pytest
import yaml
from structure import MARKERS, counts, marker_words, plain, sentences, texts_of
from versus import table

from trl_lora_sync.engines.registry import ENGINES
from trl_lora_sync.versions import PEFT, TRL

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = sorted((ROOT / "docs").glob("*.md"))
PROSE = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")] + PAGES
# Of [project] the plain values; tomllib comes with Python 3.11 only.
_METADATA = (ROOT / "pyproject.toml").read_text().partition("[project]\n")[2].partition("\n[")[0]
PROJECT = dict(re.findall(r'^([\w-]+) = "(.*)"$', _METADATA, re.MULTILINE))
SOURCES = sorted(docs_hooks.PACKAGE.rglob("*.py"))
FOLDERS = ("trl_lora_sync", "benchmarks", "examples", "tests", "tools")
# Texts that keep their marker words: prompts, a tool's description, a fault in committed results, examples of this
# file, and the pattern.
KEPT = re.compile(
    r"Say what you see|Tell me about|Tell the weather|ask twice|It tells|pass  # dies|"
    r"^MARKERS\w* = (?:\(.*?^\)|r[^\n]*$)",
    re.MULTILINE | re.DOTALL,
)
ENGINE_VERSIONS = [spec.versions for spec in ENGINES.values()]
# Private names of TRL, vLLM and Transformers, which the package overrides or reads, and tests too.
NAMES_OF_OTHERS = {
    "_apply_adapters", "_attn_implementation", "_heartbeat", "_init_vllm", "_lora_model_cls", "_sync_weight",
    "_tool_call_loop",
}  # fmt: skip


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


def test_texts_of_the_source_are_put_together() -> None:
    source = (
        "# one\n# two\nvalue = 3\n"
        "def name():\n"
        '    """Four `name` and\n    five."""\n'
        '    raise E(f"six {name} " "seven.", key["name"])  # eight\n'
    )
    texts = {" ".join(plain(text).split()) for text in texts_of(source)}
    assert texts >= {"one two", "Four and five.", "six … seven.", "eight"}
    assert "name" not in " ".join(texts)


def test_structure_is_counted() -> None:
    found = counts(
        [
            "# A comment.\ndef act(on: Callable[[], None], size: int) -> None:\n    run(lambda: on())\n\n",
            '"""It tells."""\nasync def wait() -> None:\n    pass  # dies\n\nWAIT: Callable = wait\nLATER = wait\n',
        ]
    )
    assert found == {
        "files": 2,
        "lines": 10,
        "lines_of_code": 6,
        "functions_per_1000_lines": 200.0,
        "callbacks_per_1000_lines": 300.0,
        "comments_percent_of_lines": 20.0,
        "marker_words": 2,
    }


@pytest.mark.parametrize("folder", FOLDERS)
def test_messages_docstrings_and_comments_are_plain(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    found = {str(file.relative_to(ROOT)): marker_words(KEPT.sub("", file.read_text())) for file in files}
    assert found
    assert {file: words for file, words in found.items() if words} == {}


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
    for known in (*ENGINE_VERSIONS, TRL, PEFT):
        assert f"| {known.title} {known.oldest} to {known.newest} |" in README
    for known in ENGINE_VERSIONS:
        [row] = re.findall(rf"^\| {known.title} .*$", README, re.MULTILINE)
        assert all(version in row for version in known.run)
    changelog = " ".join((ROOT / "CHANGELOG.md").read_text().split())
    [run] = re.findall(r"Run on vLLM (.*); the others are known from their source", changelog)
    assert all(version in run for known in ENGINE_VERSIONS for version in known.run)


def test_documentation_names_the_oldest_python_of_the_metadata() -> None:
    oldest = PROJECT["requires-python"].removeprefix(">=")
    for file in (README, (ROOT / "docs" / "index.md").read_text(), (ROOT / "CONTRIBUTING.md").read_text()):
        assert f"Python {oldest} " in file


def test_changelog_is_about_this_version_and_has_the_figures_of_the_results() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## \[(.*?)\]", changelog, re.MULTILINE) == [PROJECT["version"]]
    ratios = {}
    for arm, name in page.NEWEST.items():
        ratios |= {limit.what: limit.found for limit in table.limits(page.read(name)) if arm in limit.what}
    words = " ".join(changelog.split())
    assert (
        f"takes {ratios['8b r=32 sync, runtime']:.2f} of the time of TRL's own, and "
        f"{ratios['8b r=32 sync, fused']:.2f} with fused serving" in words
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
    made = {word for line in checks.splitlines() if line.startswith("make ") for word in line.split()}
    assert all(entry.removeprefix("make ") in made for entry in entries)


def test_no_page_names_a_host_of_this_project_that_does_not_exist() -> None:
    assert "[project.urls]" not in (ROOT / "pyproject.toml").read_text()
    for file in [*PROSE, ROOT / "CITATION.cff", ROOT / ".github" / "workflows" / "ci.yml"]:
        assert not re.findall(r"https?://\S*trl-lora-sync", file.read_text())


def names_in(tree: ast.AST) -> set[str]:
    """Private names that a file defines, as functions, classes, variables or attributes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return {name for name in found if re.match(r"_[A-Za-z]", name)}


def uses_in(tree: ast.AST, private: set[str]) -> list[str]:
    """Where a test uses one of these names of another object: as an attribute, by its text, or in an import."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            is_own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
            is_own |= isinstance(owner, ast.Call) and getattr(owner.func, "id", "") == "super"
            found += [] if is_own else [node.attr]
        elif isinstance(node, ast.Call) and re.search("attr$|replaced$", ast.unparse(node.func)):
            texts = [argument.value for argument in node.args[:2] if isinstance(argument, ast.Constant)]
            found += [str(text).rpartition(".")[2] for text in texts]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trl_lora_sync"):
            found += [alias.name for alias in node.names]
    return [name for name in found if name in private]


def test_uses_of_private_names_are_found() -> None:
    source = "class A:\n    def _act(self):\n        self._at = _then = 1\n"
    assert names_in(ast.parse(source)) == {"_act", "_at", "_then"}
    test = "one._act()\nself._act()\nsuper()._act()\npatch.setattr(one, '_at', 1)\ngetattr(a.b, 'c._at')\none._other\n"
    assert sorted(uses_in(ast.parse(test), {"_act", "_at"})) == ["_act", "_at", "_at"]
    assert uses_in(ast.parse("from trl_lora_sync.a import _act, run\n"), {"_act"}) == ["_act"]


def test_tests_use_public_names() -> None:
    private = {name for file in SOURCES for name in names_in(ast.parse(file.read_text()))} - NAMES_OF_OTHERS
    uses = {
        file.relative_to(ROOT / "tests").as_posix(): uses_in(ast.parse(file.read_text()), private)
        for file in sorted((ROOT / "tests").rglob("*.py"))
    }
    assert {file: found for file, found in uses.items() if found} == {}


def rooms_imported(sources: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """For each folder or file at the top of the package, which others are imported when it is imported.

    Args:
        sources: the folder or file, and one source of it.
    """
    found: dict[str, set[str]] = {}
    for room, source in sources:
        # Not what is imported for types or within functions.
        for node in ast.parse(source).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "trl_lora_sync":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found.setdefault(room, set()).update(name.split(".")[1] for name in names)
    return {room: others - {room} for room, others in found.items()}


def test_imports_between_folders_point_one_way() -> None:
    package = docs_hooks.PACKAGE
    sources = [(file.relative_to(package).with_suffix("").parts[0], file.read_text()) for file in SOURCES]
    TopologicalSorter(rooms_imported(sources)).prepare()

    there, back = "from trl_lora_sync.b.one import two\n", "from trl_lora_sync import a\n"
    TopologicalSorter(rooms_imported([("a", there), ("b", f"if TYPE_CHECKING:\n    {back}")])).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter(rooms_imported([("a", there), ("b", back)])).prepare()
