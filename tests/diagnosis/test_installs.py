"""Each row turns what a real install raises, as the bridge keeps it, into its likely cause and the next step."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path

import pytest

from megacpp_validate.bridge.imports import TE
from megacpp_validate.bridge.vendor import Install, look_for_te, read_failure
from megacpp_validate.diagnosis.installs import ImportFailure, explain_reason

NAMES = ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")
WHOLE = dict.fromkeys(NAMES, "2.20.2")


def explain(fault: BaseException, install: Install | None = None) -> str:
    """What the host makes of a failed import: the facts travel as JSON."""
    facts = json.dumps({**read_failure(fault), "install": (install or look_for_te())._asdict()})
    return explain_reason(TE._explain(fault), ImportFailure.model_validate_json(facts))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder that looks like the sources."""
    for folder in ("", "pytorch", "common"):
        (tmp_path / "transformer_engine" / folder).mkdir(exist_ok=True)
        (tmp_path / "transformer_engine" / folder / "__init__.py").touch()
    return tmp_path / "transformer_engine"


def missing_module(name: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"No module named '{name}'", name=name)


def syntax_error() -> SyntaxError:
    return SyntaxError("'(' was never closed", ("/site/transformer_engine/pytorch/x.py", 12, 1, "f(", 12, 2))


def while_handling(fault: BaseException, other: BaseException) -> BaseException:
    fault.__context__ = other
    return fault


SAID = [
    # what is raised, what is installed besides the sources, likely cause, next step
    (SystemExit(1), WHOLE, "ends the program", "look at the line"),
    (syntax_error(), WHOLE, r"pytorch/x\.py is damaged \(line 12\)", "reinstall"),
    (ValueError("source code string cannot contain null bytes"), WHOLE, "file is damaged", "__pycache__"),
    (OSError("/site/libtransformer_engine.so: file too short"), WHOLE,
     r"libtransformer_engine\.so is damaged \(file too short\)", "reinstall"),
    (ImportError("dynamic module does not define module export function (PyInit_transformer_engine_torch)"), WHOLE,
     "built for another Python or is damaged", "reinstall"),
    (ImportError('generic_type: type "DType" is already registered!'), WHOLE, "two builds of it", "reinstall"),
    (PermissionError(13, "Permission denied", "/s/te/x.py"), WHOLE, r"/s/te/x\.py .*Permission", "rights"),
    (OSError(116, "Stale file handle", "/nfs/te.py"), WHOLE, r"/nfs/te\.py .*Stale file handle", "mount"),
    (while_handling(ValueError("nothing else"), missing_module("onnxscript")), WHOLE, "needs .*`onnxscript`", "pip"),
    (missing_module("quack.layout_utils"), WHOLE, "flash-attn-4 .*`quack.layout_utils`", "quack-kernels"),
    (missing_module("onnxscript"), WHOLE, "needs the Python package `onnxscript`", "pip install onnxscript"),
    (missing_module("transformer_engine_torch"), {"transformer-engine": "2.20.2", "transformer-engine-cu12": "2.20.2"},
     "no torch extension", "pip install"),
    (missing_module("transformer_engine.pytorch.nothing"), WHOLE, "lacks its module .*leftovers", "remove that folder"),
    (OSError("/s/libtransformer_engine.so: undefined symbol: cublasLtGroupedMatrixLayoutInit_internal"), WHOLE,
     "built for another cuBLAS", "pin nvidia-cublas"),
    (ImportError("/s/transformer_engine_torch.so: undefined symbol: _ZN3c104cuda14ExchangeDeviceEa"), WHOLE,
     "built for another torch", "rebuild the extension"),
    (OSError("/lib/libc.so.6: version `GLIBC_2.38' not found (required by libtransformer_engine.so)"), WHOLE,
     r"another Linux libraries .*GLIBC_2\.38", "newer base image"),
    (RuntimeError("Multiple libcudart libraries found: libcudart.so.12 and libcudart.so.13"), WHOLE,
     "second CUDA runtime", "leave one"),
    (AttributeError("module 'transformer_engine_torch' has no attribute 'dbias_dgelu'"), WHOLE,
     "dbias_dgelu is missing", "uninstall all parts"),
    (RuntimeError("CUDA driver version is insufficient for CUDA runtime version"), WHOLE, "driver does not fit",
     "upgrade the NVIDIA driver"),
    (AttributeError("odd, and without an object"), WHOLE, "not seen yet", "clean install"),
    (ImportError("cannot import name '_type_utils' from 'torch.onnx' (/t/__init__.py)"), WHOLE,
     "torch does not fit .*_type_utils", "pin torch"),
    (ImportError("cannot import name 'Linear' from 'transformer_engine.pytorch' (/t.py)"), WHOLE,
     "moved, renamed or never had", "upgrade canary"),
    (ImportError("cannot import name 'rearrange' from 'einops' (/e.py)"), WHOLE, "einops does not fit .*rearrange",
     "pin einops"),
    (OSError("libstrange.so.1: cannot open shared object file"), WHOLE, r"libstrange\.so\.1 is missing",
     "install the package"),
    (RuntimeError("cudnn shared object not found."), WHOLE, "cuDNN does not fit", "nvidia-cudnn"),
    (AssertionError("version mismatch"), {**WHOLE, "transformer-engine-cu13": "2.19.0"},
     "different releases .*2.19.0", "uninstall all"),
    (AssertionError("version mismatch"), {**WHOLE, "transformer-engine": "2.20.2+abc"}, r"2\.20\.2\+abc",
     r'uninstall all.*"transformer-engine\[pytorch\]==2\.20\.2"'),
    (StopIteration(), {"transformer-engine": "1.13.0", "transformer-engine-cu12": "1.13.0"},
     "no torch extension", "pip install"),
    (RuntimeError("x"), {"transformer-engine": "2.20.2", "transformer-engine-torch": "2.20.2"},
     "no core library", "pip install"),
    (AssertionError("Minimum torch version 2.1 required. Found (2, 0)."), WHOLE, r"torch is older than 2\.1,",
     "upgrade torch to 2.1"),
    (RuntimeError("TE requires cuDNN 9.12.0 or later, but the cuDNN runtime is 9.1.0."), WHOLE,
     r"cuDNN is older than 9\.12\.0,", r"upgrade cuDNN to 9\.12\.0"),
    (AssertionError("numpy >= 2.0 is needed"), WHOLE, r"numpy is older than 2\.0,", "upgrade numpy"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "versions", "cause", "following"), SAID, ids=lambda value: str(value)[:40])
def test_what_is_raised_becomes_words_to_act_on(
    package: Path, fault: BaseException, versions: dict[str, str], cause: str, following: str
) -> None:
    files_there = not isinstance(fault, FileNotFoundError) and versions is WHOLE
    install = Install(versions, (str(package),), files_there, files_there)
    reason = explain(fault, install)
    assert reason.startswith(f"Transformer Engine cannot be used: {type(fault).__name__}: ")
    assert re.search(f"Likely cause: .*{cause}.* Next step: ", reason)
    assert re.search(f"Next step: .*{following}", reason)


def test_absence_is_not_a_damage() -> None:
    install = Install({}, (), False, False)
    reason = explain(missing_module("transformer_engine"), install)
    assert "Transformer Engine is not installed in this interpreter" in reason
    assert "==VERSION" in reason  # nothing is installed that would say which


def test_a_second_copy_is_blamed_for_what_it_can_do_only(package: Path) -> None:
    install = Install(WHOLE, (str(package), "/site/transformer_engine"), True, True)
    assert "a second copy" in explain(AssertionError("mismatch"), install)
    assert "a second copy" not in explain(missing_module("einops"), install)


def test_an_emptied_folder_is_called_leftovers(tmp_path: Path) -> None:
    (tmp_path / "transformer_engine" / "pytorch").mkdir(parents=True)
    install = Install({}, (str(tmp_path / "transformer_engine"),), False, False)
    fault = ImportError("cannot import name 'Linear' from 'transformer_engine.pytorch' (unknown location)")
    assert "leftovers of an uninstall" in explain(fault, install)


# --- files on the path ----------------------------------------------------------------------


def test_a_file_of_the_same_name_is_named_and_not_the_install_behind_it(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own" / "transformer_engine.py"
    own.parent.mkdir()
    own.touch()
    monkeypatch.setattr(sys, "path", [str(own.parent), str(package.parent)])
    reason = explain(missing_module("transformer_engine.pytorch"))
    assert f"the file {own} has the name of the package" in reason
    assert "rename that file" in reason
    assert "remove that folder" not in reason


def test_sources_without_metadata_say_so(package: Path) -> None:
    install = Install({}, (str(package),), True, True)
    assert "no metadata (dist-info)" in explain(AssertionError("Could not find `transformer-engine`."), install)


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "is empty, as a full disk"), (b"x = 1", "moved, renamed or never had")]
)
def test_a_file_without_its_code_is_named(content: bytes, said: str, package: Path) -> None:
    file = package / "pytorch" / "__init__.py"
    file.write_bytes(content)
    install = Install(WHOLE, (str(package),), True, True)
    text = f"cannot import name 'Linear' from 'transformer_engine.pytorch' ({file})"
    reason = explain(ImportError(text, path=str(file)), install)
    assert said in reason
    assert str(file) in reason


def test_a_file_that_hides_a_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hides = types.ModuleType("einops")
    hides.__file__ = str(tmp_path / "einops.py")
    monkeypatch.setitem(sys.modules, "einops", hides)
    install = Install(WHOLE, (), True, True)
    assert f"the file {hides.__file__} has the name of the package" in explain(missing_module("einops.layers"), install)
