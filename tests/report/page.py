"""What a reader finds on a page: tags with their attributes, and text."""

from __future__ import annotations

from html.parser import HTMLParser

from megacpp_validate.report.document import Document
from megacpp_validate.report.render.junit import render_junit
from megacpp_validate.report.render.markdown import render_markdown


class Page(HTMLParser):
    """Tags with their attributes, and the text outside of style; a tag that closes another one fails."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.pieces: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "link", "wbr", "br", "input"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.pieces.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.pieces).split())

    @property
    def links(self) -> list[str]:
        return [str(attributes.get("href")) for tag, attributes in self.tags if tag == "a"]


def show_all(*documents: Document) -> str:
    """What a reader sees, and every case that a program counts."""
    return "\n".join(f"{render_markdown(one)}\n{render_junit(one)}" for one in documents)
