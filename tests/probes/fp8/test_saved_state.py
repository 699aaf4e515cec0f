"""Leave to read back what a probe has saved itself: for as long as it reads, and no longer."""

from __future__ import annotations

import pytest

from megacpp_validate.probes.fp8.scopes import UNPICKLING, unpickling_allowed


@pytest.mark.parametrize("before", [None, "0", "1"])
def test_what_was_set_is_put_back(before: str | None) -> None:
    variables = {} if before is None else {UNPICKLING: before}
    kept = dict(variables)
    with unpickling_allowed(variables):
        assert variables[UNPICKLING] == "1"
    assert variables == kept


def test_it_is_put_back_where_reading_fails() -> None:
    variables: dict[str, str] = {}
    with pytest.raises(ZeroDivisionError), unpickling_allowed(variables):
        _ = 1 // 0
    assert not variables
