"""What a package index answers, over real connections: JSON and HTML, yanked files, and servers that misbehave."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.canary.static import simple_index as under_test
from megacpp_validate.canary.static.simple_index import (
    IndexDown,
    IndexSettings,
    hide_user,
    read_index_settings,
    read_listed,
)
from tests.canary.static.small_index import UNREACHABLE, redirect, say, serve, serve_nothing, use_index, write_index

JSON = "application/vnd.pypi.simple.v1+json"
SHA = hashlib.sha256(b"a wheel").hexdigest()
NAME = "transformer-engine"


def page(*files: Mapping[str, Any], version: str = "1.1") -> bytes:
    return json.dumps({"meta": {"api-version": version}, "name": NAME, "files": list(files)}).encode()


def wheel(version: str, **more: object) -> dict[str, object]:
    name = f"transformer_engine-{version}-py3-none-any.whl"
    return {"filename": name, "url": f"../{name}", "hashes": {"sha256": SHA}, **more}


def ask(status: int, kind: str, body: bytes) -> dict[str, tuple[bool, str, str | None]]:
    with serve({f"/{NAME}/": (status, kind, body)}) as url:
        rows = read_listed(NAME, IndexSettings((url,)))
    return {row.version: (row.has_wheel, row.wheel_sha256, row.yanked) for row in rows}


def test_releases_of_json_are_put_together_from_their_files() -> None:
    files = [
        wheel("2.20.2"),
        {"filename": "transformer_engine-2.21.0.tar.gz", "hashes": {}},
        wheel("2.19.0", yanked="wrong sums"),
        wheel("2.18.0", yanked=True),
        wheel("2.16.0", yanked=""),
        wheel("2.17.1", yanked=True),
        {"filename": "transformer_engine-2.17.1.tar.gz", "yanked": False},
        {"filename": "transformer_engine_cu12-2.20.2-py3-none-any.whl", "hashes": {}},
        {"filename": "transformer_engine-2.20.2-py3-none-any.whl.asc"},
        {"filename": "../../transformer_engine-2.22.0'; rm -py3-none-any.whl"},
    ]
    assert ask(200, JSON, page(*files)) == {
        "2.20.2": (True, SHA, None),
        "2.21.0": (False, "", None),
        "2.19.0": (False, SHA, "wrong sums"),
        "2.18.0": (False, SHA, ""),
        "2.16.0": (True, SHA, None),  # in JSON `""` is no reason, as pip reads it; in HTML it is one
        "2.17.1": (False, SHA, None),  # a release is yanked where all of its files are
    }


@pytest.mark.parametrize("order", [1, -1])
def test_two_spellings_of_one_version_are_one_release(order: int) -> None:
    files = [wheel("2.10.0"), {"filename": "transformer_engine-2.10.tar.gz", "hashes": {}}][::order]
    assert ask(200, JSON, page(*files)) == {"2.10.0": (True, SHA, None)}


def test_an_index_that_speaks_html_alone_is_read_too() -> None:
    rows = f"""<!DOCTYPE html><a href="/f/transformer_engine-2.20.2-py3-none-any.whl#sha256={SHA}">x</a>
    <a href="/f/transformer_engine-2.19.0-py3-none-any.whl" data-yanked="wrong &amp; bad">x</a><a name="top">y</a>"""
    assert ask(200, "text/html", rows.encode()) == {
        "2.20.2": (True, SHA, None),
        "2.19.0": (False, "", "wrong & bad"),
    }


def test_an_address_that_is_none_is_told_without_who_asks() -> None:
    with pytest.raises(IndexDown, match="did not say which releases") as fault:
        read_listed(NAME, IndexSettings(("http://me:secret@[bad/simple",)))
    assert "secret" not in str(fault.value)
    assert "[bad/simple" in str(fault.value)


def test_a_pip_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "_LIMIT_S", 0.001)
    with pytest.raises(IndexDown, match=r"pip config list. was not done after 0\.001 s"):
        read_index_settings()


GARBAGE = {
    "a log-in page": (200, "text/html", b"<html><a href='/login'>log in</a></html>"),
    "no text": (200, "text/html", b"\xff\xfe\x00"),
    "cut short": (200, JSON, page(wheel("2.20.2"))[:-9]),
    "another shape": (200, JSON, b'{"files": [1], "meta": {"api-version": "1.0"}}'),
    "a list": (200, JSON, b"[]"),
    "a later version": (200, JSON, page(wheel("2.20.2"), version="2.0")),
    "no file": (200, JSON, page()),
    "of another package": (200, JSON, page({"filename": "torch-2.13.0-py3-none-any.whl"})),
    "nested too deep": (200, JSON, b'{"files": ' + b"[" * 200_000),
    "a broken declaration": (200, "text/html", b"<a href='/x.whl'>x</a><![foo[x]]>"),
    "a fault of the server": (503, "text/plain", b"down"),
    "who are you": (401, "text/plain", b"no"),
    "no such package": (404, "text/plain", b"no"),
}


@pytest.mark.parametrize("answer", GARBAGE.values(), ids=GARBAGE)
def test_what_is_no_list_of_files_is_refused_with_a_next_step(answer: tuple[int, str, bytes]) -> None:
    with pytest.raises(IndexDown) as fault:
        ask(*answer)
    for word in ("Likely cause", "Next step", "nothing was changed"):
        assert word in str(fault.value)


def test_an_answer_shorter_than_it_says_is_refused() -> None:
    body = page(wheel("2.20.2"), wheel("2.21.0"))

    class Short(bytes):
        def __len__(self) -> int:
            return super().__len__() + 100

    with pytest.raises(IndexDown, match=r"did not say|came|Incomplete"):
        ask(200, JSON, Short(body))


@pytest.mark.parametrize("said", [b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{}"])
def test_what_is_no_http_is_refused_too(said: bytes) -> None:
    with say(said) as url, pytest.raises(IndexDown, match="did not say"):
        read_listed(NAME, IndexSettings((url,)))


def test_a_version_that_is_too_long_is_no_release_and_hides_no_other() -> None:
    assert set(ask(200, JSON, page(wheel("2.20.2"), wheel("2." + "1" * 80)))) == {"2.20.2"}


def test_credentials_go_to_the_index_and_not_to_where_it_redirects() -> None:
    heard: dict[str, str | None] = {}
    body = page(wheel("2.20.2"))
    with redirect(heard, (200, JSON, body)) as url:
        read_listed(NAME, IndexSettings((url.replace("http://", "http://me:secret@"),)))
    assert heard["index"] is not None
    assert heard["elsewhere"] is None


def test_nobody_there_and_nobody_who_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "_LIMIT_S", 0.2)
    with pytest.raises(IndexDown, match="cannot be reached"):
        read_listed(NAME, IndexSettings((UNREACHABLE,)))
    with serve_nothing() as url, pytest.raises(IndexDown, match="cannot be reached"):
        read_listed(NAME, IndexSettings((url,)))


def test_a_second_index_adds_and_one_that_is_down_is_no_empty_one(tmp_path: Path) -> None:
    extra = write_index(tmp_path, {"2.22.0": {"transformer_engine/__init__.py": ""}})
    with serve({f"/{NAME}/": (200, JSON, page(wheel("2.20.2")))}) as url:
        settings = IndexSettings((url, extra, (tmp_path / "nothing").as_uri()))
        assert {row.version for row in read_listed(NAME, settings)} == {"2.20.2", "2.22.0"}
        with pytest.raises(IndexDown):  # else its releases would look as if they were deleted
            read_listed(NAME, IndexSettings((url, UNREACHABLE)))


def test_the_index_is_the_one_that_pip_is_configured_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_index(monkeypatch, "https://me:secret@mirror.example/simple/")
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = https://other.example\ncert = /ca.pem\n[download]\nextra-index-url = https://b\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    settings = read_index_settings()
    assert settings == IndexSettings(("https://me:secret@mirror.example/simple", "https://b"), "/ca.pem")
    assert "secret" not in settings.shown
    assert hide_user("https://me:secret@mirror.example/simple") == "https://mirror.example/simple"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(IndexDown, match="no index"):
        read_index_settings()
