"""Renders a chat template, which a stranger wrote, within limits of time and memory: a process that
`Renderer` starts.

python render_template.py SECONDS

It reads lines of JSON, the template and then the variables of each rendering, and answers each with
a line. Nothing here imports JAX.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 1 << 29  # bytes of the process
LONGEST = 1 << 20  # characters of a prompt


def _limit_memory() -> None:
    with contextlib.suppress(ValueError, OSError):  # systems that have no such limit, such as macOS
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time(seconds: int) -> None:
    """From now on: the system ends the process after so many seconds of the processor, whatever it
    computes.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(
        resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + seconds, most)
    )


def _compiled(template: str) -> Template:
    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    return environment.from_string(template)


def _rendered(template: Template, variables: dict[str, Any]) -> str:
    text = template.render(**variables)
    if len(text) > LONGEST:
        raise ValueError(f"a text of {len(text)} characters, expected at most {LONGEST}")
    return text


def _answer(request: Any, template: Template | None) -> tuple[dict[str, str], Template | None]:
    """The answer to a request, and the template of those that follow."""
    try:
        if template is None:
            return {"text": ""}, _compiled(request)
        return {"text": _rendered(template, request)}, template
    except MemoryError:
        return {"error": f"more than {MEMORY >> 20} MiB of memory"}, template
    except Exception as error:  # a template may raise anything
        return {"error": str(error)[:1000] or type(error).__name__}, template


def main(seconds: int) -> None:
    _limit_memory()
    template = None
    for line in sys.stdin:
        _limit_time(seconds)
        answer, template = _answer(json.loads(line), template)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
