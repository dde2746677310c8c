"""Decoders for tests of the training budget, and what its terms come to."""

from collections.abc import Iterable

from tonnage.budget.terms import Term, total
from tonnage.ledger import Category
from tonnage.models import ModelShape, from_config

LLAMA_1B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}


def llama(**changes: object) -> ModelShape:
    """A Llama of a billion parameters, or one that differs from it."""
    return from_config(LLAMA_1B | changes)


def gpt2(**changes: object) -> ModelShape:
    """The smallest GPT-2, or one that differs from it."""
    return from_config({"model_type": "gpt2", **changes})


def bytes_of(category: Category, terms: Iterable[Term]) -> float:
    """What the terms of a category come to."""
    return total(term for term in terms if term.category is category)
