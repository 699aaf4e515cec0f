"""What only plain PyTorch computes: it passes as it is, and every planted fault fails a check that names where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from torch.nn import functional  # noqa: E402

from megacpp_validate.native import mamba, mlp, norms, recurrent, router  # noqa: E402
from megacpp_validate.probes import whole_layer as native_layers  # noqa: E402
from megacpp_validate.probes.bench import Bench  # noqa: E402
from megacpp_validate.probes.order import Order, Target  # noqa: E402

Patch = pytest.MonkeyPatch


def failed(seed: int = 0) -> set[str]:
    bench = Bench(Order("layer_spec", "stack", Target("cpu", ""), "native", seed=seed, quick=True))
    native_layers.check_native_layers(bench)
    return {check.name for check in bench.checks if not check.passed}


@pytest.mark.parametrize("seed", range(5))
def test_every_layer_passes(seed: int) -> None:
    assert failed(seed) == set()


def activation(table: str, name: str, fault: Callable[[Any], Any]) -> Callable[[Patch], None]:
    return lambda patch: patch.setitem(getattr(mlp, table), name, fault)


def without_shift(patch: Patch) -> None:
    plain = norms.layer_norm
    for module in (norms, mlp):
        patch.setattr(module, "layer_norm", lambda x, weight, bias, eps: plain(x, weight, 0 * bias, eps=eps))


def without_bias(module: Any) -> Callable[[Patch], None]:
    class Linear:
        """`torch.nn.functional` whose linear layer adds nothing."""

        def __getattr__(self, name: str) -> Any:
            return getattr(functional, name)

        def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
            return functional.linear(x, weight, None if bias is None else 0 * bias)

    return lambda patch: patch.setattr(module, "functional", Linear())


def without_first_state(patch: Patch) -> None:
    plain = mamba._first_state
    patch.setattr(mamba, "_first_state", lambda *given: 0 * plain(*given))


def wrong_in_long_chunks(patch: Patch) -> None:
    plain = recurrent._read
    patch.setattr(
        recurrent, "_read", lambda q, k, *rest: plain(q, k * 1.5 if max(k.shape) >= native_layers.CHUNK else k, *rest)
    )


def losses(name: str, factor: float) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        plain = getattr(router, name)
        patch.setattr(router, name, lambda *given: factor * plain(*given))

    return plant


def in_autocast(patch: Patch) -> None:
    plain = norms.rms_norm
    patch.setattr(
        norms, "rms_norm", lambda x, w, eps: plain(x * (1.1 if torch.is_autocast_enabled("cpu") else 1), w, eps=eps)
    )


def drifting(patch: Patch) -> None:
    calls: list[Any] = []

    def noisy(x: Any) -> Any:
        calls.append(x)
        return functional.relu(x) * (1 + 2.0**-52 * (len(calls) % 2))

    patch.setitem(mlp.PLAIN, "relu", noisy)


FAULTS: dict[str, tuple[Callable[[Patch], None], str]] = {
    "qgelu": (activation("PLAIN", "qgelu", lambda x: x * torch.sigmoid(1.6 * x)), "mlp.qgelu.forward"),
    "srelu": (activation("PLAIN", "srelu", functional.relu), "mlp.srelu.forward"),
    "reglu": (activation("GATES", "reglu", functional.leaky_relu), "mlp.reglu.forward"),
    "glu": (activation("GATES", "glu", torch.tanh), "mlp.glu.forward"),
    "clamp-offset": (lambda patch: patch.setattr(mlp, "CLAMP_OFFSET", 0.0), "mlp.clamped_swiglu.forward"),
    "clamp-limit": (lambda patch: patch.setattr(mlp, "CLAMP_LIMIT", 70.0), "mlp.clamped_swiglu.forward"),
    "shift": (without_shift, "layer-norm.forward"),
    "bias-of-a-norm": (without_bias(norms), "norm-linear.forward"),
    "bias-of-an-mlp": (without_bias(mlp), "mlp.gelu.forward"),
    "first-state": (without_first_state, "scan.chunked.state"),
    "long-chunks": (wrong_in_long_chunks, "recurrent.forward"),
    "load-balancing": (losses("load_balancing_loss", 1 / 6), "router.aux"),
    "z-loss": (losses("router_z_loss", 2.0), "router.z.grad.weight"),
    "autocast": (in_autocast, "autocast.rms"),
    "not-the-same-twice": (drifting, "mlp.relu.bits"),
}


@pytest.mark.parametrize(("plant", "named"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_seen(monkeypatch: Patch, plant: Callable[[Patch], None], named: str) -> None:
    plant(monkeypatch)
    assert named in failed()
