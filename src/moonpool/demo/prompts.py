"""Prompts from real text: one system prompt, documents, and several questions about each."""

from __future__ import annotations

from importlib.resources import files

from moonpool.demo.settings import Settings

VOCABULARY = 256
"""The tokenizer is the simplest there is, and downloads nothing: a token is a byte of UTF-8."""

SYSTEM = """\
You are a careful reader. You are given a document and then a question about it. Answer from the document alone, in
one or two sentences, and quote the words that your answer rests on. When the document doesn't say, answer that it
doesn't say. Never guess, never add what you know from elsewhere, and keep to the spelling of the document."""

DOCUMENTS: dict[str, tuple[str, ...]] = {
    "alice.txt": (
        "What did the Rabbit take out of its waistcoat-pocket?",
        "Why was Alice tired of sitting by her sister?",
        "What was written on the jar, and what was in it?",
    ),
    "declaration.txt": (
        "Which rights are called unalienable?",
        "From what do governments derive their just powers?",
        "What does prudence dictate about governments long established?",
    ),
    "apache-2.0.txt": (
        "What does the licence mean by 'Licensor'?",
        "Is a compiled form a Source form or an Object form?",
        "When is a work that links to another a Derivative Work?",
    ),
}
"""File of `text/`, and the questions asked about it."""


def prompts(settings: Settings) -> list[list[int]]:
    """Return the token ids of every prompt, those about one document behind each other."""
    return [
        encode(prompt_text(document, question, settings.document_tokens))
        for document, questions in DOCUMENTS.items()
        for question in questions[: settings.questions]
    ]


def prompt_text(document: str, question: str, document_tokens: int) -> str:
    """Return one prompt: the system prompt and the document's beginning, which others share, then the question."""
    text = files("moonpool.demo").joinpath("text", document).read_text(encoding="utf-8")
    body = text.encode()[:document_tokens].decode(errors="ignore")
    return f"{SYSTEM}\n\nDocument:\n{body}\n\nQuestion: {question}\nAnswer:"


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(tokens: list[int]) -> str:
    """Return the text of `tokens`; bytes that aren't UTF-8 as replacement characters."""
    return bytes(tokens).decode(errors="replace")
