"""Writes the small models that guides take as given ("path/to/model"), for hidden blocks of their pages (test_docs_blocks.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def llama(hidden_size: int = 128, dtype: torch.dtype = torch.float32) -> None:
    """Write a Llama of two layers, of random weights, to "path/to/model"."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config: Any = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model: Any = LlamaForCausalLM(config)  # whose `to` transformers types in its own way
    model.to(dtype).save_pretrained("path/to/model")


def bert() -> None:
    """Write a BERT of three layers to "path/to/model"."""
    from transformers import BertConfig, BertModel

    config: Any = BertConfig(vocab_size=512, hidden_size=256, num_hidden_layers=3, num_attention_heads=4)
    BertModel(config).save_pretrained("path/to/model")


def tokenizer(special: Sequence[str], **names: Any) -> None:
    """Write a tokenizer of the words "the" and "fox", and of `special`, which `names` name, to "path/to/model"."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate([*special, "the", "fox"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained("path/to/model")
