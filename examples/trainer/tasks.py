"""Verifiable tasks of reasoning-gym, and a character tokenizer that knows a task's fixed wording
as single tokens.
"""

from __future__ import annotations

import dataclasses
import runpy
import string
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from examples.trainer.model_folder import FolderTokenizer

TASKS: dict[str, dict[str, Any]] = {
    "spell_backward": {"min_word_len": 5, "max_word_len": 5},
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "count_bits": {"min_n": 1, "max_n": 4095},
    "gcd": {"min_value": 1, "max_value": 99},
}
_WORTH_READING = 8  # tokens
_PATIENCE = 1000  # questions in a row that cannot be trained on
_STREAM = 1 << 40  # generators are seeded with seed + index, so streams this far apart never meet


class Tokenizer:
    """Printable characters, padding, end of text, and the words that a task begins and ends every
    question with.

    Example:
      >>> tokenizer = Tokenizer("Spell: ", ".")
      >>> tokenizer.encode("Spell: no.")
      [2, 27, 28, 3]
      >>> tokenizer.decode(tokenizer.encode("Spell: no."))
      'Spell: no.'
    """

    pad = 0
    end = 1
    ends = (end,)

    def __init__(self, opening: str, closing: str):
        self.opening = opening
        self.closing = closing
        self.pieces = ["", "", opening, closing, *string.printable[:95], "\n"]
        self.ids = {piece: i for i, piece in enumerate(self.pieces[4:], start=4)}
        self.size = len(self.pieces)

    def encode(self, text: str) -> list[int]:
        head = bool(self.opening) and text.startswith(self.opening)
        tail = False
        text = text.removeprefix(self.opening)
        if self.closing and text.endswith(self.closing):
            text = text.removesuffix(self.closing)
            tail = True
        if strange := {*text} - {*self.ids}:
            raise ValueError(
                f"--task: got {min(strange)!r} in a text, expected printable ASCII, or a model's"
                " tokenizer"
            )
        return [2] * head + [self.ids[c] for c in text] + [3] * tail

    encode_question = encode

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.pieces[i] for i in ids)


@dataclasses.dataclass(frozen=True)
class Question:
    """A question as tokens, its answer as tokens with the end of text, and the generator's own
    entry.
    """

    prompt: list[int]
    answer: list[int]
    entry: dict[str, Any]


class Task:
    """An endless, indexable stream of training questions, and held-out ones that never occur in it.

    Args:
      name: one of `TASKS`, another generator of reasoning-gym, or a file of one's own, see
        `streams_of`.
      seed: chooses the stream; the held-out questions are the same for every seed.
      held_out: how many questions to hold out.
      tokenizer: a model's own, see `model_folder`; by default one made for the task.
      shots: how many worked questions come before each; `tokenizer` puts them there.
      response_length: the most tokens of a response; by default those of the longest right answer.

    Raises:
      ValueError: no such task, or a file without the two functions, or with one that fails.
    """

    def __init__(
        self,
        name: str,
        seed: int,
        held_out: int,
        tokenizer: FolderTokenizer | None = None,
        shots: int = 0,
        response_length: int | None = None,
    ):
        make = streams_of(name)
        self.stream = make(seed + 2)
        unseen = make(1)
        probe = make(0)
        probes = [probe[i] for i in range(512)]
        if tokenizer is not None:
            tokenizer.worked = [(entry["question"], entry["answer"]) for entry in probes[:shots]]
        self.tokenizer = tokenizer or _made_for([entry["question"] for entry in probes])
        self.held_out = [self._question(unseen[i]) for i in range(held_out)]
        self._known = {_id(question.entry) for question in self.held_out} | {
            _id(entry) for entry in probes[:shots]
        }
        seen = [self._question(entry) for entry in probes] + self.held_out
        self.prompt_length = max(len(question.prompt) for question in seen)
        self.response_length = response_length or max(len(question.answer) for question in seen)
        self.common = self._common([question.prompt for question in seen])
        self._start = seen[0].prompt[: self.common]

    def _common(self, prompts: Sequence[list[int]]) -> int:
        """The number of tokens that all prompts begin with; 0 where it is too small to be worth
        a pass of its own.
        """
        first = min(prompts)
        last = max(prompts)
        most = min(map(len, prompts)) - 1
        same = [a == b for a, b in zip(first[:most], last[:most], strict=True)]
        count = [*same, False].index(False)
        return count if count >= _WORTH_READING else 0

    def _question(self, entry: dict[str, Any]) -> Question:
        prompt = self.tokenizer.encode_question(entry["question"])
        return Question(
            prompt, [*self.tokenizer.encode(entry["answer"]), self.tokenizer.end], entry
        )

    def take(self, position: int, count: int) -> tuple[list[Question], int]:
        """The next `count` training questions from `position` on, and the position after them.

        Raises:
          ValueError: none of many questions in a row can be trained on.
        """
        begun = position
        questions: list[Question] = []
        while len(questions) < count:
            question = self._question(self.stream[position])
            position += 1
            fits = (
                len(question.prompt) <= self.prompt_length
                and len(question.answer) <= self.response_length
            )
            fits &= question.prompt[: self.common] == self._start
            if fits and _id(question.entry) not in self._known:
                questions.append(question)
            elif position - begun > _PATIENCE * (1 + len(questions)):
                rules = f"answers of at most {self.response_length} tokens, and not held out"
                raise ValueError(
                    f"--task: got no question to train on among {_PATIENCE}, expected {rules}"
                )
        return questions, position

    def reward(self, question: Question, response: Sequence[int]) -> float:
        """The task's own verifier on the response's text, 1 for a right answer."""
        text = self.tokenizer.decode(
            token for token in response if token not in self.tokenizer.ends
        )
        return float(self.stream.score_answer(text, question.entry))


class Stream(Protocol):
    """Questions with answers by index, and their verifier, as the datasets of reasoning-gym have
    them.
    """

    def __getitem__(self, i: int) -> dict[str, Any]: ...
    def score_answer(self, answer: str, entry: dict[str, Any]) -> float: ...


def streams_of(name: str) -> Callable[[int], Stream]:
    """Streams of a task's questions by number; those of two numbers do not repeat each other.

    A name that ends in .py is a file of one's own, with
    `question(i) -> {"question": ..., "answer": ...}` for any i from 0, and
    `score(text, entry) -> reward`. Questions of equal `entry["id"]`, or equal texts without one,
    count as the same: what is held out is not trained on.

    Raises:
      ValueError: no such task.
    """
    if name.endswith(".py"):
        return partial(_OwnStream, Path(name), _functions_of(Path(name)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # from a package that reasoning-gym imports
        import reasoning_gym  # here, since it takes a second, and --help needs only the names
        from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ValueError(
            f"--task: got {name!r}, expected one of {', '.join(TASKS)}, another generator of"
            " reasoning-gym, or a file that ends in .py"
        )

    def make(number: int) -> Stream:
        return reasoning_gym.create_dataset(
            name, seed=number * _STREAM, size=_STREAM, **TASKS.get(name, {})
        )

    return make


def _functions_of(path: Path) -> dict[str, Any]:
    """What a file of one's own defines."""
    try:
        found = runpy.run_path(str(path))
    except Exception as error:  # somebody's program
        raise ValueError(
            f"--task: got {path}, which ends with {type(error).__name__} ({error})"
        ) from error
    for name in ("question", "score"):
        if not callable(found.get(name)):
            raise ValueError(f"--task: got {path} without a function {name}")
    return found


@dataclasses.dataclass(frozen=True)
class _OwnStream:
    """The questions of a file of one's own from a place on."""

    path: Path
    functions: dict[str, Any]
    number: int

    def __getitem__(self, i: int) -> dict[str, Any]:
        entry = self.functions["question"](self.number * _STREAM + i)
        if not isinstance(entry, dict) or not all(
            isinstance(entry.get(key), str) for key in ("question", "answer")
        ):
            raise ValueError(
                f"--task: got {entry!r} from question({i}) of {self.path}, expected texts question"
                " and answer"
            )
        return entry

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        return float(self.functions["score"](answer, entry))


def _id(entry: dict[str, Any]) -> Any:
    return entry.get("id", entry["question"])


def _made_for(texts: Sequence[str]) -> Tokenizer:
    """The tokenizer of a task, from many of its questions."""
    opening = _common_start(texts)
    return Tokenizer(
        opening, _common_start([text.removeprefix(opening)[::-1] for text in texts])[::-1]
    )


def _common_start(texts: Sequence[str]) -> str:
    first = min(texts)
    last = max(texts)
    same = [a == b for a, b in zip(first, last, strict=False)]
    return first[: [*same, False].index(False)]
