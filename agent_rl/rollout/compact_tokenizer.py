"""A word-level tokenizer for the tiny embedded policy: one token per word, number or operator.

Text is split by ``WORD_PATTERN`` and decoded by joining with single spaces, so spacing is lost on
purpose and newlines are tokens. It is stored as an ordinary ``tokenizer.json`` beside the weights.
Role markers are ids only: text that spells ``<end>`` never becomes the token, so an observation
cannot close its own block.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from agent_rl.errors import ConfigError
from agent_rl.types import TokenIds

WORD_PATTERN = r"\n|\d+|\w+|[+\-*/%<>=!]=|//|[^\w\s]"
PAD, UNK, USER, ASSISTANT, OBS, END = SPECIAL_TOKENS = (
    "<pad>",
    "<unk>",
    "<user>",
    "<assistant>",
    "<obs>",
    "<end>",
)
TOKENIZER_FILE = "tokenizer.json"


class CompactTokenizer:
    """Word-level text to ids and back, with the six marker ids as attributes.

    Example:
        >>> tokenizer = build_compact_tokenizer(["return a + 1"])
        >>> tokenizer.decode(tokenizer.encode("return  a+1"))
        'return a + 1'
    """

    def __init__(self, backend: Tokenizer) -> None:
        """Mutates ``backend``: marker tokens are no longer recognised inside text."""
        ids = {t: i for t in SPECIAL_TOKENS if (i := backend.token_to_id(t)) is not None}
        if len(ids) < len(SPECIAL_TOKENS):
            absent = [token for token in SPECIAL_TOKENS if token not in ids]
            raise ConfigError(
                [f"not a compact tokenizer: lacks {absent}, expected {SPECIAL_TOKENS}"]
            )
        backend.encode_special_tokens = True
        self._backend = backend
        self.pad_id, self.unk_id = ids[PAD], ids[UNK]
        self.user_id, self.assistant_id = ids[USER], ids[ASSISTANT]
        self.obs_id, self.end_id = ids[OBS], ids[END]

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size()

    def encode(self, text: str) -> TokenIds:
        """Return the ids ``[T]`` int32 of ``text``, no markers; unknown words give ``unk_id``."""
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, token_ids: Sequence[int] | TokenIds) -> str:
        """Join the tokens by single spaces, markers spelled out."""
        return " ".join(self._backend.id_to_token(int(i)) or UNK for i in token_ids)

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` and the settings that let transformers load it too."""
        folder.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(folder / TOKENIZER_FILE))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "unk_token": UNK,
            "eos_token": END,
            "clean_up_tokenization_spaces": False,
        }
        text = json.dumps(settings, indent=2) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> CompactTokenizer:
        """Read ``tokenizer.json`` from a model folder. Raises ``ConfigError`` when absent."""
        file = folder / TOKENIZER_FILE
        if not file.is_file():
            raise ConfigError(
                [f"no tokenizer: got folder {folder}, expected {TOKENIZER_FILE} in it"]
            )
        return cls(Tokenizer.from_file(str(file)))


def build_compact_tokenizer(texts: Iterable[str], *, min_count: int = 1) -> CompactTokenizer:
    """Build a tokenizer of the markers and then the words of ``texts`` in sorted order.

    Args:
        texts: every text the policy shall read or write.
        min_count: rarer words are left out and will encode as ``<unk>``.
    """
    splitter = pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="removed", invert=True)
    counts = Counter(word for text in texts for word, _ in splitter.pre_tokenize_str(text))
    words = sorted(word for word, count in counts.items() if count >= min_count)
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *words])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    backend.pre_tokenizer = splitter
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return CompactTokenizer(backend)
