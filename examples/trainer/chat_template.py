"""How a model is asked: the chat template of its folder, or the bare question where it has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

_FILE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"


Ask = Callable[[str], str]


def asked_as(folder: Path, end: str, read_json: Callable[[Path], dict[str, Any]]) -> Ask:
    """A function from a question to the text of the prompt, up to where the answer begins.

    Templates that know `enable_thinking` are told not to think: answers are short here. A base model may come with the
    template of its chat model: if no turn of it ends with the model's `end` of text, the question is asked as it is.

    Raises:
      ValueError: a template that does not render a question.
    """
    path = folder / _CONFIG
    config = read_json(path) if path.exists() else {}
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {x.get("name"): x.get("template") for x in template if isinstance(x, dict)}
        template = named.get("default")
    if (folder / _FILE).is_file():
        path = folder / _FILE
        template = path.read_text(errors="replace")
    if template is None:
        return _plainly
    # imported here, since toys need no template
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def text_of(token: Any) -> Any:
        return token.get("content") if isinstance(token, dict) else token

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    tokens = {name: text_of(config.get(name)) or "" for name in ("bos_token", "eos_token")}
    options = {"add_generation_prompt": True, "enable_thinking": False, **tokens}

    def ask(question: str) -> str:
        messages = [{"role": "user", "content": question}]
        try:
            return environment.from_string(template).render(messages=messages, **options)
        except Exception as error:  # a template may raise anything
            raise ValueError(f"--model: got a chat template in {path} that does not render ({error})") from error

    return ask if end in ask("2 + 2 = ?") else _plainly  # a bad template is refused before the run begins


def _plainly(question: str) -> str:
    return f"{question}\n"
