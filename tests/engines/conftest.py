"""A small model with seeded random weights, and a store inside the test's own process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import moonpool

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCABULARY = 97

MakeModel = Callable[..., Any]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """A model this small gains nothing from threads, and loses seconds to them on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_model() -> MakeModel:
    """Return a maker of Llama models with seeded weights, large enough in scale that attention isn't uniform."""

    def make(seed: int = 0, dtype: Any = torch.float32, **changes: Any) -> Any:
        config = transformers.LlamaConfig(
            **{
                "vocab_size": VOCABULARY,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 1024,
                "initializer_range": 0.15,
                "tie_word_embeddings": False,
                "bos_token_id": None,
                "eos_token_id": None,
                "pad_token_id": None,
                **changes,
            }
        )
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config).to(dtype).eval()

    return make


@pytest.fixture(scope="session")
def model(make_model: MakeModel) -> Any:
    return make_model()


@pytest.fixture
def client() -> Iterator[Any]:
    with moonpool.connect("embedded:64MiB") as opened:
        yield opened


@pytest.fixture
def prompt() -> list[int]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, VOCABULARY, (100,), generator=generator).tolist()
