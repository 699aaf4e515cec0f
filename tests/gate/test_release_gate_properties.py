"""What holds of every release gate, whatever receipts there are: bad ones never open it, and order never matters."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from megacpp_validate.evidence.receipt import Backend, Outcome, Package, Receipt
from megacpp_validate.evidence.release_gate import GateDecision
from megacpp_validate.evidence.store import ReceiptFile, ReceiptHead
from megacpp_validate.gate.release import decide_release
from megacpp_validate.gate.release_asked import Asked
from tests.gate.release_receipts import AT, OTHER_COMMIT, PROBES, STACK, compiled, good, red, rules

Store = Mapping[str, Receipt | None]
"""File -> its receipt; None for one that is none."""

RULES = rules()
# Each is no evidence that its cell holds, for a reason of its own.
BAD = (
    {"outcome": Outcome.FAIL, "reason": "out of bounds"},
    {"outcome": Outcome.ERROR, "reason": "raised"},
    {"outcome": Outcome.IMPORT_ERROR, "reason": "no Transformer Engine"},
    {"outcome": Outcome.BLOCKED, "reason": "blocked", "blocked_by": "te2.20.2-h200-imports"},
    {"outcome": Outcome.TIMEOUT, "reason": "too long"},
    {"outcome": Outcome.NOT_RUN, "reason": "no GPU"},
    {"requested": "native"},
    {"commit": ""},
    {"commit": OTHER_COMMIT, "outcome": Outcome.FAIL},
    {"started": ""},
    {"packages": ()},
    {"packages": (Package("transformer_engine", "2.17.1", "/env"),)},
    {"seconds": {"total": 1.0}},
    {"jit": compiled(triton=1)},
    {"backends": (Backend("x", "fa3", "sdpa"),)},
    {"schema_id": "megacpp-validate/receipt/1"},
)
ages = st.sampled_from((-2.0, 0.1, 1.0, 2.0, 5.0, 24.0 * 40))
probes = st.sampled_from((*PROBES[:3], "fp8_delayed"))


@st.composite
def bad_files(draw: st.DrawFn) -> Receipt | None:
    """A receipt that is bad, whatever is beside it, or a file that is none."""
    chosen = draw(st.sampled_from((None, *BAD)))
    if chosen is None:
        return None
    receipt = good(draw(probes), hours=draw(ages), stack=draw(st.sampled_from((STACK, STACK, "te2.17.1"))))
    return replace(receipt, **chosen)


@st.composite
def stores(draw: st.DrawFn) -> Store:
    """A good store, in which some receipts are missing, doubled or bad."""
    store: dict[str, Receipt | None] = {f"run/{one.cell}.json": one for one in map(good, PROBES)}
    for file in draw(st.lists(st.sampled_from(sorted(store)), max_size=2)):
        store.pop(file, None)
    beside = st.builds(lambda probe, age: good(probe, hours=age), probes, ages)
    for number, receipt in enumerate(draw(st.lists(beside | bad_files(), max_size=4))):
        store[_file(receipt, f"other{number}")] = receipt
    return store


def _file(receipt: Receipt | None, run: str) -> str:
    return f"{run}/{receipt.cell if receipt else 'te2.20.2-h200-attention'}.json"


def _see(file: str, receipt: Receipt | None) -> ReceiptFile:
    if receipt is None:
        return ReceiptFile(file, hashlib.sha256(file.encode()).hexdigest(), None, "truncated")
    head = ReceiptHead(**{each.name: getattr(receipt, each.name) for each in fields(ReceiptHead)})
    return ReceiptFile(file, hashlib.sha256(repr(receipt).encode()).hexdigest(), head)


def judge(store: Store, order: Sequence[str] = ()) -> GateDecision:
    def load(seen: ReceiptFile) -> Receipt:
        receipt = store[seen.file]
        assert receipt is not None
        return receipt

    seen = [_see(file, store[file]) for file in order or store]
    return decide_release(seen, load, RULES, Asked(STACK, AT))


@given(store=stores(), bad=bad_files(), run=st.sampled_from(("aaa", "zzz")))
@settings(max_examples=60, deadline=None)
def test_adding_a_bad_receipt_never_opens_a_closed_gate(store: Store, bad: Receipt | None, run: str) -> None:
    before = judge(store)
    after = judge({**store, _file(bad, run): bad})
    assert before.open or not after.open
    added = [row for row in after.cells if row.run == run]
    assert added, "no receipt is left out"
    assert not any(row.accepted for row in added)


@given(store=stores(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_order_never_matters_and_every_receipt_has_its_verdict(store: Store, data: st.DataObject) -> None:
    files = list(store)
    random.Random(data.draw(st.integers(0, 2**16))).shuffle(files)
    decision = judge(store)
    assert judge(store, files) == decision
    assert decision.open is (decision.exit_code == 0) is (not decision.closing)
    assert decision.open is all(row.accepted for row in decision.required) or decision.closing
    told = [f"{row.run}/{row.cell}.json" for row in decision.cells if row.run]
    assert sorted(told) == sorted(store)
    assert [row.probe for row in decision.required] == list(PROBES)
    for row in decision.cells:
        assert row.accepted is not bool(row.reasons)
        assert len(row.rules) == len(row.reasons)


@given(lost=st.sampled_from(PROBES), run=st.sampled_from((".", "run")))
@settings(max_examples=14, deadline=None)
def test_removing_a_required_receipt_closes_an_open_gate(lost: str, run: str) -> None:
    store: dict[str, Receipt | None] = {_file(good(probe), run): good(probe) for probe in PROBES}
    assert judge(store).open
    del store[_file(good(lost), run)]
    decision = judge(store)
    assert (decision.open, decision.exit_code, decision.missing) == (False, 4, (good(lost).cell,))


def test_what_is_bad_by_itself_is_bad() -> None:
    """Each of what the properties add closes a good store in the place of the good receipt."""
    for chosen in BAD:
        store = {_file(good(probe), "run"): good(probe) for probe in PROBES}
        store[_file(good("attention"), "run")] = replace(good("attention"), **chosen)
        assert not judge(store).open, chosen
    assert not judge({**store, _file(red("imports"), "run"): red("imports")}).open
