"""Where this copy of the package is from, and the commands that install the same one in another environment.

A command never names the package alone: an index that the user did not install it from may hold another project of
that name. Needs no torch.
"""

import json
import shlex
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

_PACKAGE = Path(__file__).resolve().parent
_NAME = "trl-lora-sync"


def pip_source() -> str | None:
    """What pip installs this copy from: a folder, a file, a URL or a version on an index; None if that is gone.

    Source: PEP 610, "Recording the Direct URL Origin of installed distributions".
    """
    # First, as a checkout on PYTHONPATH hides a copy that is installed as well.
    if (_PACKAGE.parent / "pyproject.toml").is_file():  # a checkout: editable, or on PYTHONPATH
        return str(_PACKAGE.parent)
    try:
        installed = metadata.distribution(_NAME)
    except metadata.PackageNotFoundError:
        return None
    # The installed copy is not this one, which was found through PYTHONPATH, for example.
    if Path(str(installed.locate_file(_PACKAGE.name))).resolve() != _PACKAGE:
        return None
    recorded = installed.read_text("direct_url.json")
    if recorded is None:  # from an index
        return f"{_NAME}=={installed.version}"
    return _from_direct_url(json.loads(recorded))


def _from_direct_url(recorded: dict[str, object]) -> str | None:
    url = str(recorded["url"])
    version_control = recorded.get("vcs_info")
    if isinstance(version_control, dict):
        # The commit and not the branch, which may have moved since.
        found = f"{version_control['vcs']}+{url}@{version_control['commit_id']}"
        folder = recorded.get("subdirectory")
        return f"{found}#subdirectory={folder}" if folder else found
    parts = urlsplit(url)
    if parts.scheme != "file":
        return url
    path = Path(url2pathname(parts.path))
    # pip records a folder or a file even if it was temporary.
    return str(path) if path.exists() else None


def install_command(python: Path | str, *, has_pip: bool = True) -> str:
    """The shell command that installs this copy in the environment of an interpreter on this host, without its needs.

    Args:
        has_pip: whether that environment has pip; an environment of uv has none.
    """
    source = pip_source()
    if source is None:
        into = shlex.join([str(python), "-c", 'import sysconfig; print(sysconfig.get_path("purelib"))'])
        return f'cp -r {shlex.quote(str(_PACKAGE))} "$({into})"'
    # Without dependencies: the plugins need none of them, and the engine pins its torch.
    pip = [str(python), "-m", "pip", "install"] if has_pip else ["uv", "pip", "install", "--python", str(python)]
    return shlex.join([*pip, "--no-deps", source])


def install_elsewhere() -> str:
    """What to do to have this copy in an environment on another host, as a part of a sentence."""
    source = pip_source()
    if source is not None and not Path(source).exists():
        command = shlex.join(["pip", "install", "--no-deps", source])
        return f"run `{command}` in the server's environment"
    # The package alone, as a checkout has more, such as environments.
    return (
        f"copy {_PACKAGE} into an empty folder of the server's host, and start the server with PYTHONPATH set to that "
        "folder"
    )
