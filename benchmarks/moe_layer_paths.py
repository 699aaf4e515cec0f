"""One MoE layer, forward and backward, by every path: the bridge's, and megatron-core's own as its users build it.

Every path gets the same tokens, weights and routing rule (top k of fp32 logits, softmax over the chosen, load-balancing
loss on), and gives its output and the gradients of tokens, router and experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import distributed

from benchmarks.router import choose_experts
from megacpp_validate.bridge import jagged_experts
from megacpp_validate.bridge.deep_gemm import cast_weight
from megacpp_validate.bridge.expert_gemm import ExpertGemm
from megacpp_validate.bridge.jagged_experts import jagged_moe
from megacpp_validate.bridge.permute import Dispatch, padded_moe
from megacpp_validate.bridge.te_fp8 import te_delayed_scaling, te_scope
from megacpp_validate.native.mlp import activation
from megacpp_validate.native.router import TopKRouter

AUX: Final = 0.01
MEGATRON: Final = "megatron-core"
JAGGED: Final = "jagged"
GRAPH: Final = "jagged, in a CUDA graph"

Step = Callable[[], tuple[Any, ...]]  # output, and gradients of tokens, router [E, D], up [E, 2F, D], down [E, D, F]


@dataclass(frozen=True)
class Case:
    """Sizes of the layer."""

    tokens: int = 8192
    hidden: int = 2048
    width: int = 1408
    experts: int = 64
    top_k: int = 2

    @property
    def rows(self) -> int:
        """Assignments of tokens to experts."""
        return self.tokens * self.top_k

    @property
    def flop(self) -> float:
        """Of the experts, forward and backward."""
        return 3.0 * 2.0 * self.rows * self.hidden * 3 * self.width


SMALL: Final = Case(tokens=96, hidden=32, width=16, experts=4)


@dataclass(frozen=True, eq=False)
class Given:
    """What every path gets: tokens [T, D], router [E, D], up [E, 2F, D], down [E, D, F], gradient of the output."""

    case: Case
    tokens: Any
    router: Any
    up: Any
    down: Any
    gradient: Any

    @property
    def leaves(self) -> tuple[Any, ...]:
        """That get a gradient."""
        return self.tokens, self.router, self.up, self.down


def make_given(case: Case, device: str) -> Given:
    """Random tensors in bf16, the router's weight in fp32 with values that bf16 holds."""
    made = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Any:
        drawn = torch.randn(*shape, generator=made, device=device, dtype=torch.float32) * scale
        return drawn.to(torch.bfloat16)

    experts, hidden, width = case.experts, case.hidden, case.width
    tokens, gradient = draw(case.tokens, hidden), draw(case.tokens, hidden)
    router = draw(experts, hidden, scale=hidden**-0.5).float()
    up, down = draw(experts, 2 * width, hidden, scale=hidden**-0.5), draw(experts, hidden, width, scale=width**-0.5)
    leaves = [one.requires_grad_() for one in (tokens, router, up, down)]
    return Given(case, *leaves, gradient)


def differentiate(out: Any, aux: Any, leaves: Any, gradient: Any) -> tuple[Any, ...]:
    """Output and gradients, which are added to none that is there: that costs every path the same."""
    outputs = [out] if aux is None else [out, aux]
    gradients = [gradient] if aux is None else [gradient, torch.ones_like(aux)]
    return out, *torch.autograd.grad(outputs, leaves, gradients)


Mark = Callable[[str], None]  # called with the name of each stage after its launch
# What `jagged_moe` calls in its fused path, in this order, and the stage that ends with the call.
STAGES: Final = (
    ("sort_by_expert", "sort"), ("gather_rows", "dispatch"), ("grouped_product", "up"), ("gate_rows", "activation"),
    ("grouped_product", "down"), ("combine_rows", "combine"), ("gather_rows", "combine backward"),
    ("grouped_product", "down backward, rows"), ("gate_rows_backward", "activation backward"),
    ("grouped_product", "down backward, weights"), ("grouped_product", "up backward, rows"),
    ("combine_rows", "dispatch backward"), ("gather_rows", "dispatch again"),
    ("grouped_product", "up backward, weights"), ("zero_idle", ""), ("zero_idle", "idle experts"),
)  # fmt: skip


@contextmanager
def marking(mark: Mark) -> Iterator[None]:
    """While inside, `jagged_moe` marks the stages of one step of its fused path."""
    stages = iter(STAGES)

    def call(name: str, plain: Callable[..., Any], /, *given: Any, **more: Any) -> Any:
        wanted, stage = next(stages)
        if name != wanted:
            raise LookupError(f"jagged_moe calls {name} where STAGES has {wanted}")
        if stage == "combine backward":
            mark("start of the backward")
        made = plain(*given, **more)
        if stage:
            mark(stage)
        return made

    names = dict.fromkeys(name for name, _ in STAGES)
    with patch.multiple(jagged_experts, **{name: partial(call, name, getattr(jagged_experts, name)) for name in names}):
        yield


def jagged_step(given: Given, mark: Mark | None = None, *, low: bool = False) -> tuple[Any, ...]:
    """The path without the host; with `low` in FP8, the weights rounded in each step."""
    routed = choose_experts(given.tokens, given.router, given.case.top_k, aux_coefficient=AUX)
    if mark is not None:
        mark("route")
    with nullcontext() if mark is None else marking(mark):
        fp8 = (cast_weight(given.up), cast_weight(given.down)) if low else None
        out = jagged_moe(given.tokens, routed.chosen, routed.weights, given.up, given.down, fp8=fp8)
        found = differentiate(out, routed.aux_loss, given.leaves, given.gradient)
    if mark is not None:
        mark("route backward")
    return found


def make_jagged(given: Given) -> Step:
    """As it is called."""
    return partial(jagged_step, given)


def make_graph(given: Given) -> Step:
    """The same step, captured once."""
    for _ in range(3):
        jagged_step(given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = jagged_step(given)

    def replay() -> tuple[Any, ...]:
        graph.replay()
        return kept

    return replay


def _router(given: Given) -> TopKRouter:
    case = given.case
    router = TopKRouter(
        case.hidden, case.experts, case.top_k, aux_coefficient=AUX, device=given.tokens.device, dtype=torch.float32
    )
    with torch.no_grad():
        router.weight.copy_(given.router)
    return router


def make_padded(given: Given) -> Step:
    """Permute, pad to the fullest expert, batched product, unpad, unpermute."""
    router = _router(given)

    def step() -> tuple[Any, ...]:
        routing = router(given.tokens)
        out = padded_moe(given.tokens, routing.routing_map, routing.probs, given.up, given.down)
        leaves = (given.tokens, router.weight, given.up, given.down)
        return differentiate(out, routing.aux_loss, leaves, given.gradient)

    return step


def make_bridge(given: Given, *, fp8: bool = False, backends: Any = ("te",)) -> Step:
    """The parts of the model's expert layer: router, dispatch and two banks of the bridge."""
    case, device = given.case, given.tokens.device
    router, dispatch = _router(given), Dispatch(case.experts)
    made = {"num_experts": case.experts, "dtype": torch.bfloat16, "device": device, "backends": backends}
    up = ExpertGemm(in_features=case.hidden, out_features=2 * case.width, **made)
    down = ExpertGemm(in_features=case.width, out_features=case.hidden, **made)
    up.load_native_state_dict({"weight": given.up.detach()})
    down.load_native_state_dict({"weight": given.down.detach()})
    ups, downs = list(up.parameters()), list(down.parameters())
    recipe = te_delayed_scaling() if fp8 else None
    leaves = (given.tokens, router.weight, *ups, *downs)

    def step() -> tuple[Any, ...]:
        routing = router(given.tokens)
        sent = dispatch.permute(given.tokens, None, routing.routing_map)
        scope = nullcontext() if recipe is None else te_scope(enabled=True, recipe=recipe, amax_reduction_group=None)
        with scope:
            inner = activation(up(sent.rows, sent.rows_per_expert), "swiglu")
            rows = down(inner, sent.rows_per_expert)
        out = dispatch.unpermute(rows, sent.row_map, probs=routing.probs)
        return differentiate(out, routing.aux_loss, leaves, given.gradient)

    return step


def join_world() -> None:
    """A world of one rank, which megatron-core's layer needs."""
    from megatron.core import parallel_state, tensor_parallel  # type: ignore[import-not-found, unused-ignore]

    if not distributed.is_initialized():
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(0)
        distributed.init_process_group("nccl" if cuda else "gloo", store=distributed.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        if torch.cuda.is_available():
            tensor_parallel.model_parallel_cuda_manual_seed(0)


def make_megatron(given: Given, **options: Any) -> Step:
    """megatron-core's MoE layer with its grouped GEMM through Transformer Engine; on the CPU its plain one."""
    join_world()
    from megatron.core.fp8_utils import get_fp8_context  # type: ignore[import-not-found, unused-ignore]
    from megatron.core.models.gpt.moe_module_specs import (  # type: ignore[import-not-found, unused-ignore]
        get_moe_module_spec,
    )
    from megatron.core.transformer.moe.moe_layer import MoELayer  # type: ignore[import-not-found, unused-ignore]

    cuda = given.tokens.device.type == "cuda"
    config = _megatron_config(given.case, cuda, options)
    spec = get_moe_module_spec(use_te=cuda, num_experts=given.case.experts, moe_grouped_gemm=cuda)
    layer = MoELayer(config, spec.submodules).to(given.tokens.device)
    layer.set_layer_number(1)
    ups, downs = _load_megatron(layer, given)
    tokens = given.tokens.detach().unsqueeze(1).requires_grad_()
    gradient = given.gradient.unsqueeze(1)
    leaves = (tokens, layer.router.weight, *ups, *downs)

    def step() -> tuple[Any, ...]:
        with get_fp8_context(config):
            out, _ = layer(tokens)
        return differentiate(out, None, leaves, gradient)  # its load-balancing loss is in the graph of the output

    return step


def _megatron_config(case: Case, cuda: bool, options: dict[str, Any]) -> Any:
    from megatron.core.transformer.transformer_config import (  # type: ignore[import-not-found, unused-ignore]
        TransformerConfig,
    )

    chosen: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": case.hidden,
        "num_attention_heads": 1,
        "ffn_hidden_size": case.width,
        "moe_ffn_hidden_size": case.width,
        "num_moe_experts": case.experts,
        "moe_router_topk": case.top_k,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": AUX,
        "moe_grouped_gemm": cuda,
        "moe_token_dispatcher_type": "allgather",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": cuda,
        "add_bias_linear": False,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "use_cpu_initialization": not cuda,
        "gradient_accumulation_fusion": False,
    }
    return TransformerConfig(**{**chosen, **options})


def _load_megatron(layer: Any, given: Given) -> tuple[list[Any], list[Any]]:
    """The given weights into megatron-core's parameters, which are returned: up and down of each expert."""
    experts, numbers = layer.experts, range(given.case.experts)
    if hasattr(experts, "local_experts"):
        ups = [one.linear_fc1.weight for one in experts.local_experts]
        downs = [one.linear_fc2.weight for one in experts.local_experts]
    else:
        ups = [getattr(experts.linear_fc1, f"weight{number}") for number in numbers]
        downs = [getattr(experts.linear_fc2, f"weight{number}") for number in numbers]
    with torch.no_grad():
        layer.router.weight.copy_(given.router)
        for into, one in zip((*ups, *downs), (*given.up.unbind(0), *given.down.unbind(0)), strict=True):
            into.copy_(one)
    return ups, downs


def gather_gradients(found: tuple[Any, ...], given: Given) -> tuple[Any, ...]:
    """What a step gave, in the shapes of `Given`: banks that lie apart are stacked."""
    out, tokens, router, *banks = found
    if len(banks) > 2:
        half = len(banks) // 2
        banks = [torch.stack(banks[:half]), torch.stack(banks[half:])]
    shape = given.tokens.shape
    return out.reshape(shape), tokens.reshape(shape), router, *banks


def reference(given: Given) -> tuple[Any, ...]:
    """The layer in fp32, written out: every expert on the tokens that chose it, and torch's own autograd."""
    tokens, router, up, down = (one.detach().float().requires_grad_() for one in given.leaves)
    logits = tokens @ router.t()
    top, chosen = logits.topk(given.case.top_k, dim=-1)
    weights, probs = top.softmax(dim=-1), logits.softmax(dim=-1)
    out = torch.zeros_like(tokens)
    share = []
    for expert in range(given.case.experts):
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        share.append(token.numel() / given.case.rows)
        gate, linear = (tokens[token] @ up[expert].t()).chunk(2, dim=-1)
        made = (torch.nn.functional.silu(gate) * linear) @ down[expert].t()
        out = out.index_add(0, token, made * weights[token, slot, None])
    aux = AUX * given.case.experts * (torch.tensor(share, device=tokens.device) * probs.mean(dim=0)).sum()
    return differentiate(out, aux, (tokens, router, up, down), given.gradient.float())


def make_all(given: Given) -> dict[str, Callable[[], Step]]:
    """Path -> what builds it."""
    if given.tokens.device.type == "cpu":
        return {
            f"{MEGATRON}, bf16, allgather, one expert after the other": partial(make_megatron, given),
            JAGGED: partial(make_jagged, given),
            "padded": partial(make_padded, given),
            "bridge, native, bf16": partial(make_bridge, given, backends=("native",)),
        }
    fused = {"moe_permute_fusion": True, "moe_token_dispatcher_type": "alltoall"}
    delayed = {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"}
    makers: dict[str, dict[str, Any]] = {
        "bf16, alltoall": {"moe_token_dispatcher_type": "alltoall"},
        "bf16, alltoall, permute fused": fused,
        "bf16, alltoall, permute and router fused": {**fused, "moe_router_fusion": True},
        "bf16, allgather": {},
        "bf16, allgather, permute fused": {"moe_permute_fusion": True},
        "FP8 delayed, alltoall, permute fused": {**fused, **delayed},
        "FP8 block, alltoall, permute fused": {**fused, "fp8": "e4m3", "fp8_recipe": "blockwise"},
    }
    return {
        **{f"{MEGATRON}, {name}": partial(make_megatron, given, **options) for name, options in makers.items()},
        JAGGED: partial(make_jagged, given),
        GRAPH: partial(make_graph, given),
        f"{JAGGED}, FP8 by DeepGEMM": lambda: partial(jagged_step, given, low=True),
        "padded": partial(make_padded, given),
        "bridge, native, bf16": partial(make_bridge, given, backends=("native",)),
        "bridge, TE, bf16": partial(make_bridge, given),
        "bridge, TE, FP8 delayed": partial(make_bridge, given, fp8=True),
    }
