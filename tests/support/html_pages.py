"""Pages of HTML, as a parser reads them and as Chromium shows them."""

import shutil
import subprocess
from html.parser import HTMLParser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
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
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.open += [tag] * (tag != "meta")
        self.loaded += [v for k, v in attributes if k in ("src", "href", "xlink:href") and not v.startswith("#")]
        self.ids += [v for k, v in attributes if k == "id"]

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if not {"style", "script"} & {*self.open[-1:]}:
            self.texts.append(text.strip())
