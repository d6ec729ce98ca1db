"""How Sphinx builds the documentation.

Its source folder is the repository, so that links work on GitHub too.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

project = "jaxppo"
release = version = importlib.metadata.version("jaxppo")
author = "the jaxppo authors"
root_doc = "docs/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**"]
exclude_patterns = [
    "docs/pull_requests",
    ".*",
    "build",
    "dist",
    "**/node_modules",
    "**/*.py",
    "**/__pycache__",
]
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]

with (Path(__file__).parents[1] / "pyproject.toml").open("rb") as _file:
    _urls = tomllib.load(_file)["project"]["urls"]

html_theme = "furo"
html_theme_options = {
    "source_repository": _urls["Repository"],
    "source_branch": "main",
    "source_directory": "",
}
html_title = f"jaxppo {release}"
html_copy_source = False
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["jaxppo.css"]
html_extra_path = ["root"]
pygments_style = "default"

myst_heading_anchors = 3
nb_execution_mode = "force"  # notebooks are tracked without results
nb_execution_raise_on_error = True
nb_execution_timeout = 300
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 90
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

# Other projects' names become links where their inventories can be fetched, as they can on the
# machine that publishes.
_OTHERS = {
    "jax": "https://docs.jax.dev/en/latest/",
    "flax": "https://flax.readthedocs.io/en/stable/",
    "optax": "https://optax.readthedocs.io/en/stable/",
    "orbax": "https://orbax.readthedocs.io/en/stable/",
}
_SHORT = {
    "jnp": "jax.numpy",
    "lax": "jax.lax",
    "nnx": "flax.nnx",
    "nn": "flax.linen",
    "ocp": "orbax.checkpoint",
}


def _is_there(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


intersphinx_mapping = {
    name: (url, None) for name, url in _OTHERS.items() if _is_there(f"{url}objects.inv")
}

_SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Example|Examples):$")
# Whose names pages call without saying where they stand.
_MODULES = (
    "base.kl",
    "base.metrics",
    "batch.nucleus",
    "head",
    "losses.covariance",
    "mismatch",
    "policy_losses",
)
_MODULES += ("sharding", "sharding.testing", "step.staleness")
_NAME = re.compile(r"([A-Za-z_][\w.]*)(\(.*\))?$")


def docstring_to_rst(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Docstrings are plain text with formulas: what reST would read in them is escaped, `code` and
    formula blocks stay.

    Example:
      >>> lines = ["Of `x`, at most |x_t|:", "", "    y = a * x", "", "Args:", "  x: `f32[R, T]`."]
      >>> docstring_to_rst(None, "function", "f", None, None, lines)
      >>> print("\\n".join(lines))
      Of ``x``, at most \\|x_t\\|:
      <BLANKLINE>
      ::
      <BLANKLINE>
          y = a * x
      <BLANKLINE>
      Args:
        x: ``f32[R, T]``.
    """
    out: list[str] = []
    verbatim = in_section = False
    for line in lines:
        if line == "Returns:":  # whose first line would be read as a type where it holds a colon
            out.append(":returns:")
            in_section = True
            continue
        if not line.strip():
            verbatim = False
        elif not verbatim:
            in_section = in_section or bool(_SECTION.match(line))
            formula = (
                not in_section and line.startswith("    ") and (not out or not out[-1].strip())
            )
            follows = formula and len(out) > 2 and out[-2].startswith("    ")
            if formula and not follows:
                out += ["::", ""]
            verbatim = formula or line.lstrip().startswith(">>>")
        out.append(line if verbatim else _escape(line))
    lines[:] = out


def _escape(line: str) -> str:
    pieces = re.split(r"(`+[^`]+`+)", line)
    for i, piece in enumerate(pieces):
        if i % 2:
            joined = "\\ " if re.match(r"\w", pieces[i + 1]) else ""  # as in `jax.Array`s
            pieces[i] = "``" + piece.strip("`") + "``" + joined
        else:
            pieces[i] = re.sub(r"_(?![A-Za-z0-9])", r"\\_", re.sub(r"([\\*|])", r"\\\1", piece))
    return "".join(pieces)


def short_types(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str, returns: str
) -> Any:
    """Types by the names that the code has for them."""
    modules = r"\b(jaxlib\._jax|jax|numpy|jaxtyping)\.(?=[A-Za-z])"
    return tuple(x and re.sub(modules, "", x) for x in (signature, returns))


def elsewhere(inventory: Mapping[str, Mapping[str, Any]], name: str) -> str | None:
    """The address of a Python name of another project; None if no inventory has it.

    Example:
      >>> from types import SimpleNamespace
      >>> inventory = {"py:function": {"jax.numpy.dot": SimpleNamespace(uri="https://docs.jax.dev/dot.html")}}
      >>> elsewhere(inventory, "jnp.dot"), elsewhere(inventory, "jnp.dots")
      ('https://docs.jax.dev/dot.html', None)
    """
    first, dot, rest = name.partition(".")
    full = _SHORT.get(first, first) + dot + rest
    items = (
        known[full] for kind, known in inventory.items() if kind.startswith("py:") and full in known
    )
    found = next(items, None)
    return None if found is None or not dot else str(found.uri)


def link_public_names(app: Any, doctree: Any, docname: str) -> None:
    """Inline code that names or calls something in the API reference, or in another project's,
    becomes a link to it.
    """
    from docutils import nodes
    from sphinx.ext.intersphinx import InventoryAdapter
    from sphinx.util.nodes import make_refnode

    objects, inventory = app.env.domains["py"].objects, InventoryAdapter(app.env).main_inventory
    for literal in list(doctree.findall(nodes.literal)):
        name = _NAME.match(literal.astext())
        inside = literal.parent
        while inside is not None and not isinstance(inside, (nodes.reference, nodes.title)):
            inside = inside.parent
        if inside is not None or name is None:
            continue
        known = (
            prefix + name[1]
            for prefix in ("", "jaxppo.", *(f"jaxppo.{module}." for module in _MODULES))
        )
        found = next((full for full in known if full in objects), None)
        if found is not None:
            entry = objects[found]
            where = make_refnode(
                app.builder, docname, entry.docname, entry.node_id, literal.deepcopy(), found
            )
            literal.replace_self(where)
        elif (address := elsewhere(inventory, name[1])) is not None:
            literal.replace_self(nodes.reference("", "", literal.deepcopy(), refuri=address))


def trim_blocks(app: Any, doctree: Any) -> None:
    """An example ends with a blank line, where doctest's output ends; it is not shown."""
    from docutils import nodes

    for block in doctree.findall(nodes.literal_block):
        text = block.astext().rstrip()
        block.rawsource, block.children = text, []
        block += nodes.Text(text)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", docstring_to_rst, priority=400)
    app.connect("autodoc-process-signature", short_types)
    app.connect("doctree-read", trim_blocks)
    app.connect("doctree-resolved", link_public_names)
