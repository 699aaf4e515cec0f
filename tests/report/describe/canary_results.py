"""Results made by hand, as the tiers would make them."""

from __future__ import annotations

from megacpp_validate.canary.firewall.result import FirewallCase, FirewallOutcome, FirewallResult
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
from megacpp_validate.evidence.values import Cause, SourceLine

MODULES = ("imports", "attention", "linear_walker", "expert_gemm", "permute", "native_block", "layer_spec")
BRIDGE = "megacpp_validate/bridge"
TE = "transformer_engine/pytorch"


def source(version: str) -> ReleaseSource:
    return ReleaseSource(
        version=version,
        wheel=f"transformer_engine-{version}-py3-none-any.whl",
        sha256=(version[::-1] * 64)[:64],
    )


def at(file: str, line: int) -> SourceLine:
    return SourceLine(file=file, line=line)


def static(
    old: str,
    new: str,
    verdicts: dict[str, ModuleVerdict | str],
    findings: tuple[Finding, ...] = (),
    **more: object,
) -> StaticResult:
    """A result; a verdict that is a module's name is a cascade under it."""
    rows = []
    for module in MODULES:
        verdict = verdicts.get(module, ModuleVerdict.CLEAN)
        if isinstance(verdict, ModuleVerdict):
            rows.append(ModuleResult(module=module, verdict=verdict))
        else:
            rows.append(ModuleResult(module=module, verdict=ModuleVerdict.CASCADE, under=verdict))
    values: dict[str, object] = {"downgrade": False, **more}
    return StaticResult(
        tool="megacpp-validate 0.1.0",
        old=source(old),
        new=source(new),
        modules=tuple(rows),
        findings=findings,
        **values,
    )  # type: ignore[arg-type]


REQUIRED = Finding(
    module="permute",
    modules=("permute",),
    kind=ChangeKind.PARAMETER_REQUIRED,
    impact=Impact.BREAKING,
    cause=Cause.API,
    symbol="transformer_engine.pytorch.moe_permute_with_probs",
    parameter="num_out_tokens",
    before=at(f"{TE}/permutation.py", 565),
    after=at(f"{TE}/permutation.py", 612),
    call_sites=(at(f"{BRIDGE}/permute.py", 25),),
    old="-1",
    new="",
)
DEFAULT = Finding(
    module="attention",
    modules=("attention", "native_block"),
    kind=ChangeKind.DEFAULT_CHANGED,
    impact=Impact.RISK,
    cause=Cause.NUMERICS,
    symbol="transformer_engine.pytorch.DotProductAttention",
    member="forward",
    parameter="fast_zero_fill",
    before=at(f"{TE}/attention/dot_product_attention/dot_product_attention.py", 1022),
    after=at(f"{TE}/attention/dot_product_attention/dot_product_attention.py", 1047),
    call_sites=(at(f"{BRIDGE}/attention.py", 51), at(f"{BRIDGE}/native_block.py", 140)),
    old="True",
    new="False",
)
FOLLOWED = Finding(
    module="imports",
    modules=("imports",),
    kind=ChangeKind.DEPRECATED,
    impact=Impact.RISK,
    cause=Cause.API,
    symbol="transformer_engine.pytorch.fp8_autocast",
    before=at(f"{TE}/fp8.py", 588),
    after=at(f"{TE}/quantization.py", 772),
    call_sites=(at(f"{BRIDGE}/fp8_scope.py", 32),),
    suggestion="transformer_engine.pytorch.autocast",
    follows=True,
)
MOVED = Finding(
    module="imports",
    modules=("imports",),
    kind=ChangeKind.MOVED,
    impact=Impact.HARMLESS,
    cause=Cause.API,
    symbol="transformer_engine.pytorch.fp8.FP8GlobalStateManager",
    before=at(f"{TE}/fp8.py", 120),
    after=at(f"{TE}/quantization.py", 203),
    call_sites=(at(f"{BRIDGE}/imports.py", 216),),
    old="transformer_engine.pytorch.fp8.FP8GlobalStateManager",
    new="transformer_engine.pytorch.quantization.FP8GlobalStateManager",
    suggestion="transformer_engine.pytorch.quantization.FP8GlobalStateManager",
    follows=True,
)
HARMLESS = Finding(
    module="linear_walker",
    modules=("linear_walker", "native_block"),
    kind=ChangeKind.PARAMETER_REORDERED,
    impact=Impact.HARMLESS,
    cause=Cause.API,
    symbol="transformer_engine.pytorch.Linear",
    parameter="symmetric_ar_type",
    before=at(f"{TE}/module/linear.py", 980),
    after=at(f"{TE}/module/linear.py", 1001),
    call_sites=(at(f"{BRIDGE}/linear_walker.py", 22),),
)
GONE = Finding(
    module="imports",
    modules=("imports", "attention", "native_block", "layer_spec"),
    kind=ChangeKind.REMOVED,
    impact=Impact.BREAKING,
    cause=Cause.API,
    symbol="transformer_engine.pytorch.DotProductAttention",
    before=at(f"{TE}/__init__.py", 31),
    call_sites=(at(f"{BRIDGE}/imports.py", 71),),
    suggestion="transformer_engine.pytorch.ScaledDotProductAttention",
)
NEEDS = Finding(
    module="imports",
    modules=("imports",),
    kind=ChangeKind.IMPORT_REQUIREMENT_ADDED,
    impact=Impact.RISK,
    cause=Cause.ENVIRONMENT,
    symbol="transformer_engine.pytorch",
    after=at("transformer_engine/common/__init__.py", 244),
    parameter="einops",
    new="import einops",
)
SILENT = Finding(
    module="imports",
    modules=("imports",),
    kind=ChangeKind.PARAMETER_RENAMED,
    impact=Impact.BREAKING,
    cause=Cause.SILENT_FALLBACK,
    symbol="transformer_engine.common.recipe.DelayedScaling",
    parameter="amax_history_len",
    before=at("transformer_engine/common/recipe/__init__.py", 188),
    after=at("transformer_engine/common/recipe/__init__.py", 201),
    call_sites=(at(f"{BRIDGE}/fp8_scope.py", 58),),
    suggestion="amax_history_length",
)

PERMUTE = static(
    "2.14.1",
    "2.15.0",
    {"permute": ModuleVerdict.BREAKS, "attention": ModuleVerdict.RISK, "native_block": ModuleVerdict.RISK},
    (REQUIRED, DEFAULT, HARMLESS),
    not_consumed=41,
)
AUTOCAST = static("2.8.0", "2.9.0", {"imports": ModuleVerdict.RISK}, (FOLLOWED, MOVED), not_consumed=112)
CASCADE = static(
    "2.20.2",
    "2.21.0",
    {
        "imports": ModuleVerdict.BREAKS,
        "attention": "imports",
        "native_block": "imports",
        "layer_spec": "imports",
    },
    (GONE, SILENT, NEEDS),
    unchanged_faults=(REQUIRED.model_copy(update={"before": at(f"{TE}/permutation.py", 612)}),),
    not_consumed=3,
    changes_not_consumed=(
        "`Float8Tensor.dtype` is gone",
        "`comm_gemm_overlap` is gone",
        "`te.ops.Sequential` moved",
    ),
)
DOWNGRADE = static("2.15.0", "2.14.1", {}, (HARMLESS,), downgrade=True, not_consumed=41)
EMPTY = static("2.11.0", "2.11.1", {})
RESULTS = {
    "permute": PERMUTE,
    "autocast": AUTOCAST,
    "cascade": CASCADE,
    "downgrade": DOWNGRADE,
    "empty": EMPTY,
}


def sweep() -> Sweep:
    """Three steps, and one release that could not be read."""
    return Sweep(steps=(AUTOCAST, PERMUTE, CASCADE), unreadable={"2.5.0": "the wheel has no folder transformer_engine"})


NATIVE = {
    "attention": "torch.nn.functional.scaled_dot_product_attention",
    "permute": "index_select and index_add",
}
CASES = (
    FirewallCase(
        case="absent",
        damage="no part of Transformer Engine on the path",
        release="2.20.2",
        compiled="none",
        outcome=FirewallOutcome.PASS,
        available=False,
        reason="Transformer Engine is not installed. Next step: pip install it, or leave it.",
        native_paths=NATIVE,
        ended="exit",
        seconds=0.41,
    ),
    FirewallCase(
        case="undefined-symbol",
        damage="libtransformer_engine.so asks for a cuBLAS symbol that no library on this host has",
        release="2.17.1",
        compiled="stand-in",
        outcome=FirewallOutcome.FAIL,
        available=False,
        reason="OSError: libtransformer_engine.so: undefined symbol: cublasLtGroupedMatrixLayoutInit. "
        "Likely cause: cuBLAS is older than the one it was built with. Next step: upgrade it.",
        native_paths=NATIVE,
        ended="exit",
        seconds=1.9,
        problems=(
            "the reason does not name the library that lacks the symbol",
            "layer_spec did not import",
        ),
    ),
    FirewallCase(
        case="import-hangs",
        damage="an import that never returns",
        release="2.20.2",
        compiled="real",
        outcome=FirewallOutcome.PASS,
        available=False,
        reason="importing transformer_engine.pytorch did not end within 5 s: it hangs in __init__.py:3. "
        "Likely cause: it waits for a device.",
        native_paths=NATIVE,
        ended="killed after 7 s",
        seconds=7.02,
    ),
    FirewallCase(
        case="flash-attn-4-without-cutedsl",
        damage="flash-attn-4 without the CuTe DSL",
        release="2.17.1",
        compiled="none",
        outcome=FirewallOutcome.NOT_RUN,
        problems=("no wheel of flash-attn-4 on the index",),
    ),
    FirewallCase(
        case="one-symbol-gone",
        damage="moe_unpermute taken out of transformer_engine/pytorch/__init__.py",
        release="2.20.2",
        compiled="stand-in",
        outcome=FirewallOutcome.PASS,
        available=True,
        reason="Transformer Engine is there, but its entry point `moe_unpermute` is not: ImportError.",
        native_paths=NATIVE,
        ended="exit",
        seconds=2.2,
    ),
)


FIREWALL = FirewallResult(tool="megacpp-validate 0.1.0", python="3.11.7", torch="2.13.0+cpu", cases=CASES)


def bare(kind: ChangeKind, impact: Impact, **more: object) -> Finding:
    """A finding that knows no more than it must."""
    values: dict[str, object] = {"cause": Cause.API, "symbol": "transformer_engine.pytorch.Thing", **more}
    return Finding(module="permute", modules=("permute",), kind=kind, impact=impact, **values)  # type: ignore[arg-type]


def every_finding() -> tuple[Finding, ...]:
    """Every kind of change with every impact, each about a symbol and at a place of its own."""
    return tuple(
        bare(
            kind,
            impact,
            symbol=f"transformer_engine.pytorch.Thing{number}",
            member="forward" if number % 2 else "",
            parameter=f"width{number}",
            before=at(f"{TE}/thing.py", 1000 + number),
            after=at(f"{TE}/thing.py", 2000 + number),
            call_sites=(at(f"{BRIDGE}/permute.py", 3000 + number),),
            old=f"was{number}",
            new=f"now{number}",
            suggestion=f"transformer_engine.pytorch.Other{number}",
        )
        for number, (kind, impact) in enumerate((k, i) for k in ChangeKind for i in Impact)
    )
