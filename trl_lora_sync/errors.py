"""Every error this package raises on purpose.

    LoRASyncError
    ├── UnsupportedTRLError      (ImportError)       the installed TRL differs from those we were read on
    ├── UnsupportedPEFTError     (ImportError)       the installed PEFT differs from those we were read on
    ├── UnsupportedSettingError  (ValueError)        a trainer setting that adapter sync cannot honour
    │   └── UnsupportedAdapterError                  a PEFT feature that no server could serve exactly
    ├── AdapterNotFiniteError    (ArithmeticError)   the adapter holds NaN or infinity
    ├── AdapterExportError       (OSError)           the adapter could not be written
    ├── DeadlineExceededError    (TimeoutError)      a sync or a request did not finish in time
    ├── RemoteProcessError       (RuntimeError)      another training process failed in a way that does not pickle
    ├── VerificationError        (RuntimeError)      a server does not compute what the trainer's adapter computes
    └── ServerError              (RuntimeError)      a server's answer or behaviour
        ├── ServerUnreachableError (ConnectionError) no answer from the URL
        ├── ServerAuthError      (PermissionError)   the server wants another API key
        ├── ServerSetupError                         the server runs, but was started with the wrong flags or model
        ├── AdapterRejectedError                     the server refused to load an adapter
        │   ├── AdapterNotVisibleError               ... because it does not see the directory
        │   └── AdapterLayersError                   ... because it has no LoRA for some of its layers
        ├── AdapterLostError                         the server no longer knows the version it was given
        ├── GenerationError                          a generation request failed or came back malformed
        └── WrongPolicyError                         a completion was not sampled by the active version

A message names what was wrong, what was expected and what to do, and quotes the server's own words last.
Errors travel between processes, so every one of them is built from a single message and pickles.
"""


class LoRASyncError(Exception):
    """Root of all errors of this package."""


class UnsupportedTRLError(LoRASyncError, ImportError):
    """The installed TRL has something that this package builds on in another form."""


class UnsupportedPEFTError(LoRASyncError, ImportError):
    """The installed PEFT has something that this package builds on in another form."""


class UnsupportedSettingError(LoRASyncError, ValueError):
    """A trainer setting contradicts `vllm_sync_strategy="lora_adapter"`."""


class UnsupportedAdapterError(UnsupportedSettingError):
    """The PEFT configuration or model uses a feature that a server could not serve exactly."""


class AdapterNotFiniteError(LoRASyncError, ArithmeticError):
    """The adapter holds NaN or infinity and was not published; a server would spread it to other requests."""


# This one and three below are also `OSError`, which keeps a single argument as the message and would read two as a
# number and a text. `except OSError` around the use of files catches them too.
class AdapterExportError(LoRASyncError, OSError):
    """The adapter could not be written; nothing half-written is left behind."""


class DeadlineExceededError(LoRASyncError, TimeoutError):
    """A sync or a request did not finish in the time it was given."""


class RemoteProcessError(LoRASyncError, RuntimeError):
    """Another training process failed with an exception that does not pickle."""


class VerificationError(LoRASyncError, RuntimeError):
    """A server that accepted an adapter computes something else with it; the previous version stays active."""


class ServerError(LoRASyncError, RuntimeError):
    """A server answered with an error, or not at all."""


class ServerUnreachableError(ServerError, ConnectionError):
    """No server answers at the URL.

    Attributes:
        waited_s: how long an answer had been waited for; None if the server was not reached.
    """

    waited_s: float | None = None


class ServerAuthError(ServerError, PermissionError):
    """The server refused the API key."""


class ServerSetupError(ServerError):
    """The server was started in a way that adapter sync cannot work with."""


class AdapterRejectedError(ServerError):
    """The server refused an adapter; the previous version stays active.

    Attributes:
        may_be_crash: whether a server answers so to every load once its engine has crashed.
    """

    may_be_crash = False


class AdapterNotVisibleError(AdapterRejectedError):
    """The server does not see the directory that the trainer wrote."""


class AdapterLayersError(AdapterRejectedError):
    """The server has no LoRA for some of the adapted layers, or knows them by other names."""


class AdapterLostError(ServerError):
    """The server no longer knows an adapter version that it had accepted."""


class GenerationError(ServerError):
    """A generation request failed, or its response cannot be trained on."""


class WrongPolicyError(ServerError):
    """A completion came from another model than the active adapter version."""
