"""Verifiable tasks of reasoning-gym, and a character tokenizer that knows a task's fixed wording as single tokens."""

from __future__ import annotations

import dataclasses
import string
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from examples.trainer.model_folder import FolderTokenizer

TASKS: dict[str, dict[str, Any]] = {
    "spell_backward": {"min_word_len": 5, "max_word_len": 5},
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "count_bits": {"min_n": 1, "max_n": 4095},
    "gcd": {"min_value": 1, "max_value": 99},
}
_STREAM = 1 << 40  # generators are seeded with seed + index, so streams this far apart never meet


class Tokenizer:
    """Printable characters, padding, end of text, and the words that a task begins and ends every question with.

    Example:
      >>> tokenizer = Tokenizer("Spell: ", ".")
      >>> tokenizer.encode("Spell: no.")
      [2, 27, 28, 3]
      >>> tokenizer.decode(tokenizer.encode("Spell: no."))
      'Spell: no.'
    """

    pad, end = 0, 1
    ends = (end,)

    def __init__(self, opening: str, closing: str):
        self.opening, self.closing = opening, closing
        self.pieces = ["", "", opening, closing, *string.printable[:95], "\n"]
        self.ids = {piece: i for i, piece in enumerate(self.pieces[4:], start=4)}
        self.size = len(self.pieces)

    def encode(self, text: str) -> list[int]:
        head, tail = bool(self.opening) and text.startswith(self.opening), False
        text = text.removeprefix(self.opening)
        if self.closing and text.endswith(self.closing):
            text, tail = text.removesuffix(self.closing), True
        return [2] * head + [self.ids[c] for c in text] + [3] * tail

    encode_question = encode

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.pieces[i] for i in ids)


@dataclasses.dataclass(frozen=True)
class Question:
    """A question as tokens, its answer as tokens with the end of text, and the generator's own entry."""

    prompt: list[int]
    answer: list[int]
    entry: dict[str, Any]


class Task:
    """An endless, indexable stream of training questions, and held-out ones that never occur in it.

    Args:
      name: one of `TASKS`.
      seed: chooses the stream; the held-out questions are the same for every seed.
      held_out: how many questions to hold out.
      tokenizer: a model's own, see `model_folder`; by default one made for the task.
    """

    def __init__(self, name: str, seed: int, held_out: int, tokenizer: FolderTokenizer | None = None):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # from a package that reasoning-gym imports
            import reasoning_gym  # here, since it takes a second, and --help needs only the names

        def make(stream):
            return reasoning_gym.create_dataset(name, seed=stream * _STREAM, size=_STREAM, **TASKS[name])

        self.stream, unseen = make(seed + 2), make(1)
        probe = make(0)
        texts = [probe[i]["question"] for i in range(512)]
        opening = _common_start(texts)
        closing = _common_start([text.removeprefix(opening)[::-1] for text in texts])[::-1]
        self.tokenizer = tokenizer or Tokenizer(opening, closing)
        self.held_out = [self._question(unseen[i]) for i in range(held_out)]
        self._held_out_texts = {question.entry["question"] for question in self.held_out}
        seen = [self._question(probe[i]) for i in range(512)] + self.held_out
        self.prompt_length = max(len(question.prompt) for question in seen)
        self.response_length = max(len(question.answer) for question in seen)

    def _question(self, entry: dict[str, Any]) -> Question:
        prompt = self.tokenizer.encode_question(entry["question"])
        return Question(prompt, [*self.tokenizer.encode(entry["answer"]), self.tokenizer.end], entry)

    def take(self, position: int, count: int) -> tuple[list[Question], int]:
        """The next `count` training questions from `position` on, and the position after them."""
        questions: list[Question] = []
        while len(questions) < count:
            question = self._question(self.stream[position])
            position += 1
            fits = len(question.prompt) <= self.prompt_length and len(question.answer) <= self.response_length
            if fits and question.entry["question"] not in self._held_out_texts:
                questions.append(question)
        return questions, position

    def reward(self, question: Question, response: Sequence[int]) -> float:
        """The task's own verifier on the response's text, 1 for a right answer."""
        text = self.tokenizer.decode(token for token in response if token not in self.tokenizer.ends)
        return float(self.stream.score_answer(text, question.entry))


def _common_start(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    same = [a == b for a, b in zip(first, last, strict=False)]
    return first[: [*same, False].index(False)]
