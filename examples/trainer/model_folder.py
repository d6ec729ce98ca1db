"""Reads the folder of a published model: config.json, tokenizer.json and safetensors, single or
sharded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers
from jax.sharding import NamedSharding
from safetensors import SafetensorError, safe_open

from examples.trainer.chat_template import Worked, asked_as, plainly
from examples.trainer.files import read_text

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = {"F32", "BF16", "F16"}


def read_json(path: Path) -> dict[str, Any]:
    """Reads an object from a JSON file of the model's folder.

    Raises:
      ValueError: there is no such file, or something else is in it.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"--model: got {path}, expected a file")
    try:
        found = json.loads(read_text(path))
    except OSError as error:
        raise ValueError(
            f"--model: got {path.parent} without a readable {path.name} ({error.strerror})"
        ) from None
    except RecursionError:
        raise ValueError(
            f"--model: got {path} with lists in lists beyond all depth, expected JSON"
        ) from None
    except ValueError as error:  # from the parser of JSON, or from decoding the text
        raise ValueError(f"--model: got {path}, expected JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(
            f"--model: got {path} with a {type(found).__name__}, expected a JSON object"
        )
    return found


class FolderTokenizer:
    """The tokenizer of tokenizer.json, with the ends of text that config.json names, and the
    folder's chat template.

    Questions are asked as a user's turn, to be answered without thinking; in a folder without a
    template, as they are.

    Args:
      folder: the model's folder.
      ends: the ids after which a response is over. `end` is the one that ends an answer.
      worked: questions with their answers that come before every question.

    Raises:
      ValueError: no tokenizer.json, an unreadable one, or one without those ids; a template that
        does not render.
    """

    def __init__(self, folder: Path, ends: Sequence[int], worked: Sequence[Worked] = ()):
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"--model: got {folder} without tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no class of its own
            raise ValueError(
                f"--model: got {path}, expected what the tokenizers library reads ({error})"
            ) from None
        texts = {}
        for end in ends:
            texts[end] = self._tokenizer.id_to_token(end)
            if texts[end] is None:
                raise ValueError(
                    f"--model: got eos_token_id {end}, expected the id of a token in {path}"
                )
        self.size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self._asked, end = asked_as(folder, list(texts.values()), read_json)
        self.ends = tuple(ends)
        self.worked = list(worked)
        self.end = next(i for i, text in texts.items() if text == end)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens around it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_question(self, text: str) -> list[int]:
        """The ids of a question, up to where its answer begins."""
        asked = self._asked(text, self.worked)
        if self._asked is plainly:  # with a beginning of text, if the model has one
            return list(self._tokenizer.encode(asked).ids)
        return self.encode(asked)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))


class Weights:
    """The tensors of a folder by name. At first only headers are read. `place` reads the parts of a
    tensor that this process's devices hold.

    Raises:
      ValueError: no safetensors, a file that is cut short or is missing, a tensor that holds no
        floats.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        if (folder / _INDEX).is_file():
            index = read_json(folder / _INDEX).get("weight_map")
            if not isinstance(index, dict):
                raise ValueError(f"--model: got {folder / _INDEX} without weight_map")
            for tensor, name in index.items():
                if (
                    not isinstance(name, str)
                    or Path(name).name != name
                    or not name.endswith(".safetensors")
                ):
                    raise ValueError(
                        f"--model: got {name!r} for {tensor} in {folder / _INDEX}, expected the"
                        " name of a safetensors file beside it"
                    )
            names = sorted(set(index.values()))
        elif (folder / _SINGLE).is_file():
            index = None
            names = [_SINGLE]
        else:
            raise ValueError(f"--model: got {folder}, expected {_SINGLE} or {_INDEX} in it")
        files = {name: _open(folder / name) for name in names}
        held = {tensor: name for name, file in files.items() for tensor in file.keys()}  # noqa: SIM118
        for tensor, name in (index or {}).items():
            if tensor not in files[name].keys():  # noqa: SIM118
                raise ValueError(
                    f"--model: got {folder / name} without {tensor}, which {_INDEX} says it holds"
                )
        held |= index or {}
        self._slices = {tensor: files[name].get_slice(tensor) for tensor, name in held.items()}
        self.shapes = {tensor: tuple(piece.get_shape()) for tensor, piece in self._slices.items()}
        for tensor, piece in self._slices.items():
            if piece.get_dtype() not in _FLOATS:
                raise ValueError(
                    f"--model: got {tensor} in {piece.get_dtype()}, expected one of"
                    f" {', '.join(sorted(_FLOATS))}"
                )

    def place(self, name: str, sharding: NamedSharding, transposed: bool) -> jax.Array:
        """Puts a tensor on the mesh in float32. A part that several devices hold is read once.

        Args:
          name: the tensor's name.
          sharding: the sharding of the result.
          transposed: the file has `[out, in]`, the result `[in, out]`.

        Raises:
          ValueError: a weight that is NaN or infinite.
        """
        parts: dict[Any, np.ndarray] = {}

        def read(index: tuple[slice, ...]) -> np.ndarray:
            key = tuple((part.start, part.stop) for part in index)
            if key not in parts:
                found = self._slices[name][index[::-1] if transposed else index]
                parts[key] = np.asarray(found.T if transposed else found, dtype=np.float32)
                if not np.isfinite(parts[key]).all():
                    worst = parts[key][~np.isfinite(parts[key])][0]
                    raise ValueError(f"--model: got {worst} in {name}, expected finite weights")
            return parts[key]

        shape = self.shapes[name]
        return jax.make_array_from_callback(shape[::-1] if transposed else shape, sharding, read)


def _open(path: Path) -> Any:
    if path.exists() and not path.is_file():
        raise ValueError(f"--model: got {path}, expected a file")
    try:
        return safe_open(path, framework="numpy")
    except FileNotFoundError:
        raise ValueError(
            f"--model: got {path.parent} without {path.name}, which {_INDEX} names"
        ) from None
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"--model: got {path}, expected a whole safetensors file ({error})"
        ) from None
