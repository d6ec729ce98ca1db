"""Reads a head from modules of Flax, Equinox, Tunix and Qwix.

It imports none of these packages: their objects can exist only if the program has imported them.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

_DOT_GENERAL = jax.lax.dot_general  # before Qwix or another package patches it during a call
_EXPECTED = (
    "an array, nnx.Param, nnx.Linear, nnx.LoRALinear, nnx.LoRA, nnx.Embed, nnx.Einsum, a Linen"
    " parameter or the parameters of an nn.Dense or nn.Embed, eqx.nn.Linear, eqx.nn.Embedding, or a"
    " Tunix lm_head or embedder"
)
_QWIX_NOTES = ("qwix_path", "qwix_rngs", "disable_quant_stats_update")
_QWIX_BOX = ("qwix._src.providers.ptq", "WithAux")  # which Qwix has no public name for
_QUANTISED = ("float8_e4m3fn", "int8")
_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)


@dataclasses.dataclass(frozen=True)
class HeadParts:
    """The parts of a head in a module; None where there is none, or where the module does not
    say.
    """

    kernel: Any  # [H, V] or [V, H]; values of 8 bits if there is a scale
    layout: str | None = None  # "hv" or "vh"
    bias: Any = None  # [V]
    lora: tuple[Any, Any] | None = None  # a [H, r], b [r, V]
    lora_scale: float | None = None
    dtype: Any = None  # in which the module multiplies
    scale: Any = None  # of a quantised kernel, with as many dimensions


def parts_of(module: Any) -> HeadParts:
    """The parts of a head in what `Head.of` takes.

    Raises:
      TypeError: an unknown object, weights that are quantised in a way of their own, unknown
        adapters.
    """
    quantised = _quantised("module", module)
    if quantised is not None:
        return quantised
    if isinstance(module, _ARRAYS) or _is_box(module):
        return HeadParts(_value("module", module))
    if isinstance(module, Mapping):
        return _of_mapping(module)
    if _is(module, "flax.nnx", "Module"):
        parts = _of_nnx(module)
    else:
        parts = _of_equinox(module)
    if parts is not None:
        return parts
    if _is(module, "flax.linen", "Module"):
        _refuse(module, "which holds no parameters, expected those of its variables['params']")
    if _is(module, "equinox.nn", "Shared"):
        _refuse(module, "expected one of the modules that calling it gives")
    return _refuse(module, f"expected {_EXPECTED}")


def narrowed(x: Any, dtype: Any) -> Any:
    """x in the dtype in which a module multiplies, if that is narrower; a wider dtype would not
    change a product.
    """
    if x is None or dtype is None or jnp.dtype(dtype).itemsize >= x.dtype.itemsize:
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
    return x.astype(dtype)


def _refuse(x: Any, why: str, where: str = "module") -> NoReturn:
    kind = type(x)
    raise TypeError(f"{where}: got {kind.__module__}.{kind.__qualname__}, {why}")


def _is(x: Any, package: str, name: str) -> bool:
    """Whether x is of a class of a package; it is not, if nobody imported the package."""
    kind = getattr(sys.modules.get(package), name, None)
    return isinstance(kind, type) and isinstance(x, kind)


def _is_box(x: Any) -> bool:
    return _is(x, "flax.nnx", "Variable") or _is(x, "flax.core.meta", "AxisMetadata")


def _unboxed(x: Any) -> Any:
    """What a variable or box holds."""
    while _is_box(x):
        if _is(x, "flax.nnx", "Variable"):
            x = x.get_value()
        else:
            x = x.value
    return x


def _quantised(where: str, x: Any) -> HeadParts | None:
    """The values and the scale of a kernel that Qwix quantised; None for anything else."""
    x = _unboxed(x)
    if _is(x, *_QWIX_BOX):
        x = _unboxed(x.array)
    if not _is(x, "qwix", "QArray"):
        return None
    if x.zero_point is not None:
        _refuse(x, "with a zero point, expected one that is symmetric around 0", where)
    values = _unboxed(x.qvalue)
    if jnp.dtype(values.dtype).name not in _QUANTISED:
        _refuse(x, f"of {values.dtype}, expected {' or '.join(_QUANTISED)}", where)
    return HeadParts(values, scale=_value(f"{where}.scale", x.scale))


def _value(where: str, x: Any) -> Any:
    """The array of floats within a variable or box; raises a TypeError that names any other
    content.
    """
    x = _unboxed(x)
    if not isinstance(x, _ARRAYS):
        expected = (
            "expected an array of floats; quantised and wrapped weights must be converted first"
        )
        _refuse(x, expected, where)
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
        raise TypeError(
            f"{where}: got {x.dtype}, quantised weights, expected float32, bfloat16 or float16"
        )
    return x


def _of_mapping(x: Mapping[str, Any]) -> HeadParts:
    """The parameters of nn.Dense or nn.Embed, or an nnx.State of nnx.Linear or nnx.Embed."""
    if "kernel" in x:
        return _parts(x, "kernel", "hv", "kernel_lora_a", "kernel_lora_b", "bias")
    if "embedding" in x:
        return _parts(x, "embedding", "vh")
    keys = ", ".join(map(repr, x)) or "none"
    raise TypeError(
        f"module: got a {type(x).__name__} with keys {keys}, expected 'kernel' and 'bias', or"
        " 'embedding'"
    )


def _of_nnx(x: Any) -> HeadParts | None:
    if _is(x, "flax.nnx", "LoRALinear"):
        return _with_lora(_linear(x, "LoRALinear", "lora"), x.lora)
    if _is(x, "flax.nnx", "Linear"):
        return _linear(x, "Linear")
    if _is(x, "flax.nnx", "LoRA"):
        base = x.base_module
        if not _is(base, "flax.nnx", "Linear") or _is(base, "flax.nnx", "LoRALinear"):
            _refuse(x, f"around {type(base).__name__}, expected one around an nnx.Linear")
        _check_method(x, "flax.nnx", "LoRA")
        return _with_lora(_linear(base, "Linear"), x)
    if _is(x, "flax.nnx", "Embed"):
        _check_method(x, "flax.nnx", "Embed", "attend")
        return _parts(x, "embedding", "vh")
    if _is(x, "flax.nnx", "Einsum"):
        _check_method(x, "flax.nnx", "Einsum")
        return _parts(
            x, "kernel", _layout_of_einsum(x, "kernel"), "kernel_lora_a", "kernel_lora_b", "bias"
        )
    # Every Tunix model defines its lm_head, an Einsum over `w`, and its embedder, whose `decode`
    # makes logits, anew. So they are recognised by their attributes.
    if hasattr(x, "einsum_str") and hasattr(x, "w"):
        return _parts(x, "w", _layout_of_einsum(x, "w"), "w_lora_a", "w_lora_b")
    if hasattr(x, "input_embedding") and callable(getattr(x, "decode", None)):
        # other parameters of an embedder (for images, for layers) have no part in the logits
        strange = [
            name
            for name in vars(x)
            if name.startswith("input_embedding_") or "lora" in name.lower()
        ]
        return _parts(x, "input_embedding", "vh", held=strange)
    return None


def _of_equinox(x: Any) -> HeadParts | None:
    if _is(x, "equinox.nn", "Linear"):
        _check_method(x, "equinox.nn", "Linear")
        if "scalar" in (x.in_features, x.out_features):
            _refuse(x, "of a scalar, expected one from H features to V tokens")
        return _parts(x, "weight", "vh", "bias", held=())
    if _is(x, "equinox.nn", "Embedding"):
        return _parts(x, "weight", "vh", held=())
    return None


def _parts(
    x: Any, name: str, layout: str, *others: str, held: Collection[str] | None = None
) -> HeadParts:
    """The kernel of that name in a module or mapping, with the bias and the Qwix adapter if
    `others` name them.

    Raises where `held`, by default all its parameters, has still others. Qwix's LoraProvider, which
    Tunix uses, puts adapters beside a parameter.
    """
    known = (name, *others)
    if held is None:
        held = x if isinstance(x, Mapping) else _parameters(x)
    left = sorted({*held} - {*known})
    if left:
        raise TypeError(
            f"module: got {', '.join(left)} beside its kernel, expected {', '.join(known)} at most"
        )

    def array(key: str) -> Any:
        if isinstance(x, Mapping):
            value = x.get(key)
            where = f"module[{key!r}]"
        else:
            value = getattr(x, key, None)
            where = f"module.{key}"
        if key not in known or (value is None and key != name):
            return None
        return _value(where, value)

    a = array(f"{name}_lora_a")
    b = array(f"{name}_lora_b")
    if (a is None) != (b is None):
        raise TypeError(f"module: got one of {name}_lora_a and {name}_lora_b, expected both")
    lora = None
    if a is not None:
        lora = (a, b)
    dtype = None
    if isinstance(x, Mapping):
        quantised = _quantised(f"module[{name!r}]", x.get(name))
    else:
        dtype = getattr(x, "dtype", None)
        quantised = _quantised(f"module.{name}", getattr(x, name, None))
    kernel = quantised or HeadParts(array(name))
    return dataclasses.replace(kernel, layout=layout, bias=array("bias"), lora=lora, dtype=dtype)


def _linear(x: Any, kind: str, *others: str) -> HeadParts:
    _check_method(x, "flax.nnx", kind)
    if x.dot_general is not _DOT_GENERAL:
        expected = "jax.lax.dot_general: other products are not taken over"
        _refuse(x, f"with dot_general {x.dot_general!r}, expected {expected}")
    return _parts(x, "kernel", "hv", "kernel_lora_a", "kernel_lora_b", "bias", *others)


def _with_lora(parts: HeadParts, lora: Any) -> HeadParts:
    """The parts with an adapter of nnx."""
    if parts.lora is not None:
        _refuse(lora, "with adapters of nnx and of Qwix, expected one of them")
    a = narrowed(_value("module.lora_a", lora.lora_a), lora.dtype)
    b = narrowed(_value("module.lora_b", lora.lora_b), lora.dtype)
    return dataclasses.replace(parts, lora=(a, b), lora_scale=1.0)


def _check_method(x: Any, package: str, kind: str, method: str = "__call__") -> None:
    """Raises where a subclass computes logits in its own way."""
    library_class = getattr(sys.modules[package], kind)
    if getattr(type(x), method) is not getattr(library_class, method):
        name = package.replace("flax.", "").replace("equinox", "eqx")
        expected = f"{name}.{kind}; Head(kernel, ...) says what it computes"
        _refuse(x, f"a {kind} with a {method} of its own, expected {expected}")


def _parameters(x: Any) -> list[str]:
    """The names of a module's attributes that hold parameters, or modules that may hold some."""

    names = []
    for name, value in vars(x).items():
        module = (
            _is(value, "flax.nnx", "Variable")
            or _is(value, "flax.nnx", "Module")
            or _is(value, *_QWIX_BOX)
        )
        if (module or isinstance(value, jax.Array)) and name not in _QWIX_NOTES:
            names.append(name)
    return names


def _layout_of_einsum(x: Any, name: str) -> str:
    """The layout of a kernel of two dimensions in an einsum with hidden states."""
    bias = getattr(x, "bias", None)
    layout = None
    if isinstance(x.einsum_str, str):
        layout = _layout_of_subscripts(x.einsum_str)
    if layout is None:
        _refuse(x, f"with einsum {x.einsum_str!r}, expected one like 'BTD,DV->BTV'")
    if bias is not None and len(bias.shape) != 1:
        _refuse(x, f"with a bias of shape {bias.shape}, expected [V]")
    return layout


def _layout_of_subscripts(einsum: str) -> str | None:
    """The layout of the second operand in an einsum like "BTD,DV->BTV"; None for another einsum."""
    operands, _, result = einsum.replace(" ", "").partition("->")
    hidden, _, kernel = operands.partition(",")
    if len(kernel) != 2 or not hidden:
        return None
    for layout, summed, vocabulary in (("hv", kernel[0], kernel[1]), ("vh", kernel[1], kernel[0])):
        if vocabulary not in hidden and hidden[-1] == summed and result == hidden[:-1] + vocabulary:
            return layout
    return None
