"""Notices a limit of time between the trainer and a server, such as that of a gateway, by what it cuts off.

A server that is lost is waited for, and what it was sampling is sampled again. Behind such a limit that would go on
until all completions are short enough: the policy would seem to prefer short ones.
"""

import logging
import math

from trl_lora_sync.errors import GenerationError, LoRASyncError, ServerUnreachableError

logger = logging.getLogger(__name__)

# Apart from each other, two broken connections may well have been waited on for the same time by accident.
_REMEMBERED_S = 3600.0
# A limit is kept to within milliseconds, and a busy trainer measures it less well than that.
_SAME_S, _SAME_SHARE = 0.5, 0.01


class CutOffs:
    """Requests to one server that ended without its answer, although it goes on.

    Args:
        shortest_s: see `Timeouts.cut_off_s`.
    """

    def __init__(self, base_url: str, shortest_s: float) -> None:
        self._base_url = base_url
        self._shortest_s = shortest_s
        self._last_at, self._last_waited_s = -math.inf, 0.0
        self._verdict: GenerationError | None = None

    def note(self, error: LoRASyncError | None, at: float) -> None:
        """A request ended in `error` at a time of the monotonic clock, and the process has been found well.

        Raises:
            GenerationError: a request before it was cut off after the same time.
        """
        # To every caller from then on: of several threads that sample, one would get it otherwise.
        if self._verdict is not None and at - self._last_at < _REMEMBERED_S:
            raise self._verdict
        waited_s = error.waited_s if isinstance(error, ServerUnreachableError) else None
        if waited_s is None or waited_s < self._shortest_s:
            return
        # From the start of the request, as a limit may itself be longer than `_REMEMBERED_S`.
        since_last_s = at - waited_s - self._last_at
        # Requests that were under way together also end together, whatever the reason is.
        if since_last_s < 0:
            return
        is_same = abs(waited_s - self._last_waited_s) <= max(_SAME_S, _SAME_SHARE * waited_s)
        self._last_at, self._last_waited_s = at, waited_s
        if is_same and since_last_s < _REMEMBERED_S:
            self._verdict = GenerationError(
                f"Requests to {self._base_url} are cut off after {waited_s:.0f} s, and its server is well. Longer "
                "completions would never come, and only short ones would be trained on. A gateway or a load balancer "
                "in between has such a limit (nginx: proxy_read_timeout, an AWS load balancer: idle timeout). Raise it "
                "above lora_sync_generation_timeout, or set vllm_server_base_url to the server's own URL."
            )
            raise self._verdict from error
        logger.warning(
            "A request to %s was cut off after %.0f s, and its server is well. What it had sampled is lost, and is "
            "sampled again. If a second one is cut off after the same time, the run ends: a gateway in between then "
            "ends all long completions.",
            self._base_url,
            waited_s,
        )
