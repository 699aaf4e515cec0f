"""What a look compares: files with the record of their installer, assertions with torch's headers, an answer."""

from __future__ import annotations

import base64
import importlib.metadata
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from megacpp_validate.evidence.doctor_look import Record
from megacpp_validate.probes.doctor import compare_headers, compare_record, find_headers, is_right, judge_answer

INCLUDE = Path(torch.__file__).parent / "include"
HEADER = "c10/core/TensorImpl.h"
CONDITION = "extra_meta_ && extra_meta_->symbolic_shape_meta_"


def test_what_is_gone_is_seen_by_every_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.12 on `Distribution.files` leaves out what is not there."""
    package, info = tmp_path / "odd", tmp_path / "odd-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    lines = ["odd/cached.pyc,,", "odd-1.0.dist-info/RECORD,,", "../bin/odd,sha256=x,1"]
    files = {"__init__.py": (b"1", b"1"), "patched.py": (b"good", b"evil"), "short.so": (b"12", b"1"),
             "gone.py": (b"1", b"")}  # fmt: skip
    for name, (recorded, there) in files.items():
        digest = base64.urlsafe_b64encode(sha256(recorded).digest()).decode().rstrip("=")
        lines.append(f"odd/{name},sha256={digest},{len(recorded)}")
        if there:
            (package / name).write_bytes(there)
    (info / "RECORD").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(importlib.metadata.Distribution, "files", property(lambda _: pytest.fail("it was read")))
    found = Record(4, ("odd/patched.py", "odd/short.so"), ("odd/gone.py",))
    assert compare_record("odd", ("no-such", "odd"), package) == found
    assert compare_record("odd", ("no-such",), package) == Record()
    assert compare_record("odd", ("odd",), tmp_path / "else/odd") == Record(elsewhere=str(tmp_path))


@pytest.mark.parametrize(
    ("off", "condition", "moved"),
    [(0, CONDITION, False), (1, CONDITION, True), (-31, CONDITION, True), (0, "extra_meta_", True)],
)
def test_an_assertion_at_another_line_is_another_header(off: int, condition: str, moved: bool, tmp_path: Path) -> None:
    lines = (INCLUDE / HEADER).read_text().splitlines()
    real = next(
        i for i, line in enumerate(lines, 1) if "TORCH_INTERNAL_ASSERT(extra_meta_ && extra_meta_->symb" in line
    )
    place = f"/build/site-packages/torch/include/{HEADER}"
    image = f'\0{condition} INTERNAL ASSERT FAILED at "{place}":{real + off}, please report\0'.encode()
    headers = compare_headers(image, INCLUDE)
    assert (headers.compared, bool(headers.moved)) == (1, moved)
    assert compare_headers(image, tmp_path).compared == 0  # the header is not there
    assert find_headers() == INCLUDE


def test_an_answer_is_right_only_where_it_is_the_tensor() -> None:
    scales = torch.arange(16.0).as_strided((8, 2), (1, 8))
    for answer, right in ((scales, True), (scales.contiguous(), True), (scales.t(), False), (scales * 2, False)):
        assert judge_answer("call", "scales", scales, answer).right is right


@pytest.mark.parametrize(
    ("text", "right"),
    [("Assertion error (csrc/layout.hpp:37): dim == 2 or dim == 3", False),
     ("Assertion error: sf.scalar_type() == torch::kFloat", False),
     ("nvcc fatal: unknown option, size of the queue", None), ("CUDA driver error: out of memory", None)],
)  # fmt: skip
def test_a_refusal_counts_only_where_it_is_about_sizes(text: str, right: bool | None) -> None:
    assert is_right(RuntimeError(text)) is right
