"""Remove what dead runs left behind: files in a folder, and adapters on a server. Never of a live run.

A run is known to be dead if its files are not locked any more and it was started on this host since it last booted. Of
any other, such as a run on another host, nothing is touched, and its name is printed. A run without files here may be
live in another container, which has a separate folder at the same path: only `--missing` unloads its adapters.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from trl_lora_sync import runtime
from trl_lora_sync.addresses import absolute_dir, default_sync_dir, is_gone, is_local_url
from trl_lora_sync.cli.console import UsageError, out, working
from trl_lora_sync.cli.urls import check_listening, check_server_dir, check_timeout, checked_urls

if TYPE_CHECKING:
    from trl_lora_sync.engines.base import Deadline, Engine

_STOPPED = (
    "A stopped server holds no adapters. `trl-lora-sync sweep` removes the files that its runs left on this host."
)


def run(
    targets: Annotated[
        list[str] | None,
        Argument(
            metavar="DIR|URL",
            help="a lora_sync_dir, an output_dir, or a server; several of these",
            show_default="the folder in shared memory that runs of this user write to",
        ),
    ] = None,
    sync_dir: Annotated[
        Path | None,
        Option(
            "--dir",
            metavar="DIR",
            help="lora_sync_dir of the runs on the servers; without a URL, this folder is swept",
            show_default="the one used on this host",
        ),
    ] = None,
    server_dir: Annotated[str | None, Option(metavar="DIR", help="the same folder as the servers see it")] = None,
    missing: Annotated[
        bool,
        Option("--missing", help="also unload adapters from the lora_sync_dir whose run has no folder there any more"),
    ] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="only list what would be removed")] = False,
    timeout: Annotated[float, Option(metavar="S", help="seconds to wait for a server")] = 30,
) -> None:
    check_timeout(timeout)
    check_server_dir(server_dir)
    if not targets and sync_dir is not None:
        targets = [str(absolute_dir(sync_dir))]
    if (server_dir is not None or missing) and not any("://" in target for target in targets or ()):
        raise UsageError(
            f"{'--missing' if missing else '--server-dir'} is about the adapters on a server, and no server is named. "
            "Give its URL, such as http://localhost:8000."
        )
    if not targets:
        folder = default_sync_dir(True, ".")
        _show(folder, sweep_folder(folder, dry_run))
    for target in targets or ():
        if "://" in target:
            for url in checked_urls(target):
                check_listening(url, timeout, _STOPPED)
                with working(f"sweeping {url}"):
                    lines = sweep_server(url, sync_dir, server_dir, missing=missing, dry_run=dry_run, timeout_s=timeout)
                _show(url, lines)
            continue
        folder = Path(target)
        # `Path("")` is the current folder, and an empty text most often an unset variable of a shell.
        if not target or not folder.is_dir():
            raise UsageError(
                f"{target!r} is not a folder. Give the lora_sync_dir of the runs, their output_dir, or a server's URL "
                "such as http://localhost:8000."
            )
        with working(f"sweeping {folder}"):
            # The target may be an output_dir, whose runs are in a folder below it.
            lines = [*sweep_folder(folder, dry_run), *sweep_folder(default_sync_dir(False, folder), dry_run)]
        _show(folder, lines)


def _show(target: str | Path, lines: list[str]) -> None:
    for line in lines or [f"{target}: nothing was left behind."]:
        out().print(line)


def sweep_folder(
    folder: Path,
    dry_run: bool,
    unload: Callable[[str], bool] = lambda name: True,
    knows: Callable[[str], bool] = lambda url: True,
) -> list[str]:
    """Delete the files of dead runs; returns one line for each that was removed or left.

    Args:
        dry_run, unload, knows: see `sweep_leftovers`.
    """
    from trl_lora_sync.adapter.store import run_states, sweep_leftovers

    # Before the sweep, after which the folders of dead runs are gone.
    states = run_states(folder)
    dead = [run for run, state in states.items() if state == "dead"]
    lines = [_left_alone(run, state) for run, state in states.items() if state != "dead"]
    swept = sweep_leftovers(folder, unload, knows, dry_run=dry_run)
    return [
        *(f"{'would remove' if dry_run else 'removed'} {run}" for run in swept),
        *lines,
        *(_left_alone(run, "unconfirmed") for run in dead if run not in swept),
    ]


def sweep_server(
    url: str, sync_dir: Path | None, server_dir: str | None, *, missing: bool, dry_run: bool, timeout_s: float
) -> list[str]:
    """Unload the adapters of dead runs from a server, with their files; returns one line for each."""
    from trl_lora_sync.adapter.store import run_states
    from trl_lora_sync.engines.base import Deadline
    from trl_lora_sync.engines.connect import connect_engine

    def deadline(task: str) -> "Deadline":
        return Deadline.after(timeout_s, task)

    is_local = is_local_url(url)
    # As `AdapterStore` names it, since the path that the server lists is compared as text.
    root = absolute_dir(sync_dir or default_sync_dir(is_local, "."))
    seen_as = (server_dir or str(root)).rstrip("/")
    engine = runtime.run(
        connect_engine(url, engine="auto", is_local=is_local, deadline=deadline(f"Waiting for {url}"), serving="auto")
    )
    try:
        # Listed first: a live run has its folder, locked, from before its first load until after its last unload.
        loaded = runtime.run(engine.loaded(deadline("Listing adapters")))
        states = run_states(root) if root.is_dir() else {}
        lines = []
        for name, path in sorted(loaded.items()):
            run = _run_of(name)
            if run is None:
                lines.append(f"left {name}: it is not an adapter of this package")
                continue
            state = states.get(run) or ("missing" if path == f"{seen_as}/{run}/{name}" else "unknown")
            if state == "dead" or (state == "missing" and missing):
                lines.append(_unload(engine, name, deadline, dry_run=dry_run))
            else:
                lines.append(_left_alone(name, state))
        if root.is_dir():
            # Listed again, as files stay while the server still has their adapter.
            left = loaded if dry_run else runtime.run(engine.loaded(deadline("Listing adapters")))
            lines += sweep_folder(
                root,
                dry_run,
                unload=lambda name: name not in left,
                # A server that has ended holds no adapters, so nothing is left to unload there.
                knows=lambda other: other == url or is_gone(other),
            )
        return lines
    finally:
        runtime.run(engine.close())


def _unload(engine: "Engine", name: str, deadline: "Callable[[str], Deadline]", *, dry_run: bool) -> str:
    if dry_run:
        return f"would unload {name}"
    # With a new deadline each time: one unload that waits for its requests leaves the others theirs.
    done = runtime.run(engine.unload(name, deadline(f"Unloading {name}")))
    return f"unloaded {name}" if done else f"left {name}: the server did not confirm the unload"


def _run_of(adapter_name: str) -> str | None:
    from trl_lora_sync.adapter.store import RUN_PREFIX

    # From the right: a run id has hyphens, and the version of a trial is a word, such as `trial1`.
    run, _, version = adapter_name.rpartition("-v")
    return run if run.startswith(RUN_PREFIX) and version else None


def _left_alone(name: str, state: str) -> str:
    why = {
        "live": "its run goes on",
        "elsewhere": (
            "its run was started on another host, or before this one booted, or was killed before it noted that; "
            "delete it there, or by hand"
        ),
        "unconfirmed": "a server may still have its adapters; sweep the URL of each server that it used",
        "missing": (
            "its run has no folder in the lora_sync_dir here, but may have one at the same path in another container; "
            "if it is over, sweep with --missing"
        ),
        "unknown": "its run keeps its files elsewhere, or sends none; name its lora_sync_dir with --dir",
    }
    return f"left {name}: {why[state]}"
