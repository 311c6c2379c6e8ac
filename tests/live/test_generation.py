"""Live tier: every option of TRL for generation in server mode reaches the server and comes back in TRL's shape."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import randomize_adapter
from support.policies import is_policy_of, sample, token_ids
from support.servers import Proxy
from support.trainers import mean_byte, prompts, steps_of
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen3_template
from vllm_server import VLLMServer

from trl_lora_sync import GRPOTrainer
from trl_lora_sync.errors import ServerSetupError

Make = Callable[..., GRPOTrainer]
LOGP_GAP = "sampling/sampling_logp_difference/mean"

# Tools in the way of Qwen3, short enough for a context of 512 characters.
TOOL_TEMPLATE = """\
{%- for tool in tools or [] -%}{{ '<|im_start|>system\n' + tool.function.name + '<|im_end|>\n' }}{%- endfor -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""  # noqa: E501


@pytest.mark.parametrize(("logprobs", "widths"), [(None, None), (0, {1}), (20, {20, 21})])
def test_logprobs_come_back_for_no_token_for_the_sampled_one_and_for_the_most_probable(
    logprobs: int | None, widths: set[int] | None, make_trainer: Make, clean_server: VLLMServer, base_model: Path
) -> None:
    trainer = make_trainer(clean_server.base_url, base_model)
    randomize_adapter(trainer.model, seed=1)
    generation = trainer.vllm_generation
    generation.sync_weights()
    generation.logprobs = logprobs
    prompts = [token_ids(1), token_ids(1), token_ids(2)]

    prompt_ids, completion_ids, values, ids = generation.generate(prompts, None, num_generations=2)

    assert prompt_ids == prompts
    assert all(1 <= len(row) <= 16 for row in completion_ids)
    if widths is None:
        assert values is None
        assert ids is None
        return
    assert [len(row) for row in values] == [len(row) for row in ids] == [len(row) for row in completion_ids]
    # N, or N + 1 where the sampled token is not among the N most probable. N is large enough for both to be certain.
    assert {len(token) for row in values for token in row} == widths
    for row, row_ids, sampled in zip(values, ids, completion_ids, strict=True):
        for token, token_id_list, token_id in zip(row, row_ids, sampled, strict=True):
            assert token == sorted(token, reverse=True)
            assert token_id in token_id_list
    by_sampled = [
        torch.tensor([token[at.index(i)] for token, at, i in zip(row, row_ids, sampled, strict=True)])
        for row, row_ids, sampled in zip(values, ids, completion_ids, strict=True)
    ]
    assert is_policy_of(trainer.model, list(zip(prompts, completion_ids, by_sampled, strict=True)))


def test_rows_keep_their_order_however_often_prompts_repeat(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path
) -> None:
    trainer = make_trainer(clean_server.base_url, base_model)
    randomize_adapter(trainer.model, seed=1)
    trainer.vllm_generation.sync_weights()
    a, b, c = token_ids(1), token_ids(2, length=5), token_ids(3, length=20)

    rows = sample(trainer.vllm_generation, [a, a, b, a, c, c, c, b])

    assert is_policy_of(trainer.model, rows)
    others = [row[0] for row in rows[2:] + rows[:2]]
    moved = [(prompt, ids, served) for prompt, (_, ids, served) in zip(others, rows, strict=True)]
    assert not is_policy_of(trainer.model, moved), "any prompt fits any completion, so this test proves nothing"
    assert len({tuple(ids) for _, ids, _ in rows}) == len(rows)


def test_one_prompt_in_all_rows_of_a_dataset_is_sampled_in_groups_as_any_other(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    """A single group would go to one of several servers."""
    trainer = make_trainer(
        proxy.base_url, base_model, train_dataset=prompts(["hello"] * 8), per_device_train_batch_size=8, max_steps=1
    )

    trainer.train()

    assert [(request["n"], len(request["prompt"])) for request in proxy.generations()] == [(4, 1)] * 2


def test_equal_prompts_are_sampled_at_temperature_0(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path
) -> None:
    """vLLM refuses to sample one prompt twice at that."""
    trainer = make_trainer(clean_server.base_url, base_model, generation_kwargs={"temperature": 0.0})
    trainer.vllm_generation.sync_weights()

    first, second = trainer.vllm_generation.generate([token_ids(1)] * 2, None, num_generations=1)[1]

    assert first == second


def test_no_rows_at_all_are_no_completions(make_trainer: Make, clean_server: VLLMServer, base_model: Path) -> None:
    trainer = make_trainer(clean_server.base_url, base_model)
    trainer.vllm_generation.sync_weights()

    assert trainer.vllm_generation.generate([], None, num_generations=4) == ([], [], [], [])


def test_every_sampling_field_reaches_the_server(make_trainer: Make, proxy: Proxy, base_model: Path) -> None:
    chosen = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    extra = {"seed": 7, "min_tokens": 3, "presence_penalty": 0.5}
    trainer = make_trainer(
        proxy.base_url, base_model, max_steps=1, max_completion_length=9, generation_kwargs=extra, **chosen
    )

    trainer.train()

    [request] = proxy.generations()
    expected = chosen | extra | {"max_tokens": 9, "logprobs": 0, "n": 4, "stream": False}
    assert request == request | expected


def test_fields_left_at_their_defaults_are_sent_too(make_trainer: Make, proxy: Proxy, base_model: Path) -> None:
    """Otherwise the server would fill in the values of the model's generation_config.json."""
    trainer = make_trainer(proxy.base_url, base_model, max_steps=1)

    trainer.train()

    [request] = proxy.generations()
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 8}
    assert request == request | defaults | {"presence_penalty": 0.0, "frequency_penalty": 0.0, "watermarking": False}


def test_structured_outputs_follow_the_regex(make_trainer: Make, clean_server: VLLMServer, base_model: Path) -> None:
    completions_seen: list[str] = []

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        completions_seen.extend(completions)
        return mean_byte(completions)

    trainer = make_trainer(
        clean_server.base_url,
        base_model,
        reward_funcs=reward,
        max_steps=2,
        vllm_structured_outputs_regex="(yes|no|ok!)",
    )

    trainer.train()

    assert len(completions_seen) == 8
    assert all(re.fullmatch("yes|no|ok!", text) for text in completions_seen), completions_seen


def test_generation_kwargs_do_what_they_say(make_trainer: Make, clean_server: VLLMServer, base_model: Path) -> None:
    stops = list(range(0, 256, 3))
    trainer = make_trainer(
        clean_server.base_url,
        base_model,
        max_completion_length=16,
        generation_kwargs={"seed": 7, "stop_token_ids": stops, "min_tokens": 4},
    )
    trainer.vllm_generation.sync_weights()
    rows = [token_ids(1)] * 6

    first, second = (trainer.vllm_generation.generate(rows, None, num_generations=6)[1] for _ in range(2))

    assert first == second, "the seed was not used"
    assert len({tuple(ids) for ids in first}) > 1, "one seed made all completions of a prompt alike"
    assert all(len(ids) >= 4 for ids in first)
    assert any(len(ids) < 16 for ids in first)
    assert all(ids[-1] in stops for ids in first if len(ids) < 16)


def test_generation_kwargs_that_the_server_would_ignore_are_refused(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path
) -> None:
    """vLLM accepts a request with unknown fields, and does not use them; one here is known to its chat route alone."""
    ignored = {"guided_regex": "[a-z]+", "max_completion_tokens": 4, "min_token": 4}
    with pytest.raises(ServerSetupError, match=f"ignores {', '.join(ignored)} of generation_kwargs"):
        make_trainer(clean_server.base_url, base_model, generation_kwargs={"seed": 7, **ignored})


def test_a_rollout_function_generates_and_chats_with_the_active_version(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    def rollout(texts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        generation, tokenizer = trainer.vllm_generation, trainer.processing_class
        conversations = [[{"role": "user", "content": text}] for text in texts]
        rendered = [
            tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
            for conversation in conversations
        ]
        by_rows = generation.generate(rendered, None, num_generations=4)
        by_client = generation.vllm_client.generate(rendered, n=1, max_tokens=6, logprobs=0)
        by_chat = generation.vllm_client.chat(conversations, n=1, max_tokens=7, logprobs=0)
        assert by_rows[0] == by_client["prompt_ids"] == by_chat["prompt_ids"] == rendered
        assert max(map(len, by_client["completion_ids"])) <= 6 < max(map(len, by_chat["completion_ids"]))
        # A third of the rows from each way, so that training compares the log-probabilities of all of them.
        ways = [by_rows[1:3], *((way["completion_ids"], way["logprobs"]) for way in (by_client, by_chat))]
        picked = [ways[row % 3] for row in range(len(texts))]
        return {
            "prompt_ids": rendered,
            "completion_ids": [ids[row] for row, (ids, _) in enumerate(picked)],
            "logprobs": [[token[0] for token in values[row]] for row, (_, values) in enumerate(picked)],
        }

    trainer = make_trainer(proxy.base_url, base_model, trainer_kwargs={"rollout_func": rollout})

    trainer.train()

    steps = steps_of(trainer)
    assert [step["lora_sync/version"] for step in steps] == [1, 2, 3]
    assert all(step[LOGP_GAP] < 0.02 for step in steps)
    assert {body["model"].rpartition("-v")[2] for body in proxy.requests("/v1/chat/completions")} == {"1", "2", "3"}


def test_a_tool_loop_continues_only_the_rows_that_called_a_tool(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    """A regex makes the untrained model call the tool in about half of the rows; the second turn is real generation."""
    calls: list[str] = []

    def weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: where.
        """
        calls.append(city)
        return f"sun in {city}"

    tokenizer = AutoTokenizer.from_pretrained(base_model)
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.response_template = qwen3_template
    trainer = make_trainer(
        proxy.base_url,
        base_model,
        train_dataset=prompts(["Rome?", "Oslo?"] * 4, conversational=True),
        trainer_kwargs={"tools": [weather], "processing_class": tokenizer},
        max_completion_length=200,
        max_tool_calling_iterations=1,
        per_device_train_batch_size=8,
        num_generations=4,
        vllm_structured_outputs_regex=(
            r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "[A-Z][a-z]{1,6}"\}\}\n</tool_call>|=[a-z]{3,9}'
        ),
    )

    trainer.train()

    sent = [(request["model"], tokenizer.decode(prompt)) for request in proxy.generations()
            for prompt in request["prompt"] for _ in range(request["n"])]  # fmt: skip
    continued = [text for _, text in sent if "<|im_start|>tool" in text]
    assert len(sent) - len(continued) == 3 * 8
    assert 0 < len(continued) < 3 * 8, "all rows did the same, so this test proves little"
    assert Counter(text.partition("sun in ")[2].partition("<")[0] for text in continued) == Counter(calls)
    assert all(text.count("<tool_call>") == 1 and text.endswith("<|im_start|>assistant\n") for text in continued)
    steps = steps_of(trainer)
    assert [step["lora_sync/version"] for step in steps] == [1, 2, 3]
    assert sum(step["tools/call_frequency"] for step in steps) * 8 == pytest.approx(len(calls))
    assert all(step["tools/failure_frequency"] == 0 for step in steps)
