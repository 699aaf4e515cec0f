"""What a probe works at: its device, seed and bridge module in, checks and observed backends out."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch

from ..evidence.receipt import Backend, Check, Compiler, JitCompile, Quantizer, TrainingRecord
from .bounds import Roundings, check_of, compare
from .emulation import EMULATED
from .observe import Enter, attention_kernels, check_eval, check_memory, check_steady, observed_backends, use_of
from .order import Order

BRIDGE: Final = "megacpp_validate.bridge"
DTYPES: Final[dict[str, Any]] = {"fp32": torch.float32, "bf16": torch.bfloat16}
VENDOR_BACKENDS: Final = frozenset({"te", "fa3", "fa4", "deep_gemm", "liger"})
SDPA: Final = "sdpa"  # torch's attention, which no vendor calls: beside one, a part of the path fell back


class CannotRun(Exception):
    """What a probe needs is not here; the text says what, and what to do. Nothing is known of the cell then."""


@dataclass
class RankJit:
    """What the ranks of training runs report.

    Attributes:
        compiled: what they compiled.
        hits: library -> how much they took from caches on disk.
        unwatched: as `jit.monitor` has it.
    """

    compiled: list[JitCompile] = field(default_factory=list)
    hits: Counter[str] = field(default_factory=Counter)
    unwatched: dict[str, str] = field(default_factory=dict)

    def take(self, receipt: Mapping[str, Any]) -> None:
        """Add the receipt of one rank."""
        found: Mapping[str, Any] = receipt.get("jit") or {}
        self.compiled += [JitCompile(**row, rank=int(receipt["rank"])) for row in found.get("compiled", ())]
        self.hits.update(found.get("hits", {}))
        self.unwatched |= found.get("unwatched", {})


@dataclass
class Bench:
    """Collects what one probe saw.

    Attributes:
        order: the cell, the target and what is requested.
        checks, backends, quantizers, compilers, training: in the order they were made.
        rank_jit: what ranks of training runs compiled; what this process compiles is noted without.
        unsupported: why the target has not what the cell is about; empty where it has. Good where every check passed.
    """

    order: Order
    checks: list[Check] = field(default_factory=list)
    backends: list[Backend] = field(default_factory=list)
    quantizers: list[Quantizer] = field(default_factory=list)
    compilers: list[Compiler] = field(default_factory=list)
    training: list[TrainingRecord] = field(default_factory=list)
    rank_jit: RankJit = field(default_factory=RankJit)
    unsupported: str = ""

    def __post_init__(self) -> None:
        self.device = "cpu" if self.order.target.id == "cpu" else "cuda"
        self.quick = self.order.quick  # only the smallest shapes are wanted
        self._generator = torch.Generator(self.device).manual_seed(self.order.seed)

    @property
    def wants_te(self) -> bool:
        """Whether Transformer Engine is requested: then a native path is a failure."""
        return self.order.requested == "te"

    @cached_property
    def recipes(self) -> tuple[Any, ...]:
        """The target's recipes that Transformer Engine has in this environment, as far as it is wanted.

        One that it refuses (FP8 block scaling wants CUDA 12.9, and Hopper before 2.9) is for the cell of `imports` to
        fail; here a check records that it is not judged, so that everything else still is.
        """
        kept, scope = [], self.bridge("fp8_scope")
        for recipe in self.order.target.recipes:
            if self.wants_te and (reason := scope.why_recipe_is_refused(recipe)):
                said = f"not judged: Transformer Engine refuses {recipe} here ({reason}); see imports"
                self.check(f"fp8.{recipe}.supported", True, said)
            else:
                kept.append(recipe)
        return tuple(kept)

    def judged_recipes(self, path: str) -> tuple[Any, ...]:
        """The recipes with bounds for whole layers; the check `{path}{recipe}.reference` says so of another."""
        recipes = self.recipes if self.wants_te else ()
        for recipe in recipes:
            if recipe not in EMULATED:
                said = f"not judged: no bound tells several products in {recipe} from zeros; see fp8_{recipe}"
                self.check(f"{path}{recipe}.reference", True, said)
        return tuple(recipe for recipe in recipes if recipe in EMULATED)

    def require_te(self, what: str) -> None:
        """End the probe where `what`, a plural, runs in Transformer Engine only and that was not requested.

        Raises:
            CannotRun: it was not.
        """
        if not self.wants_te:
            self.cannot_run(
                f"{what} run in Transformer Engine only, which was not requested. Next step: request it, or leave this "
                "cell out."
            )

    def require_recipes(self) -> tuple[Any, ...]:
        """`recipes`, for a cell that has nothing to look at without them, or without the one that production runs.

        Raises:
            CannotRun: Transformer Engine was not requested, or refuses what the target's row has.
        """
        self.require_te("recipes")
        asked, production = self.order.target.recipes, self.order.target.production_recipe
        if not self.recipes or (production in asked and production not in self.recipes):
            lacking = ", ".join(one for one in asked if one not in self.recipes) or "every recipe"
            self.cannot_run(
                f"not judged: {lacking} cannot be had here. Next step: look at the cells of the recipes, which say why."
            )
        return self.recipes

    def bridge(self, module: str | None = None) -> Any:
        """A bridge module by id; the probe's own without one."""
        return importlib.import_module(f"{BRIDGE}.{module or self.order.bridge_modules[0]}")

    def te_layer(self, kind: str, *sizes: int, **options: Any) -> Any:
        """A layer of Transformer Engine in bf16 by the name of its accessor, without a bias unless one is asked for."""
        made = {"bias": False, "params_dtype": torch.bfloat16, "device": self.device}
        return getattr(self.bridge("imports"), kind).require()(*sizes, **{**made, **options})

    def low_precision(self, recipe: str | None = None, **other: Any) -> Enter:
        """What makes the bridge's low-precision scope of the target; its production recipe without one.

        Args:
            recipe: one that the target has.
            other: arguments of `fp8_scope.low_precision` that are not the usual ones.
        """
        scope = self.bridge("fp8_scope")
        given = {"target": self.order.target.id, "amax_reduction_group": scope.SINGLE_OWNER, "recipe": recipe, **other}
        return lambda **last: scope.low_precision(**{**given, **last})

    def setting(self, name: str, default: str = "") -> str:
        """What the cell's row sets under this name."""
        return self.order.settings.get(name, default)

    def artefact(self, name: str) -> Path:
        """Where a file beside the receipt goes, as in CELL.bf16-0.curve.

        Raises:
            CannotRun: the order has no folder.
        """
        if not self.order.folder:
            self.cannot_run("there is no folder for files beside the receipt. Next step: run it as a cell.")
        return Path(self.order.folder, f"{self.order.cell}.{name}")

    def saw_quantizer(self, path: str, tensor: str, kind: str, dtype: str, block: str) -> None:
        """Record what cast an operand, as read from the object that ran; see `evidence.receipt.Quantizer`."""
        self.quantizers.append(Quantizer(path, tensor, kind, dtype, block))

    def cannot_run(self, reason: str) -> None:
        """End the probe: what it needs is not here. The cell is `not-run`, which is never good.

        Raises:
            CannotRun: always.
        """
        raise CannotRun(reason)

    def randn(self, *shape: int, dtype: Any = torch.float32, grad: bool = False, scale: float = 1.0) -> Any:
        """Normal values of this shape from the probe's own generator, rounded to `dtype`."""
        made = torch.randn(*shape, generator=self._generator, device=self.device, dtype=torch.float32) * scale
        return made.to(dtype).requires_grad_(grad)

    def rand(self, *shape: int, dtype: Any = torch.float32) -> Any:
        """Uniform values in [0, 1)."""
        made = torch.rand(*shape, generator=self._generator, device=self.device, dtype=torch.float32).to(dtype)
        return made.clamp(max=1.0 - torch.finfo(dtype).eps)  # fewer bits make 1 of what was a little less

    def randint(self, high: int, *shape: int) -> Any:
        """Integers in [0, high), int64."""
        return torch.randint(high, shape, generator=self._generator, device=self.device)

    def filled(self, layer: Any, dtype: Any = torch.float32, **own: tuple[float, float]) -> Any:
        """A layer with weights of its own for each seed, such that its outputs are of size 1.

        Args:
            layer: whose parameters to fill; it is given back.
            dtype: that values are drawn in.
            own: mean and deviation of parameters that are neither weights of a norm nor of a product.
        """
        with torch.no_grad():
            for name, value in layer.named_parameters():
                usual = (1.0, 0.2) if value.dim() == 1 else (0.0, value.shape[-1] ** -0.5)
                mean, deviation = own.get(name.rpartition(".")[2], usual)
                value.copy_(mean + self.randn(*value.shape, dtype=dtype, scale=deviation))
        return layer

    # --- checks -------------------------------------------------------------------------------------------------------

    def compare(self, name: str, observed: Any, reference: Any, *, roundings: Roundings, **more: Any) -> None:
        """Hold a tensor to its fp64 reference by the three-part bound; see `bounds.compare`."""
        self.checks.append(compare(name, observed, reference, roundings=roundings, **more))

    def compare_pass(
        self,
        seen: Mapping[str, Any],
        wanted: Mapping[str, Any],
        roundings: Callable[[str], Roundings],
        *,
        native: Mapping[str, Any] | None = None,
        scales: Mapping[str, float] | None = None,
        shown: Callable[[str], str] = str,
    ) -> None:
        """Hold every tensor of a pass, by its name, to its fp64 reference; one that `seen` lacks was never computed.

        Args:
            seen: the output as "forward", gradients as "grad.NAME".
            wanted: the same in fp64.
            roundings: of a tensor by its name.
            native: the same in plain PyTorch in the same precision.
            scales: of tensors that are small differences of large terms; see `bounds.compare`.
            shown: name of a tensor -> how its check names it.
        """
        for name, tensor in wanted.items():
            plain, scale = None if native is None else native[name], (scales or {}).get(name)
            self.compare(shown(name), seen.get(name), tensor, roundings=roundings(name), native=plain, scale=scale)

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        """A check that is no comparison of tensors; `detail` says what was seen."""
        self.checks.append(Check(name, bool(passed), detail=detail))

    def check_parts(self, name: str, *parts: Any, detail: str = "") -> None:
        """A check that passes where each of its parts does."""
        self.checks.append(check_of(name, *parts, detail=detail))

    def same_bits(self, name: str, first: Iterable[Any], again: Iterable[Any]) -> None:
        """Two lists of tensors have the same bits, tensor by tensor; where one has none, both do."""
        one, two = ({at: tensor for at, tensor in enumerate(row) if tensor is not None} for row in (first, again))
        differ = [f"number {at}: {_kind(one.get(at))}, {_kind(two.get(at))}" for at in different(one, two)]
        self.check(name, not differ, "; ".join(differ) or f"the same bits in {len(one)} tensors")

    def refuses(self, name: str, error: type[BaseException], call: Callable[[], Any], *words: str) -> None:
        """The call must raise this class of error, with a next step; that its text has the words is a further check."""
        said = f"nothing was raised; {error.__name__} was expected"
        passed = False
        try:
            call()
        except error as refusal:
            said, passed = f"{type(refusal).__name__}: {refusal}", "Next step" in str(refusal)
        except Exception as other:
            said = f"{type(other).__name__} instead of {error.__name__}: {other}"
        self.check(name, passed, said)
        if words:
            missing = [word for word in words if word not in said]
            self.check(f"{name}.says", not missing, f"without {', '.join(missing)}: {said}" if missing else "")

    def layer_keeps_nothing(
        self, name: str, layer: Callable[..., Any], *inputs: Any, enter: Enter = nullcontext, draws: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        """Ten uses of `layer(*inputs, **options)` keep no tensor on the device, and give the same; so do evaluations.

        Args:
            name: of precision and layer, such as "fp8.delayed" or "bf16.mlp"; the checks are `NAME.memory`,
                `NAME.steady` and `NAME.eval`.
            layer: called in the scope that `enter` makes.
            inputs: copies of the tensors go in at each call, so that one that is kept shows.
            enter: makes the scope anew.
            draws: whether a fused attention runs, which moves the GPU's generator even without dropout.
            options: of the call.
        """
        use = use_of(layer, inputs, enter, options)
        self.checks.append(check_memory(name, self.device, use))
        self.checks.append(check_steady(name, use, draws=draws))
        self.checks.append(check_eval(name, layer, inputs, enter, options))

    def ran_on(self, path: str, choice: Any, *outputs: Any, wanted: str = "") -> None:
        """Record what one path requested, claims and was seen to run, and fail it on a fallback or a false claim.

        Args:
            path: name of the path, such as "attention.bf16.gqa4".
            choice: the wrapper's `Choice`.
            outputs: tensors with a graph behind them; what is seen there beats what is claimed.
            wanted: the backend that must have run; what the order requests without it ("te", or "native" where any
                native backend will do).
        """
        wanted = wanted or self.order.requested
        seen = (*observed_backends(*outputs), *attention_kernels(*outputs))
        reasons = tuple(f"{refusal.backend}: {refusal.reason}" for refusal in choice.refusals)
        row = Backend(path, wanted, choice.observed, seen, reasons)
        self.backends.append(row)
        if wanted in VENDOR_BACKENDS:
            passed = choice.observed == wanted and wanted in seen and SDPA not in seen
        else:  # what torch itself takes below its own functions differs by shape and device
            vendor = VENDOR_BACKENDS.intersection((*seen, choice.observed))
            passed = not vendor and wanted in ("native", choice.observed)
        self.check(f"{path}.backend", passed, row.detail)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of the checks made inside; none without a name."""
        start = len(self.checks)
        try:
            yield
        finally:  # also where something is raised: the receipt keeps what was checked until then
            for index in range(start, len(self.checks) if name else start):
                old = self.checks[index]
                self.checks[index] = Check(f"{name}.{old.name}", old.passed, old.parts, old.detail)


def different(some: Mapping[Any, Any], other: Mapping[Any, Any]) -> list[Any]:
    """Names of tensors that are missing on one side, or have other values; a NaN is like no other."""
    names = [*some, *(name for name in other if name not in some)]
    alike = {}
    for name in names:
        one, two = some.get(name), other.get(name)
        if one is not None and two is not None and one.shape == two.shape and one.dtype == two.dtype:
            one, two = (tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor for tensor in (one, two))
            alike[name] = torch.eq(one, two).all()
    # One answer for all, so that the device is waited for once.
    equal = dict(zip(alike, torch.stack(list(alike.values())).tolist() if alike else [], strict=True))
    return [name for name in names if not equal.get(name)]


def _kind(tensor: Any) -> str:
    return "no tensor" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
