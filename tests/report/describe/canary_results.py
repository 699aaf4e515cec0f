"""Results made by hand, as the tiers would make them."""

from __future__ import annotations

from megacpp_validate.canary.firewall.run import FirewallCase, FirewallResult
from megacpp_validate.canary.static.findings import (
    ChangeKind,
    Finding,
    Impact,
    ModuleResult,
    ModuleVerdict,
    ReleaseSource,
    StaticResult,
    Sweep,
)
from megacpp_validate.evidence.receipt import Outcome
from megacpp_validate.evidence.values import Cause, SourceLine

MODULES = ("imports", "attention", "linear_walker", "expert_gemm", "permute", "native_block", "layer_spec")
BRIDGE = "megacpp_validate/bridge"
TE = "transformer_engine/pytorch"


def source(version: str) -> ReleaseSource:
    return ReleaseSource(
        version=version, wheel=f"transformer_engine-{version}-py3-none-any.whl", sha256=(version[::-1] * 64)[:64]
    )


def at(file: str, line: int) -> SourceLine:
    return SourceLine(file=file, line=line)


def static(
    old: str, new: str, verdicts: dict[str, ModuleVerdict | str], findings: tuple[Finding, ...] = (), **more: object
) -> StaticResult:
    """A result; a verdict that is a module's name is a cascade under it."""
    found = {module: verdicts.get(module, ModuleVerdict.CLEAN) for module in MODULES}
    rows = tuple(
        ModuleResult(module=module, verdict=verdict)
        if isinstance(verdict, ModuleVerdict)
        else ModuleResult(module=module, verdict=ModuleVerdict.CASCADE, under=verdict)
        for module, verdict in found.items()
    )
    lines = {f"{BRIDGE}/{module}.py": module for module in MODULES}
    values: dict[str, object] = {"downgrade": False, "tool": "megacpp-validate 0.1.0", "rows": lines, **more}
    return StaticResult(old=source(old), new=source(new), modules=rows, findings=findings, **values)  # type: ignore[arg-type]


def finding(
    module: str, kind: ChangeKind, impact: Impact, symbol: str, before: str, after: str, *sites: str, **more: object
) -> Finding:
    """A finding; places are FILE:LINE, of Transformer Engine and of the bridge, empty for none."""

    def place(folder: str, text: str) -> SourceLine | None:
        """A line of a file; None of an empty text."""
        file, _, line = text.partition(":")
        return at(f"{folder}/{file}", int(line)) if text else None

    values: dict[str, object] = {"cause": Cause.API, "modules": (module,), **more}
    lines = tuple(filter(None, (place(BRIDGE, site) for site in sites)))
    return Finding(
        module=module, kind=kind, impact=impact, symbol=f"transformer_engine.{symbol}", before=place(TE, before),
        after=place(TE, after), call_sites=lines, **values,
    )  # type: ignore[arg-type]  # fmt: skip


REQUIRED = finding(
    "permute", ChangeKind.PARAMETER_REQUIRED, Impact.BREAKING, "pytorch.moe_permute_with_probs", "permutation.py:565",
    "permutation.py:612", "permute.py:25", parameter="num_out_tokens", old="-1",
)  # fmt: skip
DEFAULT = finding(
    "attention", ChangeKind.DEFAULT_CHANGED, Impact.RISK, "pytorch.DotProductAttention", "attention.py:1022",
    "attention.py:1047", "attention.py:51", "native_block.py:140", modules=("attention", "native_block"),
    cause=Cause.NUMERICS, member="forward", parameter="fast_zero_fill", old="True", new="False",
)  # fmt: skip
FOLLOWED = finding(
    "imports", ChangeKind.DEPRECATED, Impact.RISK, "pytorch.fp8_autocast", "fp8.py:588", "quantization.py:772",
    "fp8_scope.py:32", suggestion="transformer_engine.pytorch.autocast", follows=True,
)  # fmt: skip
MOVED = finding(
    "imports", ChangeKind.MOVED, Impact.HARMLESS, "pytorch.fp8.FP8GlobalStateManager", "fp8.py:120",
    "quantization.py:203", "imports.py:216", old="transformer_engine.pytorch.fp8.FP8GlobalStateManager",
    new="transformer_engine.pytorch.quantization.FP8GlobalStateManager",
    suggestion="transformer_engine.pytorch.quantization.FP8GlobalStateManager", follows=True,
)  # fmt: skip
HARMLESS = finding(
    "linear_walker", ChangeKind.PARAMETER_REORDERED, Impact.HARMLESS, "pytorch.Linear", "module/linear.py:980",
    "module/linear.py:1001", "linear_walker.py:22", modules=("linear_walker", "native_block"),
    parameter="symmetric_ar_type",
)  # fmt: skip
GONE = finding(
    "imports", ChangeKind.REMOVED, Impact.BREAKING, "pytorch.DotProductAttention", "__init__.py:31", "",
    "imports.py:71", modules=("imports", "attention", "native_block", "layer_spec"),
    suggestion="transformer_engine.pytorch.ScaledDotProductAttention",
)  # fmt: skip
NEEDS = finding(
    "imports", ChangeKind.IMPORT_REQUIREMENT_ADDED, Impact.RISK, "pytorch", "", "__init__.py:244",
    cause=Cause.ENVIRONMENT, parameter="einops", new="import einops",
)  # fmt: skip

PERMUTE = static(
    "2.14.1", "2.15.0",
    {"permute": ModuleVerdict.BREAKS, "attention": ModuleVerdict.RISK, "native_block": ModuleVerdict.RISK},
    (REQUIRED, DEFAULT, HARMLESS), not_consumed=41,
)  # fmt: skip
AUTOCAST = static("2.8.0", "2.9.0", {"imports": ModuleVerdict.RISK}, (FOLLOWED, MOVED), not_consumed=112)
CASCADE = static(
    "2.20.2",
    "2.21.0",
    {"imports": ModuleVerdict.BREAKS, "attention": "imports", "native_block": "imports", "layer_spec": "imports"},
    (GONE, NEEDS),
    unchanged_faults=(REQUIRED.model_copy(update={"before": at(f"{TE}/permutation.py", 612)}),),
    not_consumed=3,
    changes_not_consumed=("`Float8Tensor.dtype` is gone", "`comm_gemm_overlap` is gone", "`te.ops.Sequential` moved"),
)
DOWNGRADE = static("2.15.0", "2.14.1", {}, (HARMLESS,), downgrade=True, not_consumed=41)
EMPTY = static("2.11.0", "2.11.1", {})
RESULTS = {"permute": PERMUTE, "autocast": AUTOCAST, "cascade": CASCADE, "downgrade": DOWNGRADE, "empty": EMPTY}


def sweep() -> Sweep:
    """Three steps, and one release that could not be read."""
    return Sweep(steps=(AUTOCAST, PERMUTE, CASCADE), unreadable={"2.5.0": "the wheel has no folder transformer_engine"})


NATIVE = {"attention": "torch.nn.functional.scaled_dot_product_attention", "permute": "index_select and index_add"}
REASON = (
    "OSError: libtransformer_engine.so: undefined symbol: cublasLtGrouped. Likely cause: cuBLAS is older "
    "than the one it was built with. Next step: upgrade it."
)
PASS, FAIL, NOT_RUN = Outcome.PASS, Outcome.FAIL, Outcome.NOT_RUN


def case(name: str, damage: str, outcome: Outcome, **more: object) -> FirewallCase:
    values: dict[str, object] = {"available": False, "native_paths": NATIVE, "ended": "exit", "seconds": 0.4, **more}
    return FirewallCase(
        case=name, damage=damage, release="2.20.2", compiled="none", outcome=outcome, **values
    )  # type: ignore[arg-type]  # fmt: skip


CASES = (
    case("absent", "no part of Transformer Engine on the path", PASS, reason="It is not installed. Next step: wait."),
    case("undefined-symbol", "the core library lacks a cuBLAS symbol", FAIL, reason=REASON,
         problems=("the reason does not name the library that lacks the symbol", "layer_spec did not import")),
    case("import-hangs", "an import that never returns", PASS, reason="importing it did not end", ended="killed"),
    case("flash-attn-4-without-cutedsl", "flash-attn-4 without the CuTe DSL", NOT_RUN, problems=("no wheel of it",)),
    case("one-symbol-gone", "moe_unpermute taken out", PASS, available=True, reason="`moe_unpermute` is not there"),
)  # fmt: skip


FIREWALL = FirewallResult(tool="megacpp-validate 0.1.0", python="3.11.7", torch="2.13.0+cpu", cases=CASES)


def bare(kind: ChangeKind, impact: Impact, **more: object) -> Finding:
    """A finding that knows no more than it must."""
    values: dict[str, object] = {"cause": Cause.API, "symbol": "transformer_engine.pytorch.Thing", **more}
    return Finding(module="permute", modules=("permute",), kind=kind, impact=impact, **values)  # type: ignore[arg-type]


def every_finding() -> tuple[Finding, ...]:
    """Every kind of change with every impact, each about a symbol and at a place of its own."""
    changes = [(kind, impact) for kind in ChangeKind for impact in Impact]
    return tuple(
        bare(
            kind, impact, symbol=f"transformer_engine.pytorch.Thing{number}", member="forward" if number % 2 else "",
            parameter=f"width{number}", before=at(f"{TE}/thing.py", 1000 + number),
            after=at(f"{TE}/thing.py", 2000 + number), call_sites=(at(f"{BRIDGE}/permute.py", 3000 + number),),
            old=f"was{number}", new=f"now{number}", suggestion=f"transformer_engine.pytorch.Other{number}",
        )
        for number, (kind, impact) in enumerate(changes)
    )  # fmt: skip
