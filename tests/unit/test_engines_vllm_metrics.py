"""What is read from the `/metrics` page of vLLM, in the forms of several versions."""

import math

import pytest

from trl_lora_sync.engines.vllm.metrics import read_metrics

IDLE = 'vllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_waiting{engine="0"} 0.0\n'
BUSY = IDLE.replace('running{engine="0"} 0.0', 'running{engine="0"} 3.0')
HELP = "# HELP vllm:lora_requests_info Running stats on lora requests.\n"


def used(running: str, at: float, waiting: str = "") -> str:
    labels = f'max_lora="2",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
    return f"vllm:lora_requests_info{{{labels}}} {at}\n"


def cache(**labels: str) -> str:
    pairs = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"vllm:cache_config_info{{{pairs}}} 1.0\n"


@pytest.mark.parametrize(
    ("page", "is_cpu_build"),
    [
        (cache(block_size="128", user_specified_block_size="False"), True),
        (cache(block_size="16", user_specified_block_size="False"), False),
        (cache(block_size="128", user_specified_block_size="True"), None),
        (cache(block_size="16", cpu_kvcache_space_bytes="4294967296"), True),  # before 0.31
        (cache(block_size="16", cpu_kvcache_space_bytes="None"), False),
        (cache(), None),
        ("", None),
        ("<html>a gateway</html>", None),
    ],
)
def test_a_cpu_build_is_told_by_its_cache(page: str, is_cpu_build: bool | None) -> None:
    assert read_metrics(page).is_cpu_build is is_cpu_build


@pytest.mark.parametrize(
    ("page", "ran_at"),
    [
        (IDLE + HELP, 0.0),
        (BUSY + used("", 5.0) + used("a-v1", 4.0), 4.0),
        (BUSY + used("", 5.0) + used("a-v1", 6.0), math.inf),
        (BUSY + used("", 5.0) + used("", 6.0, waiting="a-v1"), math.inf),
        (IDLE + used("", 5.0) + used("a-v1", 6.0), 6.0),  # the last step of all
        (IDLE + used("a-v1", 6.0) + used("a-v2,a-v1", 7.0), 7.0),
        (IDLE + used(r"a \"quoted\" name", 6.0), 6.0),
    ],
)
def test_the_last_moment_with_an_adapter_is_found(page: str, ran_at: float) -> None:
    assert read_metrics(page).adapters_ran_at == ran_at


def test_a_page_without_the_engine_tells_nothing() -> None:
    """As with --disable-log-stats."""
    assert not read_metrics("process_cpu_seconds_total 3.0\n").is_told
    assert read_metrics(IDLE).is_told
    assert not read_metrics(IDLE).has_lora
    assert read_metrics(IDLE + HELP).has_lora


def test_each_replica_is_counted_once() -> None:
    assert read_metrics("").replicas == 0
    assert read_metrics(IDLE).replicas == 1
    assert read_metrics(IDLE + BUSY.replace('engine="0"', 'engine="1"')).replicas == 2
