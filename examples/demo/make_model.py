"""A tiny Qwen3 with random weights, made on the spot, so that the demo and the tests need no model hub.

The tokenizer is byte-level with one token per byte: every token is one character of text, which makes a reward on
characters a reward on tokens. The same arguments always give the same files.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)

SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    # Qwen3's own 0.02 leaves so small a model's logits too flat for a LoRA adapter to prefer any token clearly.
    "initializer_range": 0.05,
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 256 byte tokens and the special tokens of Qwen3's chat format."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # A BPE without merges: each byte stays a separate token.
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(out_dir: str | Path, *, seed: int = 0, **shape: Any) -> Path:
    """Write a random-weight bfloat16 Qwen3 and its tokenizer to ``out_dir`` and return that folder.

    Args:
        out_dir: created if missing; files of an earlier model in it are overwritten.
        seed: of the random weights; the caller's own random state is left as it was.
        shape: fields of ``transformers.Qwen3Config`` that override ``SHAPE``.
    """
    out_dir = Path(out_dir)
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        **{"vocab_size": len(tokenizer), **SHAPE, **shape},
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    return out_dir


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    for name, default in SHAPE.items():
        if isinstance(default, bool):
            action = argparse.BooleanOptionalAction
            parser.add_argument(f"--{name.replace('_', '-')}", action=action, default=default)
        else:
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = vars(parser.parse_args())
    out_dir = make_model(args.pop("out_dir"), **args)
    print(out_dir)


if __name__ == "__main__":
    main()
