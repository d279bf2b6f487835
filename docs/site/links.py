"""Check a built site: each link leads to a file and an anchor that are there, and no page fetches anything from elsewhere.

python docs/site/links.py site

Links to other sites are checked for their form only, so the check needs no network.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from os.path import normpath
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: attributes by which a page fetches something as it opens
FETCHED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href")}


class _Page(HTMLParser):
    """The ids, the links and the fetched addresses of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if values.get(name)}
        for name in {"href", "src"} & values.keys():
            is_fetched = (tag, name) in FETCHED and values.get("rel") not in ("canonical", "next", "prev")
            (self.fetched if is_fetched else self.links).append(values[name])


def broken(site: Path) -> list[str]:
    """Return a line for each link that leads nowhere, and for each thing fetched from another site."""
    site = site.resolve()
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        if path.name == "404.html":  # its addresses are those of a server's root
            continue
        here = path.relative_to(site)
        for link in page.links + page.fetched:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                is_sound = (
                    parts.scheme in ("http", "https") and "." in parts.netloc or parts.scheme in ("mailto", "data")
                )
                if not is_sound or (link in page.fetched and parts.scheme != "data"):
                    found.append(f"{here}: {link}")
                continue
            target = Path(normpath(path.parent / unquote(parts.path))) if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            there = pages.get(target)
            if not target.exists() or (parts.fragment and there and unquote(parts.fragment) not in there.ids):
                found.append(f"{here}: {link}")
    return found


if __name__ == "__main__":
    lines = broken(Path(sys.argv[1]))
    print("\n".join(lines) or "links: all lead somewhere")
    sys.exit(bool(lines))
