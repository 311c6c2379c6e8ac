"""GRPO with TRL's own command line; two things differ from a script that uses TRL alone: the import below and dropout.

    accelerate launch examples/grpo.py \
        --model_name_or_path MODEL --output_dir out --use_peft --lora_r 16 \
        --use_vllm --vllm_mode server --vllm_server_base_url http://localhost:8000 \
        --vllm_sync_strategy lora_adapter

With ``--vllm_sync_strategy weights``, or without the flag, syncs are TRL's own. A dataset needs a ``prompt`` column;
without ``--dataset_name`` a few prompts made here are used. Replace ``lowercase_reward`` by what you want to teach.
"""

from typing import Any

from datasets import Dataset, load_dataset
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from trl_lora_sync import GRPOConfig, GRPOTrainer  # instead of: from trl import GRPOConfig, GRPOTrainer


def lowercase_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return the share of lower-case letters a-z among the characters of each completion."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [sum("a" <= character <= "z" for character in text) / max(len(text), 1) for text in texts]


def builtin_prompts() -> Dataset:
    subjects = ["the sea", "a small town", "winter", "bread", "an old clock", "the night train", "a garden", "rain"]
    requests = ["Write a line about", "Describe", "Tell me about", "Name something like"]
    texts = [f"{request} {subject}." for request in requests for subject in subjects]
    return Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in texts])


def main(script_args: ScriptArguments, training_args: GRPOConfig, model_args: ModelConfig) -> None:
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    if script_args.dataset_name:
        dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
        train_dataset = dataset[script_args.dataset_train_split]
    else:
        train_dataset = builtin_prompts()

    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=lowercase_reward,
        args=training_args,
        train_dataset=train_dataset,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    trainer.save_state()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    # TRL's 0.05 drops a part of the adapter's input in the trainer, and the server never drops any: their
    # log-probabilities would differ at every token.
    parser.set_defaults(lora_dropout=0.0)
    main(*parser.parse_args_and_config())
