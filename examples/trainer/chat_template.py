"""How a model is asked: the chat template of its folder, or the bare question where it has none."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from examples.trainer.files import read_text

_FILE = "chat_template.jinja"
_CONFIG = "tokenizer_config.json"
_WORKER = Path(__file__).with_name("render_template.py")
# the worker's own limit is of the processor's time: this one is for a worker that never gets any
_PATIENCE_S = 120


Worked = tuple[str, str]  # a question and its answer, as an example of how to answer
Ask = Callable[..., str]  # ask(question, worked)


class Renderer:
    """Renders one template, in a process of its own with limits of time and memory, which serves
    all renderings.

    A template is a program from a stranger: without limits, a few characters of it fill the memory
    or never end.

    `seconds` is the time of the processor that each rendering may take: a usual one takes a
    thousandth.
    """

    def __init__(self, template: str, seconds: int = 2):
        # its own group, so that Ctrl-C in a terminal is this process's matter; -P since its folder
        # has modules named as others are
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER), str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        self._end = weakref.finalize(self, _end, self._process)
        self._failure = ""
        self._ask(template)

    def __call__(self, **variables: Any) -> str:
        """The text.

        Raises:
          ValueError: the template raised an error, or went over a limit, as one that did before.
        """
        return self._ask(variables)

    def _ask(self, request: Any) -> str:
        if not self._failure:
            answer = self._answer(request)
            if "text" in answer:
                return answer["text"]
            self._failure = answer["error"]
            self._end()
        raise ValueError(self._failure)

    def _answer(self, request: Any) -> dict[str, str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            if not select.select([self._process.stdout], [], [], _PATIENCE_S)[0]:
                self._process.kill()
            return dict(json.loads(self._process.stdout.readline()))
        # the process is gone, and half a line may be left of it
        except (BrokenPipeError, json.JSONDecodeError):
            return {"error": _FATES.get(-self._process.wait(), "its process came to an end")}


_FATES = {
    signal.SIGXCPU: "more than its time of the processor",
    signal.SIGKILL: "its process was killed",
    signal.SIGSEGV: "its process crashed",
}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # what was written to a process that is gone
                pipe.close()


def asked_as(
    folder: Path, ends: Sequence[str], read_json: Callable[[Path], dict[str, Any]]
) -> tuple[Ask, str]:
    """A function from a question to the text of the prompt, up to where the answer begins; and what
    ends an answer.

    Templates that know `enable_thinking` are told not to think: answers are short here. A base
    model may come with the template of its chat model: if no answer of it ends with one of the
    model's `ends` of text, questions are asked as they are, and a line says so.

    Raises:
      ValueError: a template that does not render a question and its answer.
    """
    template, path, tokens = _template_of(folder, read_json)
    if template is None:
        return plainly, ends[0]

    def refused(error: ValueError) -> ValueError:
        return ValueError(f"--model: got a chat template in {path} that does not render ({error})")

    try:
        render = Renderer(template)
    except ValueError as error:
        raise refused(error) from error

    def ask(question: str, worked: Sequence[Worked] = ()) -> str:
        turns = [turn for pair in worked for turn in zip(("user", "assistant"), pair, strict=True)]
        messages = [{"role": role, "content": text} for role, text in [*turns, ("user", question)]]
        try:
            return render(
                messages=messages, add_generation_prompt=True, enable_thinking=False, **tokens
            )
        except ValueError as error:
            raise refused(error) from error

    # a bad template is refused before the run begins
    rendered = ask("4 + 4 = ?", [("2 + 3 = ?", "is five")])
    behind = rendered[rendered.find("is five") :]
    found = [end for end in ends if end in behind]
    if not found:
        print(
            f"--model: the chat template in {path} is not used: no answer in it ends with"
            f" {' or '.join(ends)}"
        )
        return plainly, ends[0]
    return ask, min(found, key=behind.index)


def _template_of(
    folder: Path, read_json: Callable[[Path], dict[str, Any]]
) -> tuple[Any, Path, dict[str, Any]]:
    """The template, the file that has it, and the special tokens that it may name; None where
    there is none.
    """
    path = folder / _CONFIG
    config = read_json(path) if path.exists() else {}
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {x.get("name"): x.get("template") for x in template if isinstance(x, dict)}
        template = named.get("default")
    if (folder / _FILE).is_file():
        path = folder / _FILE
        template = read_text(path, errors="replace")

    def text_of(token: Any) -> Any:
        return token.get("content") if isinstance(token, dict) else token

    return (
        template,
        path,
        {name: text_of(config.get(name)) or "" for name in ("bos_token", "eos_token")},
    )


def plainly(question: str, worked: Sequence[Worked] = ()) -> str:
    """Questions and answers as lines."""
    return "".join(f"{text}\n" for pair in worked for text in pair) + f"{question}\n"
