"""One reading of a folder that cannot be written, for every verb."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megacpp_validate.errors import WrongArguments, writing_to


def test_a_folder_that_cannot_be_written_is_a_wrong_argument_that_names_its_option() -> None:
    expected = r"answers cannot be written to /x: Permission denied\..* give --answers"
    with pytest.raises(WrongArguments, match=expected), writing_to(Path("/x"), "answers", "--answers"):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/x/y")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_not_an_argument(code: int) -> None:
    with pytest.raises(OSError, match=os.strerror(code)), writing_to(Path("/x"), "receipts", "--receipts"):
        raise OSError(code, os.strerror(code), "/x/y")
