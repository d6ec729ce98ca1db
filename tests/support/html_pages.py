"""Pages of HTML, as a parser reads them and as Chromium shows them."""

import base64
import hashlib
import shutil
import subprocess
from html.parser import HTMLParser

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run"
    " --disable-background-networking "
)
QUIET += "--disable-component-update --disable-sync --window-size=1200,2400"


def chromium(folder, address, *options):
    """What Chromium prints, with its files in the folder."""
    command = [CHROMIUM, *QUIET.split(), f"--user-data-dir={folder / 'profile'}", *options, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


class Read(HTMLParser):
    """What a browser would show and load. Tags that are not closed in their order fail."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.loaded, self.ids = [], [], [], [], []
        self.policy, self.inline = "", {"style": [], "script": []}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.open += [tag] * (tag != "meta")
        self.loaded += [
            v for k, v in attributes if k in ("src", "href", "xlink:href") and not v.startswith("#")
        ]
        self.ids += [v for k, v in attributes if k == "id"]
        if tag == "meta" and ("http-equiv", "Content-Security-Policy") in attributes:
            self.policy += dict(attributes)["content"]
        self.used = tag in self.inline and ("type", "application/json") not in attributes
        if self.used:
            self.inline[tag].append("")

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        tag = self.open[-1] if self.open else ""
        if tag not in self.inline:
            self.texts.append(text.strip())
        elif self.used:
            self.inline[tag][-1] += text


def browser_rules(page):
    """The rules of the page's Content-Security-Policy, without those that let its own style and
    script run, which are checked here: each such element is there once, and its text has the
    digest.
    """
    rules = page.policy.split("; ")
    for tag, rule in (("style", "style-src-elem"), ("script", "script-src")):
        assert len(page.inline[tag]) <= 1, tag
        for text in page.inline[tag]:
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            rules.remove(f"{rule} 'sha256-{digest}'")
    return rules
