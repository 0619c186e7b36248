"""The demo's prompts are real text, and share what they are said to share."""

from __future__ import annotations

import pytest

from moonpool.demo.prompts import DOCUMENTS, SYSTEM, decode, encode, prompts
from moonpool.demo.settings import CONTROL_PROMPT, Settings


def shared(prompts: list[list[int]]) -> int:
    """Return how many leading tokens all of `prompts` have in common."""
    return next(i for i, column in enumerate(zip(*prompts, strict=False)) if len(set(column)) > 1)


ALL = [Settings(), Settings().quick()]


@pytest.mark.parametrize("settings", ALL, ids=["whole", "quick"])
def test_prompts_about_one_document_share_it_and_others_the_system_prompt(settings: Settings) -> None:
    made = prompts(settings)
    assert len(made) == len(DOCUMENTS) * settings.questions
    of_document = [
        made[start : start + settings.questions] for start in range(0, len(made), settings.questions)
    ]
    for group in of_document:
        assert shared(group) >= len(encode(SYSTEM)) + settings.document_tokens
    across = shared([group[0] for group in of_document])
    assert len(encode(SYSTEM)) <= across < len(encode(SYSTEM)) + settings.document_tokens // 2


@pytest.mark.parametrize("settings", ALL, ids=["whole", "quick"])
def test_the_blocks_that_controls_exchange_differ_between_prompts(settings: Settings) -> None:
    """A control that put equal blocks in each other's place would prove nothing."""
    made, size = prompts(settings), settings.tokens_per_object
    one, other = made[CONTROL_PROMPT], made[CONTROL_PROMPT + settings.questions]
    place = (len(one) - 1) // size * 2 // 3
    assert one[place * size : (place + 1) * size] != other[place * size : (place + 1) * size]
    assert (place + 1) * size < len(other)


def test_every_question_is_within_the_text_that_the_project_ships() -> None:
    for prompt in prompts(Settings()):
        text = decode(prompt)
        assert "�" not in text
        assert text.endswith("\nAnswer:")
        assert len(prompt) > 1000


def test_tokens_are_bytes() -> None:
    assert encode("Ärger") == [0xC3, 0x84, 0x72, 0x67, 0x65, 0x72]
    assert decode(encode("Ärger")) == "Ärger"
