"""The input of `doctor`, and its report."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_lora_sync.checks.finding import PROBLEM, Finding
from trl_lora_sync.errors import LoRASyncError

if TYPE_CHECKING:
    from trl_lora_sync.adapter.saved import SavedAdapter
    from trl_lora_sync.engines.base import Deadline


def model_folder(name: Any) -> Path | None:
    """The folder on this host that names a model, if the model can be loaded from it."""
    folder = Path(str(name))
    return folder if (folder / "config.json").is_file() else None


@dataclass
class Diagnosis:
    """What was found at one URL."""

    url: str
    engine: str | None = None
    version: str | None = None
    base_model: str | None = None
    findings: list[Finding] = field(default_factory=list)

    def add(self, name: str, status: str, message: str) -> None:
        self.findings.append(Finding(name, status, message))

    @property
    def is_good(self) -> bool:
        return all(finding.status != PROBLEM for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        # Scripts read this report, so `words` is not renamed with the field.
        findings = [{"name": one.name, "status": one.status, "words": one.message} for one in self.findings]
        return {**vars(self), "findings": findings}

    @contextlib.contextmanager
    def reporting(self, name: str) -> Iterator[None]:
        """Turn an error of ours into a finding."""
        try:
            yield
        # Any other error is a defect of this package, which must not pass for one of the server.
        except LoRASyncError as error:
            self.add(name, PROBLEM, str(error))


@dataclass(frozen=True, kw_only=True)
class DoctorInput:
    """What the servers are checked for.

    Attributes:
        config: a saved `adapter_config.json`, if one was given.
        adapter: folder of a saved adapter, if one was given.
        saved: the same, read; None as well if it could not be served.
        unusable: why it could not.
        base: folder of the base model on this host, if there is one to compare with.
        folder: where to write what a server shall read, if it was given.
        server_folder: the same folder as the servers see it, if that differs.
        timeout_s: for each server to answer, and for each of the checks.
        peft_config: where `config` was read, if one was given.
    """

    config: dict[str, Any] | None
    adapter: Path | None
    saved: "SavedAdapter | None"
    unusable: str | None
    base: Path | None
    folder: Path | None
    server_folder: str | None
    timeout_s: float
    peft_config: Path | None = None

    def deadline(self, task: str) -> "Deadline":
        from trl_lora_sync.engines.base import Deadline

        return Deadline.after(self.timeout_s, task)
