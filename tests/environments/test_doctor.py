"""The looks of the doctor at real processes: packages that raise, hang and die, damaged files, second copies.

And every spelling of an environment, and files that are none.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import sys
from dataclasses import replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.catalog.images import read_images, read_needs
from megacpp_validate.environments.doctor import DoctorOptions, read_given, take_looks
from megacpp_validate.environments.doctor_rules import DoctorResult
from megacpp_validate.environments.fits import TE, Part, Stack
from megacpp_validate.environments.interpreter import PACKAGE, InterpreterEnvironment, put_over
from megacpp_validate.errors import WrongArguments
from megacpp_validate.evidence.doctor_look import Distribution, PackageLook, PathLook
from megacpp_validate.evidence.receipt import Library

TORCH = Path(str(find_spec("torch").origin)).parent  # type: ignore[union-attr]
EXTENSION = TORCH / "lib" / "libaoti_custom_ops.so"
SELF_CONTAINED = TORCH / "lib" / "libgomp.so.1"  # needs nothing but the C library
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
LIMITS = DoctorOptions(limit_s=20.0, jobs=2)


def plant(folder: Path, name: str, body: str) -> Path:
    package = folder / name
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(body)
    return package


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site folder with a torch that is quick to import and is built on the real one's files."""
    site = tmp_path / "site"
    torch = plant(
        site, "torch", "__version__ = '2.13.0'\nclass cuda:\n    is_available = staticmethod(lambda: False)\n"
    )
    (torch / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda: str | None = '13.0'\n")
    (torch / "include").symlink_to(TORCH / "include")
    return site


@pytest.fixture
def environment(site: Path) -> InterpreterEnvironment:
    variables = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    return put_over(InterpreterEnvironment((sys.executable,), variables, "a test"), [site])


def take(environment: InterpreterEnvironment, *names: str, limits: DoctorOptions = LIMITS) -> dict[str, PackageLook]:
    return {look.package: look for look in take_looks(environment, names, limits)[1]}


BROKEN = {
    "raises": "raise OSError('undefined symbol: foo')",
    "leaves": "import sys; sys.exit(0)",
    "aborts": "import os; os.abort()",
    "crashes": "import ctypes; ctypes.string_at(0)",
    "ends": "import os; print('goodbye', flush=True); os._exit(3)",
    "lies": "class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd",
}


def test_whatever_an_import_does_is_a_row(site: Path, environment: InterpreterEnvironment) -> None:
    for name, body in BROKEN.items():
        plant(site, name, body)
    looks = take(environment, *BROKEN, "not_there")
    raised = {name: look.failure.type for name, look in looks.items() if look.failure}
    ended = {name: look.ended for name, look in looks.items() if look.ended}
    assert raised == {"raises": "OSError", "leaves": "SystemExit", "lies": "lies.Odd"}
    assert ended == {"aborts": "signal 6", "crashes": "signal 11", "ends": "exit status 3"}
    assert "goodbye" in looks["ends"].words
    assert "Fatal Python error" in looks["crashes"].words
    assert not looks["not_there"].installed


def test_an_import_that_hangs_is_stopped_and_says_where(site: Path, environment: InterpreterEnvironment) -> None:
    plant(site, "hangs", "import time\ntime.sleep(600)\n")
    look = take(environment, "hangs", limits=DoctorOptions(limit_s=4.0, jobs=1))["hangs"]
    assert look.ended == "killed after 4 s"
    assert "hangs/__init__.py" in look.words


def test_a_call_that_ends_the_process_loses_nothing_else(site: Path, environment: InterpreterEnvironment) -> None:
    """What reads sizes from the wrong place may as well read outside of its memory."""
    plant(
        site,
        "torch",
        "class Any:\n    is_available = as_strided = lambda *_: Any\ncuda, arange = Any, lambda *_, **__: Any",
    )
    plant(site, "deep_gemm", "__version__ = '0.1.7'")
    (plant(site, "deep_gemm/utils", "") / "layout.py").write_text(
        "import ctypes\nget_mn_major_tma_aligned_tensor = lambda tensor: ctypes.string_at(0)\n"
    )
    look = take(environment, "deep_gemm")["deep_gemm"]
    assert (look.version, look.failure, look.ended) == ("0.1.7", None, "")
    assert [(one.right, one.answered.partition(":")[0]) for one in look.behaviours] == [(False, "signal 11")]


def test_a_file_that_the_loader_refuses_is_looked_at_all_the_same(
    site: Path, environment: InterpreterEnvironment
) -> None:
    package = plant(site, "deep_gemm", "import ctypes, os; ctypes.CDLL(__path__[0] + '/_C.so', mode=os.RTLD_NOW)")
    old = re.findall(rb"(?<=\0)_ZN3c10\w+(?=\0)", image := EXTENSION.read_bytes())[0]
    (package / "_C.so").write_bytes(image.replace(b"\0" + old + b"\0", b"\0" + old[:-1] + b"Q\0"))
    new = f"{old[:-1].decode()}Q"
    (package / "_D.cpython-399-x86_64-linux-gnu.so").write_bytes(b"cut short")
    variables = {**environment.variables, "LD_LIBRARY_PATH": str(TORCH / "lib")}
    look = take(replace(environment, variables=variables), "deep_gemm")["deep_gemm"]
    assert look.failure is not None
    assert new in look.failure.message
    first, second = look.extensions
    assert [wanted.symbol for wanted in first.wanted] == [new]
    assert (first.loaded, second.tag, bool(second.problem)) == (False, "cpython-399-x86_64-linux-gnu", True)


def write_record(site: Path, name: str, version: str) -> None:
    """Metadata of all files of a package as they are now, as pip leaves it."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for file in sorted((site / name).rglob("*.py")):
        digest = base64.urlsafe_b64encode(sha256(file.read_bytes()).digest()).decode().rstrip("=")
        lines.append(f"{file.relative_to(site)},sha256={digest},{file.stat().st_size}\n")
    (info / "RECORD").write_text("".join(lines))


def test_a_package_that_lost_its_first_file_loads_nothing(site: Path, environment: InterpreterEnvironment) -> None:
    """Python imports what is left of it as a namespace package."""
    (plant(site, "triton", "") / "language.py").write_text("")
    write_record(site, "triton", "3.5.0")
    (site / "triton" / "__init__.py").unlink()
    failure = take(environment, "triton")["triton"].failure
    assert failure is not None
    assert failure.message.startswith("triton/__init__.py was installed and is gone")


def test_second_copies_and_second_runtimes_are_seen(
    site: Path, environment: InterpreterEnvironment, tmp_path: Path
) -> None:
    plant(site, "triton", "__version__ = '3.6.0'")
    other = plant(tmp_path / "other", "triton", "__version__ = '3.5.0'")
    runtimes = tmp_path / "cuda"
    runtimes.mkdir()
    for name in ("libcudart.so.12", "libcudart.so.13"):
        shutil.copy(SELF_CONTAINED, runtimes / name)
    variables = {
        **environment.variables,
        "PYTHONPATH": f"{environment.variables['PYTHONPATH']}:{tmp_path / 'other'}",
        "LD_LIBRARY_PATH": str(runtimes),
    }
    path, (look,) = take_looks(replace(environment, variables=variables), ["triton"], LIMITS)
    assert (look.version, look.copies) == ("3.6.0", (str(other / "__init__.py"),))
    assert look.runtimes == {name: str(runtimes / name) for name in ("libcudart.so.12", "libcudart.so.13")}
    assert (path.torch, path.torch_cuda) == ("2.13.0+cpu", "13.0")
    assert any(one.name == "pytest" for one in path.distributions)


# --- an environment as a person names it ------------------------------------------------------------------------------


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
        variables={"NVTE_ON": "1", "NVTE_OFF": "0"},
    )  # fmt: skip
    libraries = (Library("libcublasLt", "13.3.0, 13.1.0"), Library("libcudnn", ""), Library("libcudart", "12.9"))
    looks = (PackageLook("torch", True, libraries=libraries), PackageLook(TE, True, libraries=libraries[1:]))
    later = PackageLook("deep_gemm", installed=True, libraries=(Library("libcublasLt", "13.0"),))
    result = DoctorResult(
        tool="t", interpreter="python3", target="h200", stack="pin", path=path, packages=(*looks, later),
        differences=(), seconds=1.0,
    )  # fmt: skip
    file = tmp_path / "doctor.json"
    file.write_text(result.model_dump_json())
    assert versions(read(str(file))) == {
        "nvidia-cublas": "13.6.0.2", "python": "3.12.3", "torch": "2.11.0+cu130", "driver": "580.95", "cuda": "13.0",
        "cublas": "13.1.0", "NVTE_ON": "1",
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
