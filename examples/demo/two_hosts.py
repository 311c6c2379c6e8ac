"""Two hosts on one machine, joined by a cable: network and mount namespaces of Linux, with nothing shared to write in.

    python examples/demo/two_hosts.py SCRIPT ARGUMENTS...

runs a script on the first host, where `OtherHost` makes the second one. Either host sees the machine's files, but can
write only into `/dev/shm` and one private folder, which are its own. Nothing of the machine's own network is touched,
and everything goes with the processes. Needs root, or a kernel where every user may create user namespaces.

This file needs nothing outside the standard library.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

HERE_ADDRESS, THERE_ADDRESS = "10.77.0.1", "10.77.0.2"
PRIVATE_VARIABLE = "TWO_HOSTS_PRIVATE_FOLDER"
_LINKS = ("two-hosts-a", "two-hosts-b")
_NAMESPACES = ("--net", "--mount", "--ipc")
# Folders that programs write to by default; torch compiles kernels even for an eager vLLM.
_WRITTEN_TO = ("TMPDIR", "HOME", "XDG_CACHE_HOME", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT")
_SYSTEM_MOUNTS = ("/proc", "/sys", "/dev")


class NotPermittedError(RuntimeError):
    """This process may not make namespaces."""


def first_host(folder: Path, script: str | Path, *arguments: str) -> list[str]:
    """The command that runs a script on its own host.

    Args:
        folder: empty; on either host, a private folder is in its place.

    Raises:
        NotPermittedError: with the system's own reason.
    """
    return [*_unshare(), sys.executable, __file__, "--enter", str(folder), sys.executable, str(script), *arguments]


class OtherHost:
    """The second host, from within the first; there while the block lasts.

    Attributes:
        wrapper: put in front of a command, it runs the command over there.
    """

    def __enter__(self) -> "OtherHost":
        # It lives as long as its input is open, which ends with this process in any case.
        self._process = subprocess.Popen(
            ["unshare", *_NAMESPACES, sys.executable, __file__, "--enter", os.environ[PRIVATE_VARIABLE], "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"ready\n")
        self._process.stdin.flush()
        if self._process.stdout.readline() != b"ready\n":
            raise NotPermittedError("The second host did not come up; see the output above.")
        pid = str(self._process.pid)
        self.wrapper = ["nsenter", "--target", pid, *_NAMESPACES]
        here, there = _LINKS
        _run("ip", "link", "add", "dev", here, "type", "veth", "peer", "name", there, "netns", pid)
        _run("ip", "address", "add", f"{HERE_ADDRESS}/24", "dev", here)
        _run("ip", "link", "set", here, "up")
        _run(*self.wrapper, "ip", "address", "add", f"{THERE_ADDRESS}/24", "dev", there)
        _run(*self.wrapper, "ip", "link", "set", there, "up")
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def run(self, *command: str | Path) -> str:
        """Run a command over there and return what it printed."""
        return _run(*self.wrapper, *command)

    def limit(self, rate: str) -> None:
        """Let the cable carry no more than `rate`, such as `1gbit`, in the direction of the other host."""
        _run("tc", "qdisc", "replace", "dev", _LINKS[0], "root", "tbf", "rate", rate, "burst", "8m", "latency", "50ms")


def _unshare() -> list[str]:
    """The command for new namespaces that works here: as a user who is root in them alone, or as root."""
    words = ""
    for command in (["unshare", "--user", "--map-root-user", *_NAMESPACES], ["unshare", *_NAMESPACES]):
        try:
            tried = subprocess.run(
                [*command, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True, text=True
            )
        except OSError as error:
            raise NotPermittedError(f"There is no {command[0]} here: {error}") from error
        if tried.returncode == 0:
            return command
        words = tried.stderr.strip()
    raise NotPermittedError(f"Namespaces are not permitted here: {words}")


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command} failed: {done.stderr.strip()}")
    return done.stdout


def enter(folder: str, command: Sequence[str]) -> None:
    """Become a host: in fresh namespaces, make everything read-only but what is private, and run `command`."""
    _run("mount", "--make-rprivate", "/")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        target = line.split()[4].replace("\\040", " ")
        if not any(target == system or target.startswith(f"{system}/") for system in _SYSTEM_MOUNTS):
            _run("mount", "-o", "remount,bind,ro", target)
    for private in (folder, "/dev/shm"):
        _run("mount", "-t", "tmpfs", "tmpfs", private)
    _run("ip", "link", "set", "lo", "up")
    homes = dict.fromkeys((*_WRITTEN_TO, PRIVATE_VARIABLE), folder)
    os.execvpe(command[0], command, {**os.environ, **homes, "PYTHONDONTWRITEBYTECODE": "1"})


def main() -> None:
    if sys.argv[1:2] == ["--enter"]:
        enter(sys.argv[2], sys.argv[3:])
    try:
        with tempfile.TemporaryDirectory(prefix="two-hosts-") as folder:
            sys.exit(subprocess.call(first_host(Path(folder), *sys.argv[1:])))
    except NotPermittedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
