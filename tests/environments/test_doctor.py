"""The looks of the doctor at real processes: packages that raise, hang and die, damaged files, second copies."""

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

from megacpp_validate.environments.doctor import DoctorOptions, take_looks
from megacpp_validate.environments.interpreter import PACKAGE, InterpreterEnvironment, put_over
from megacpp_validate.evidence.doctor_look import PackageLook

TORCH = Path(str(find_spec("torch").origin)).parent  # type: ignore[union-attr]
EXTENSION = TORCH / "lib" / "libaoti_custom_ops.so"
SELF_CONTAINED = TORCH / "lib" / "libgomp.so.1"  # needs nothing but the C library
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
