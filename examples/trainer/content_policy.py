"""What a browser may do with a page that shows texts of others: run the page's own script, and
load nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html


def policy_tag(style: str, script: str | None = None, style_attributes: bool = False) -> str:
    """The element for a page's head that lets a browser use this style element and run this script,
    and no others.

    Args:
      style: the text of the page's style element.
      script: that of its script element, None for none.
      style_attributes: elements have styles of their own, as those of drawings.

    Content Security Policy Level 3, https://www.w3.org/TR/CSP3/
    """
    rules = [
        "default-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        f"style-src-elem {_digest(style)}",
    ]
    if style_attributes:
        rules.append("style-src-attr 'unsafe-inline'")
    if script is not None:
        rules.append(f"script-src {_digest(script)}")
    return f'<meta http-equiv="Content-Security-Policy" content="{html.escape("; ".join(rules))}">'


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
