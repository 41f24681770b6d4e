"""A tokenizer whose vocabulary is the bytes, with ChatML templates."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + OPENING
)


def bytes_tokenizer(
    template: str | None, merges: list[tuple[str, str]] | None = None
) -> PreTrainedTokenizerFast:
    """One token a byte, plus ``merges``, plus the two markers."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges or []:
        vocab[left + right] = len(vocab)
    backend = Tokenizer(models.BPE(vocab, merges or []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = template
    return tokenizer
