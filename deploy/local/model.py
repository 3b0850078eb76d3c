"""Make the small model the local pair serves. Runs with the engine environment's Python.

Weights are random but seeded, so the model says nothing sensible and always the same: greedy
decoding of it is a strict equality test for everything that moves KV cache around.

Three things are not left to chance:

- It only says whole English-looking words, each with its leading space. Such text tokenises
  back to the ids it was generated from, so a conversation whose history comes back as text can
  reuse all that decode holds, as is usual with trained models. A test that wants the other case
  forces single letters with `logit_bias`.
- Its attention is sharp, so that wrong KV cache shows in the next tokens (`_make_attentive`).
- The end of a turn is among the words, so both finish reasons occur: about once in a few hundred
  tokens the model stops by itself.
"""

from __future__ import annotations

import json
import re
import sys
import sysconfig
from pathlib import Path

import torch  # type: ignore[import-not-found,unused-ignore]
from tokenizers import (  # type: ignore[import-not-found,unused-ignore]
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)
from transformers import (  # type: ignore[import-not-found,unused-ignore]
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SEED = 20240229
VOCABULARY = 4096
CONTEXT = 32_768
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Ordinary text to a client, one token each to the parsers of reasoning and tool calls.
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
# A word as the byte-level alphabet spells it: Ġ is a space.
SPEAKABLE = re.compile("Ġ[a-z]+")
CORPUS_BYTES = 6_000_000


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `VOCABULARY` entries, trained on the standard library."""
    special = [END_OF_TEXT, TURN_START, TURN_END]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKS),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE.read_text(encoding="utf-8"),
    )


def _corpus() -> list[str]:
    texts: list[str] = []
    left = CORPUS_BYTES
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        texts.append(text)
        left -= len(text)
        if left < 0:
            break
    return texts


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 of about five million random parameters that speaks only `SPEAKABLE` tokens."""
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        initializer_range=0.08,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="bfloat16",
    )
    model = Qwen3ForCausalLM(config)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    speakable = torch.zeros(VOCABULARY, dtype=torch.bool)
    speakable[[i for token, i in vocabulary.items() if SPEAKABLE.fullmatch(token)]] = True
    speakable[tokenizer.eos_token_id] = True
    with torch.no_grad():
        _make_attentive(model)
        _keep_quiet(model, ~speakable)
    return model.to(torch.bfloat16)


def _make_attentive(model: Qwen3ForCausalLM) -> None:
    """Make every token of the context matter to the next one.

    With weights as they are drawn, attention is close to a mean over the context: a hundred wrong
    tokens among a thousand left the next sixty as they were in 7 of 12 tries, and an equality
    test would miss wrong KV cache. With sharper attention it shows within five tokens.
    """
    model.model.embed_tokens.weight *= 2.0
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight *= 3.0


def _keep_quiet(model: Qwen3ForCausalLM, silent: torch.Tensor) -> None:
    """Make the `silent` tokens all but impossible.

    Qwen3's head has no bias. One is made of the hidden state's first component: the same for
    every token, written by no layer, and read by the head with a large negative weight.
    """
    model.model.embed_tokens.weight[:, 0] = 1.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    model.lm_head.weight[:, 0] = 0.0
    model.lm_head.weight[silent, 0] = -200.0


def main(directory: Path) -> None:
    """Write tokenizer, configuration and weights to `directory`."""
    tokenizer = train_tokenizer()
    if len(tokenizer) != VOCABULARY:
        raise SystemExit(f"the tokenizer came out with {len(tokenizer)} entries, not {VOCABULARY}")
    tokenizer.save_pretrained(directory)
    make_model(tokenizer).save_pretrained(directory)
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    generation = {"eos_token_id": ends, "pad_token_id": tokenizer.pad_token_id}
    (directory / "generation_config.json").write_text(json.dumps(generation) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
