"""Release sources through pip: fetched once, kept by hash, and in every trouble an error that a person can act on."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.canary.package_index import UnknownRelease
from megacpp_validate.canary.static import sources as under_test
from megacpp_validate.canary.static.release import Found, ReleaseUnreadable
from megacpp_validate.canary.static.sources import Sources, SourceUnavailable
from megacpp_validate.errors import WrongArguments
from tests.canary.static.small_index import PACKAGE, UNREACHABLE, serve, serve_nothing, use_index, write_index

OFFERED = ["1.9.0", "2.8.0", "2.9.0", "2.10.0", "2.11.0"]


@pytest.fixture(scope="module")
def offered(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An index of small releases, of which 1.9.0 holds no package."""
    files = dict.fromkeys(OFFERED, PACKAGE) | {"1.9.0": {"transformer_engine/readme.txt": ""}}
    return write_index(tmp_path_factory.mktemp("index"), files)


@pytest.fixture
def index(offered: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """That index is the one that pip asks."""
    use_index(monkeypatch, offered)
    return offered


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def listing(folder: Path) -> list[str]:
    """Every file below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def assert_actionable(text: str, *words: str) -> None:
    """It says what was wanted, a likely cause, and the next step."""
    for word in (*words, "Likely cause", "Next step"):
        assert word in text, text


def test_a_release_is_fetched_once_and_then_read_without_an_index(
    index: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Sources(cache)
    release = first.release("2.9.0")
    assert isinstance(release.lookup("transformer_engine.pytorch", "Linear"), Found)
    use_index(monkeypatch, UNREACHABLE)
    again = Sources(cache)
    assert again.release("2.9.0").source == release.source
    assert not list(cache.glob("fetch-*"))


def test_a_damaged_wheel_is_fetched_again(index: str, cache: Path) -> None:
    wheel = Sources(cache).wheel("2.9.0")
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[:50] + bytes([whole[50] ^ 255]) + whole[51:])
    assert Sources(cache).wheel("2.9.0").read_bytes() == whole
    wheel.unlink()
    assert Sources(cache).wheel("2.9.0").read_bytes() == whole


def test_an_unknown_release_names_the_nearest(index: str, cache: Path) -> None:
    with pytest.raises(UnknownRelease) as refused:
        Sources(cache).release("2.9.7")
    assert "no wheel of transformer-engine 2.9.7" in str(refused.value)
    assert "Nearest: 2.8.0, 2.9.0, 2.10.0, 2.11.0" in str(refused.value)
    assert listing(cache) == []


@pytest.mark.parametrize("name", ["latest", "2.x", "../2.9.0", "2.9.0 --pre", "-r x", "2.9.0;x", "/nowhere/at/all"])
def test_what_is_no_version_and_no_folder_is_refused_without_asking_the_index(
    name: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_index(monkeypatch, UNREACHABLE)
    with pytest.raises(UnknownRelease, match=r"is not a release.*Next step"):
        Sources(cache).release(name)
    assert not cache.exists()


@pytest.mark.parametrize(("name", "wanted"), [("transformer_engine-2.9.0", "2.9.0"), ("torch-2.9.0", "")])
def test_a_folder_has_the_version_of_its_release(name: str, wanted: str, tmp_path: Path) -> None:
    (tmp_path / "transformer_engine" / "pytorch").mkdir(parents=True)
    (tmp_path / "transformer_engine" / "pytorch" / "__init__.py").touch()
    (tmp_path / f"{name}.dist-info").mkdir()
    assert Sources().release(str(tmp_path)).version == (wanted or str(tmp_path))


def test_a_folder_without_the_package_is_refused(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable) as refused:
        Sources(cache).release(str(tmp_path))
    assert_actionable(str(refused.value), str(tmp_path), "transformer_engine")


def test_a_wheel_without_the_package_says_so(index: str, cache: Path) -> None:
    with pytest.raises(ReleaseUnreadable, match="an empty placeholder release"):
        _ = Sources(cache).release("1.9.0").tree


def test_an_unwritable_cache_is_told_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unwritable = tmp_path / "a-file" / "cache"  # that not even root can write
    unwritable.parent.write_text("")
    use_index(monkeypatch, UNREACHABLE)
    with pytest.raises(WrongArguments) as refused:
        Sources(unwritable).release("2.9.0")
    assert_actionable(str(refused.value), str(unwritable), "cannot be written", under_test.CACHE_VARIABLE)


def test_a_tree_that_cannot_be_kept_is_read_all_the_same(index: str, cache: Path) -> None:
    cache.mkdir()
    (cache / "trees").write_text("in the way")
    assert isinstance(Sources(cache).release("2.9.0").lookup("transformer_engine.pytorch", "Linear"), Found)


WHEEL = "transformer_engine-2.9.0-py3-none-any.whl"
PAGE = ("/transformer-engine/", (200, "text/html", f'<a href="{WHEEL}">{WHEEL}</a>'.encode()))
ERROR_PAGE = (200, "text/html", b"<html>Please log in</html>")


TROUBLES: dict[str, tuple[dict[str, tuple[int, str, bytes]] | None, str]] = {
    "refused": (None, "cannot be reached"),
    "html-for-a-wheel": ({PAGE[0]: PAGE[1], WHEEL: ERROR_PAGE}, "error page"),
    "503": ({"/": (503, "text/html", b"down")}, "cannot be reached"),
    "no-page": ({"/transformer-engine/": (200, "text/html", b"")}, "no such package"),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_an_index_in_trouble_is_told_and_nothing_is_kept(
    name: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, word = TROUBLES[name]
    with serve(answers or {}) as url:
        use_index(monkeypatch, url if answers is not None else UNREACHABLE)
        with pytest.raises(SourceUnavailable) as refused:
            Sources(cache).release("2.9.0")
    assert_actionable(str(refused.value), "transformer-engine 2.9.0", word)
    assert listing(cache) == []


def test_an_index_that_never_answers_is_not_waited_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "FETCH_LIMIT_S", 2.0)
    with serve_nothing() as url:
        use_index(monkeypatch, url)
        with pytest.raises(SourceUnavailable) as refused:
            Sources(cache).release("2.9.0")
    assert_actionable(str(refused.value), "transformer-engine 2.9.0", "after 2 s")
    assert listing(cache) == []
