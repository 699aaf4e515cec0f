"""Every spelling of an environment, and files that are none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.catalog.images import read_images, read_needs
from megacpp_validate.environments.doctor_rules import DoctorResult
from megacpp_validate.environments.fits import Part, Stack, read_given
from megacpp_validate.errors import WrongArguments
from megacpp_validate.evidence.doctor_look import Distribution, PackageLook, PathLook
from megacpp_validate.evidence.receipt import Library

FREEZE = """
# comment
--extra-index-url https://download.pytorch.org/whl/cu130
nvidia-cublas==13.1.0.3
Torch==2.11.0+cu130 \\
    --hash=sha256:00
transformer_engine==2.12.0
apex @ file:///wheels/apex-0.1-py3-none-any.whl
-e git+https://github.com/a/b@0123#egg=my_project
"""
BAD = {
    "table.txt": "Package    Version\n---------- -------\nnumpy      2.0\n",
    "comments.txt": "# nothing\n--no-index\n",
    "other.json": '{"schema_id": "megacpp-validate/static/1"}',
    "cut.json": '{"schema_id": "megacpp-validate/doctor/1"',
    "deep.json": "[" * 100_000,
    "binary.txt": b"\xff\xfe\x00",
}


@pytest.fixture
def read(catalog: Catalog):  # type: ignore[no-untyped-def]
    """Texts -> the environment."""
    images = read_images(catalog)
    needs = read_needs(catalog)
    return lambda *texts: read_given(texts, needs, images.base, os.environ)


def versions(given: Stack) -> dict[str, str]:
    return {name: part.version for name, part in given.parts.items()}


@pytest.mark.parametrize(
    "text",
    ["cublas=13.1,cudnn=9.14,torch=2.11", "cublas=13.1 cudnn==9.14, torch=2.11",
     "nvidia-cublas=13.1,cudnn=9.14,torch=2.11"],
)  # fmt: skip
def test_words(read, text: str) -> None:  # type: ignore[no-untyped-def]
    assert versions(read(text)) == {"cublas": "13.1", "cudnn": "9.14", "torch": "2.11"}


def test_a_freeze_and_words_after_it(read, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "freeze.txt"
    file.write_text(FREEZE)
    known = {"nvidia-cublas": "13.1.0.3", "torch": "2.11.0+cu130", "transformer-engine": "2.12.0"}
    assert versions(read(str(file))) == known
    assert versions(read(str(file), "torch=2.12,cudnn=9.22")) == known | {"torch": "2.12", "cudnn": "9.22"}
    assert read(str(file)).with_release("2.20.2").version("transformer-engine").public == "2.20.2"


def test_doctor_reports_what_is_loaded(read, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = PathLook(
        python="3.12.3", executable="python3", soabi="", machine="x86_64", torch="2.11.0+cu130", torch_cuda="13.0",
        driver="580.95", distributions=(Distribution("nvidia-cublas", "13.6.0.2", "/site"),),
    )  # fmt: skip
    look = PackageLook("torch", installed=True, libraries=(Library("libcublasLt", "13.1.0"), Library("libcudnn", "")))
    later = PackageLook("deep_gemm", installed=True, libraries=(Library("libcublasLt", ""),))  # read there, not known
    result = DoctorResult(
        tool="t", interpreter="python3", target="h200", stack="pin", path=path, packages=(look, later), differences=(),
        seconds=1.0,
    )  # fmt: skip
    file = tmp_path / "doctor.json"
    file.write_text(result.model_dump_json())
    assert versions(read(str(file))) == {
        "nvidia-cublas": "13.6.0.2", "python": "3.12.3", "torch": "2.11.0+cu130", "driver": "580.95", "cuda": "13.0",
        "cublas": "13.1.0",
    }  # fmt: skip


def test_an_interpreter_by_path_by_name_and_by_its_folder(read, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    import pydantic

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    for text in (sys.executable, str(tmp_path)):
        assert versions(read(text))["pydantic"] == pydantic.VERSION


@pytest.mark.parametrize("tag", ["ngc-26.07", "26.07-py3", "26.07"])
def test_a_tag_of_the_matrix(read, tag: str) -> None:  # type: ignore[no-untyped-def]
    found = read(tag).parts
    assert found["cudnn"] == Part(name="cudnn", version="9.24.0.43", brought_by="base ngc-26.07")
    assert (found["driver"].version, found["flash-attn"].version) == ("580", "")


@pytest.mark.parametrize("name", BAD)
def test_a_file_of_another_kind_is_refused(read, name: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file, text = tmp_path / name, BAD[name]
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(WrongArguments, match=rf"{name}: .*Next step"):
        read(str(file))


@pytest.mark.parametrize(
    "text", ["", "99.99-py3", "/nowhere/freeze.txt", "cublas", "cublas=new", "nvidia-cudnn-cu13=91400", "=1"]
)
def test_a_text_that_names_no_environment_is_refused(read, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(WrongArguments, match="Next step"):
        read(text)
