"""How the package is built and how it reads, in figures: python tools/structure.py [--out FILE].

Counts are taken from the sources. A sync and a generation run against in-memory servers of the tests: the sync is
traced for the files and frames that it runs through, the generation for the threads that it needs. `BEFORE` has the
figures of the package before its core was put on one event loop.
"""

import argparse
import ast
import asyncio
import io
import json
import re
import sys
import tempfile
import threading
import time
import tokenize
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "trl_lora_sync"
BEFORE = ROOT / "tools" / "structure-before.json"
TESTING = PACKAGE / "testing"  # the servers of a traced run, and in no run of a user
SERVERS, REQUESTS = 4, 256
TOKEN_DELAY_S = 0.05
# Words that a plain sentence about software does without.
MARKERS = (
    r"somebody|nobody|anybody|everybody|whoever|whichever|anew|afresh|of (?:its|their) own|as it is|as ever|"
    r"(?<!there )(?:is|are) no(?! longer)|sa(?:ys|id|y) so|said|told|asked|dies?|died|forgets?|forgot(?:ten)?|"
    r"takes? back|took back|taken back|looks? whether|those that|one that|those of|without a word"
)
# In pages these are words about people; in the program's texts they are human verbs for software.
MARKERS_OF_SOURCE = rf"{MARKERS}|says?|tells?|asks?"


def plain(text: str) -> str:
    """The text of a page without its code, links and quoted messages."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->|`[^`]*`", " ", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\]\([^)]*\)", " ", text)


def sentences(text: str) -> list[list[str]]:
    """The words of each sentence, where an item of a list is a sentence too."""
    prose = re.sub(r"^\|.*$|^#.*$", " ", plain(text), flags=re.MULTILINE)
    parts = re.split(r"(?<=[.:!?])\s|\n\s*\n|^\s*[-*] ", prose, flags=re.MULTILINE)
    return [words for part in parts if len(words := re.findall(r"[\w'-]+", part)) > 2]


def texts_of(source: str) -> Iterator[str]:
    """Comments and strings of Python source, but names; lines that belong together as one text, without values."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not node.value.isidentifier():
            yield node.value
    block, end = "", 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] > end + 1:
                yield block
                block = ""
            block, end = f"{block} {token.string.lstrip('# ')}", token.start[0]
    yield block


def marker_words(source: str) -> list[str]:
    """The marker words in the strings and comments of Python source, each with the words around it."""
    texts = [" ".join(plain(text).split()) for text in texts_of(source)]
    pattern = rf".{{0,60}}\b(?:{MARKERS_OF_SOURCE})\b.{{0,40}}"
    return [found for text in texts for found in re.findall(pattern, text, re.IGNORECASE)]


def lines_of_code(source: str) -> int:
    """The lines of Python source without comments, docstrings and blank lines."""
    marks = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in marks]
    # Docstrings of attributes as well: any text that is a statement.
    texts = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    texts = [node for node in texts if isinstance(node.value, ast.Constant)]
    code = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(code - {line for node in texts for line in range(node.lineno, (node.end_lineno or 0) + 1)})


def counts(sources: Sequence[str]) -> dict[str, float]:
    """Lines, functions, callbacks, comments and marker words of Python sources."""
    lines = sum(source.count("\n") for source in sources)
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    # A value that is called elsewhere: a lambda, or a parameter or field that is annotated as callable.
    annotated = [node.annotation for node in nodes if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation]
    callbacks = sum(isinstance(node, ast.Lambda) for node in nodes)
    callbacks += sum("Callable" in ast.unparse(annotation) for annotation in annotated)
    comments = [
        token
        for source in sources
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    return {
        "files": len(sources),
        "lines": lines,
        "lines_of_code": sum(map(lines_of_code, sources)),
        "functions_per_1000_lines": round(1000 * len(functions) / lines, 1),
        "callbacks_per_1000_lines": round(1000 * callbacks / lines, 1),
        "comments_percent_of_lines": round(100 * len(comments) / lines, 1),
        "marker_words": sum(len(marker_words(source)) for source in sources),
    }


def readme_figures(text: str) -> dict[str, float]:
    lengths = [len(words) for words in sentences(text)]
    return {"bytes": len(text.encode()), "words_per_sentence": round(sum(lengths) / len(lengths), 1)}


def is_of_package(file: str) -> bool:
    return file.startswith(str(PACKAGE)) and not file.startswith(str(TESTING))


def package_frames(frame: FrameType | None) -> int:
    """How many frames of the package are on the stack that ends in `frame`."""
    count = 0
    while frame is not None:
        count += is_of_package(frame.f_code.co_filename)
        frame = frame.f_back
    return count


class Tracing:
    """Watches the package while it runs, in this thread and in those started since `with Tracing().installed():`.

    Attributes:
        files: the files of the package in which a function was called while recording.
        frames: the most frames of the package between the recorded call and httpx, over all tasks on the way.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.frames = 0
        self._records = False
        # Package frames on the stacks that led to a task, first as a coroutine and then as what runs on the loop.
        self._above: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    @contextmanager
    def installed(self) -> Iterator["Tracing"]:
        from trl_lora_sync import runtime

        begin, create = runtime.Task.__init__, asyncio.BaseEventLoop.create_task

        def begun(task: runtime.Task[Any], coroutine: Coroutine[Any, Any, Any]) -> None:
            self._above[coroutine] = package_frames(sys._getframe(1))
            begin(task, coroutine)

        def created(loop: asyncio.BaseEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
            task = create(loop, coroutine, **options)
            self._above[task] = self._above.get(coroutine) or self._frames_to(sys._getframe(1))
            return task

        runtime.Task.__init__ = begun  # type: ignore[method-assign]
        asyncio.BaseEventLoop.create_task = created  # type: ignore[method-assign,assignment]
        threading.setprofile(self._on_call)
        sys.setprofile(self._on_call)
        try:
            yield self
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
            runtime.Task.__init__ = begin  # type: ignore[method-assign]
            asyncio.BaseEventLoop.create_task = create  # type: ignore[method-assign]

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._records = True
        yield
        self._records = False

    def _frames_to(self, frame: FrameType) -> int:
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no loop runs in this thread
            task = None
        return package_frames(frame) + (self._above.get(task, 0) if task is not None else 0)

    def _on_call(self, frame: FrameType, event: str, _argument: Any) -> None:
        if not self._records or event != "call":
            return
        file = frame.f_code.co_filename
        if is_of_package(file):
            self.files.add(str(Path(file).relative_to(PACKAGE)))
        elif file.endswith("httpx/_client.py") and frame.f_code.co_name == "send":
            self.frames = max(self.frames, self._frames_to(frame))


def trace_sync() -> dict[str, int]:
    """One sync to one server, after a first sync has opened the connections."""
    with Tracing().installed() as trace, fleet_run(1) as run:
        run.publish()
        with trace.recording():
            run.publish()
    return {"files": len(trace.files), "frames_to_httpx": trace.frames}


def threads_of_generation() -> int:
    """The most threads of the package while `REQUESTS` prompts are sampled on `SERVERS` servers."""
    from trl_lora_sync.engines.base import PromptGroup

    with fleet_run(SERVERS) as run, ThreadPoolExecutor(1) as caller:
        run.publish()
        for fake in run.fakes:
            fake.token_delay_s = TOKEN_DELAY_S
        prompts = [[10, 20, 30 + number % 200, number // 200] for number in range(REQUESTS)]
        generation = caller.submit(run.generate, [PromptGroup(prompt=prompt, count=1) for prompt in prompts])
        most = 0
        while not generation.done():
            most = max(most, sum(thread.name.startswith("lora-sync") for thread in threading.enumerate()))
            time.sleep(TOKEN_DELAY_S / 10)
        generation.result()
    return most


@contextmanager
def fleet_run(servers: int) -> Iterator[Any]:
    """A sync with servers of the tests, started."""
    from contract.served import SMALL
    from unit.fleets import FleetRun, settings_for

    from trl_lora_sync.sync import AdapterSync
    from trl_lora_sync.testing import FakeSGLang

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fakes = [stack.enter_context(FakeSGLang(shapes=SMALL)) for _ in range(servers)]
        run = FleetRun(AdapterSync(settings_for(fakes, folder / "sync")), fakes)
        stack.callback(run.sync.close)
        run.start()
        yield run


def measure() -> dict[str, Any]:
    return {
        "package": counts([file.read_text() for file in sorted(PACKAGE.rglob("*.py")) if is_of_package(str(file))]),
        "testing": counts([file.read_text() for file in sorted(TESTING.rglob("*.py"))]),
        "readme": readme_figures((ROOT / "README.md").read_text()),
        "one_sync_to_one_server": trace_sync(),
        f"threads_of_ours_with_{REQUESTS}_requests_to_{SERVERS}_servers": threads_of_generation(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    figures = json.dumps({"before": json.loads(BEFORE.read_text()), "now": measure()}, indent=2)
    print(figures)
    if args.out:
        args.out.write_text(figures + "\n")


if __name__ == "__main__":
    main()
