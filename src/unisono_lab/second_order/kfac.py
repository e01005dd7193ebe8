"""K-FAC: natural gradient descent with Kronecker-factored curvature."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from unisono.arguments import require_kinds
from unisono.errors import ModelError, NonFiniteLoss, UnisonoWarning
from unisono.received import short
from unisono.train.model.shared_work import Piece, SharingOptimizer
from unisono_lab.second_order.kfac_layers import KnownLayer, known_layers

_NAMES = ("inputs", "outputs")


class KFAC(SharingOptimizer):
    """K-FAC for ``nn.Linear`` and ``nn.Conv2d``, experimental: the update of a layer is (A ⊗ G + λI)⁻¹ ∇L.

    A = E[a aᵀ] of what goes into the layer, G = E[g gᵀ] of the loss's gradient at what comes out (J. Martens and
    R. Grosse, arXiv 1503.05671; for convolutions R. Grosse and J. Martens, arXiv 1602.01407). G is that of the batch's
    own labels, as in K. Osawa et al., arXiv 1811.12019. The inverse is made of eigendecompositions, as in
    J. G. Pauloski et al. (KAISA), arXiv 2107.01739. Parameters that no rule knows are trained by another optimizer.

    Under ``run.prepare`` factors have the same bits on any number of workers, and each decomposition is worked out by
    one of them. In a plain loop it is an optimizer like others. The loss has to be a mean over samples, which are
    counted along the first dimension of what goes into a layer. A ``GradScaler`` is refused.

    Args:
        model: the module whose trained parameters are updated. All of them.
        lr: the learning rate η.
        momentum: the momentum of the preconditioned gradients, as in ``torch.optim.SGD``.
        weight_decay: the weight decay of the layers with a rule, as there.
        damping: λ, above 0.
        kl_clip: κ: all updates u are multiplied by min(1, √(κ / (η² Σ u·∇L))), summed over layers; None for 1.
        decay: the decay of the running averages of factors; that of the k-th is min(1 − 1/k, decay).
        factors_every: steps from factors to factors.
        inverses_every: steps from decompositions to decompositions; a multiple of ``factors_every``.
        fallback: makes the optimizer of all other parameters.
        skip: names of modules that are left to it as well.

    Raises:
        ModelError: no layer has a rule, weights are tied, or a setting is out of its range.
        JobError: a setting is of another type.
    """

    _is_whole = False
    _step_supports_amp_scaling = True
    """Has a ``GradScaler`` say that it calls."""

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.1,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        damping: float = 1e-2,
        kl_clip: float | None = 1e-3,
        decay: float = 0.95,
        factors_every: int = 1,
        inverses_every: int = 10,
        fallback: Callable[[list[Tensor]], Optimizer] = optim.AdamW,
        skip: Sequence[str] = (),
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ModelError(f"KFAC({short(model)}): give it the model, whose layers it has to know")
        settings: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "damping": damping,
            "kl_clip": kl_clip,
            "decay": decay,
            "factors_every": factors_every,
            "inverses_every": inverses_every,
        }
        require_kinds(KFAC.__init__, {**settings, "fallback": fallback, "skip": skip})
        _check(settings)
        self._layers, others = known_layers(model, skip)
        if not self._layers:
            raise ModelError("KFAC: the model has no trained nn.Linear or nn.Conv2d without groups: use another one")
        super().__init__([{"params": [one for layer in self._layers for one in layer.parameters]}], settings)
        self._fallback = fallback([one for listed in others.values() for one in listed]) if others else None
        self._untold = ""
        if others and not isinstance(self._fallback, Optimizer):
            raise ModelError(f"KFAC(fallback=…): it has made {short(self._fallback)} of parameters, and no optimizer")
        if self._fallback is not None:
            self.param_groups.extend(self._fallback.param_groups)
            self._untold = f"KFAC has no rule for {', '.join(others)}: {type(self._fallback).__name__} trains them"
        self._is_whole = True
        self._hooks = [layer.listen(self._takes_factors) for layer in self._layers]

    @property
    def statistics(self) -> Mapping[str, Tensor]:
        """The sums of which the next step's factors are made; none where it makes none."""
        if not self._takes_factors():
            return {}
        return {name: one for layer in self._layers for name, one in layer.sums.items()}

    def notice(self) -> str:
        """The layers without a rule, and who trains them; empty if there are none, or it has been told."""
        told, self._untold = self._untold, ""
        return told

    @torch.no_grad()
    def trouble(self) -> str:
        """The first factor that is not finite, in words."""
        for layer in self._layers:
            for place, name in enumerate(_NAMES):
                found = (layer.inputs, layer.outputs)[place].grad
                if found is not None and not torch.isfinite(found).all():
                    return f"KFAC: the factor of the {name} of {layer.name} is not finite"
        return ""

    def pieces(self) -> list[float]:
        """The multiplications of each factor's decomposition, about 9 n³."""
        if not self._is_due("inverses_every"):
            return []
        return [9.0 * len((layer.inputs, layer.outputs)[place]) ** 3 for layer in self._layers for place in (0, 1)]

    def forms(self, piece: int) -> list[Tensor]:
        """The factor's eigenvectors and eigenvalues."""
        like = (self._layers[piece // 2].inputs, self._layers[piece // 2].outputs)[piece % 2]
        size = len(like)
        return [torch.empty(shape, dtype=like.dtype, device="meta") for shape in ((size, size), (size,))]

    @torch.no_grad()
    def worked_out(self, piece: int) -> Piece:
        """Decompose the factor as the next step leaves it; zeros where there is none yet."""
        return self._decomposed(piece, self._averaged(self._layers[piece // 2], piece % 2))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update everything.

        Args:
            closure: a function that computes the loss and its gradients, and returns the loss.

        Raises:
            NonFiniteLoss: a factor is not finite; then nothing has changed.
            ModelError: a ``GradScaler`` calls it; then nothing has changed, either.
        """
        if self.__dict__.pop("found_inf", None) is not None:
            raise ModelError(
                "KFAC goes by the sizes of gradients, which a GradScaler changes before they are seen: leave it out. "
                "torch.autocast with torch.bfloat16 needs none"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if told := self.notice():
            warnings.warn(told, UnisonoWarning, stacklevel=2)
        if trouble := self.trouble():
            raise NonFiniteLoss(
                f"{trouble}; nothing was updated. Lower the learning rate, raise the damping, or check the data"
            )
        given, self.given = self.given, {}
        averages = {
            (number, place): self._averaged(layer, place)
            for number, layer in enumerate(self._layers)
            for place in (0, 1)
        }
        found = {
            piece: given[piece] if piece in given else self._decomposed(piece, averages[divmod(piece, 2)])
            for piece in range(len(self.pieces()))
        }
        for number, layer in enumerate(self._layers):
            pieces = [found[piece] for piece in (2 * number, 2 * number + 1) if piece in found]
            self._keep(layer, [averages[number, place] for place in (0, 1)], pieces)
        self._update()
        if self._fallback is not None:
            # A checkpoint that was loaded has put others in their places.
            self._fallback.param_groups, self._fallback.state = self.param_groups[1:], self.state
            self._fallback.step()
        self.state[self._layers[0].module.weight]["step"] = self._own.get("step", torch.tensor(0.0)) + 1
        return loss

    def __getstate__(self) -> dict[str, Any]:
        """Refused: it knows the layers of its model, and a copy would know those of no model.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            "KFAC cannot be copied or pickled, since it listens to the layers of its model: copy the model, make "
            "unisono_lab.KFAC(copy), and give it the state by load_state_dict(optimizer.state_dict())"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is made: a parameter alone does not say what goes into its layer.

        Raises:
            ModelError: always, then.
        """
        if self._is_whole:
            raise ModelError(
                "KFAC(model) trains what was trained in the model when it was made: after unfreezing layers, make "
                "another one, before run.prepare"
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, and the sums of which factors are made."""
        super().zero_grad(set_to_none)
        for layer in self._layers:
            layer.forget()

    @property
    def _own(self) -> dict[str, Any]:
        """What is kept once. Settings are the script's, so it lies beside what is kept of the first parameter."""
        found: dict[str, Any] = self.state.get(self._layers[0].module.weight, {})
        return found

    def _is_due(self, name: str) -> bool:
        return int(self._own.get("step", 0)) % int(self.param_groups[0][name]) == 0

    def _takes_factors(self) -> bool:
        return self._is_due("factors_every")

    def _averaged(self, layer: KnownLayer, place: int) -> Tensor | None:
        """The running average of a factor as the next step leaves it."""
        state = self.state.get(layer.module.weight, {})
        before: Tensor | None = state.get(_NAMES[place])
        new = layer.factor(place)
        if new is None or before is None:
            return before if new is None else new
        kept = min(1 - 1 / (int(state["estimates"]) + 1), float(self.param_groups[0]["decay"]))
        return before * kept + new * (1 - kept)

    def _decomposed(self, piece: int, average: Tensor | None) -> Piece:
        if average is None:
            device = self._layers[piece // 2].module.weight.device
            return [torch.zeros_like(one, device=device) for one in self.forms(piece)]
        values, vectors = torch.linalg.eigh(average)
        return [vectors.contiguous(), values.clamp(min=0.0)]  # rounding makes small ones negative

    def _keep(self, layer: KnownLayer, averages: Sequence[Tensor | None], decomposed: Sequence[Piece]) -> None:
        state = self.state[layer.module.weight]
        if layer.counts.grad is not None:
            state["estimates"] = state.get("estimates", torch.tensor(0.0)) + 1
        layer.forget()
        for name, average in zip(_NAMES, averages, strict=True):
            if average is not None:
                state[name] = average
        if averages[0] is not None:
            for name, (vectors, values) in zip(_NAMES, decomposed, strict=False):
                state[f"{name}_vectors"], state[f"{name}_values"] = vectors, values

    def _update(self) -> None:
        group = self.param_groups[0]
        updates = {
            number: (gradient, self._preconditioned(layer, gradient))
            for number, layer in enumerate(self._layers)
            if (gradient := layer.gradient) is not None
        }
        # In the layers' order, whoever computes.
        total = sum(float((one.double() * other.double()).sum()) for one, other in updates.values())
        size, most = total * float(group["lr"]) ** 2, group["kl_clip"]
        shorter = 1.0 if most is None or size <= most else math.sqrt(most / size)
        for number, (_, update) in updates.items():
            layer = self._layers[number]
            for parameter, part in zip(layer.parameters, layer.cut(update * shorter), strict=True):
                if group["weight_decay"]:
                    part.add_(parameter, alpha=group["weight_decay"])
                parameter.add_(self._with_momentum(parameter, part), alpha=-float(group["lr"]))

    def _with_momentum(self, parameter: Tensor, part: Tensor) -> Tensor:
        if not (momentum := self.param_groups[0]["momentum"]):
            return part
        state = self.state[parameter]
        if "momentum_buffer" in state:
            part.add_(state["momentum_buffer"], alpha=momentum)
        state["momentum_buffer"] = part
        return part

    def _preconditioned(self, layer: KnownLayer, gradient: Tensor) -> Tensor:
        """(A ⊗ G + λI)⁻¹ of a layer's gradient; until there are factors, the gradient."""
        state = self.state.get(layer.module.weight, {})
        if "inputs_vectors" not in state:
            return gradient
        right, left = state["inputs_vectors"], state["outputs_vectors"]
        values = torch.outer(state["outputs_values"], state["inputs_values"]) + self.param_groups[0]["damping"]
        found: Tensor = left @ ((left.T @ gradient @ right) / values) @ right.T
        return found


def _check(settings: Mapping[str, Any]) -> None:
    """Refuse settings out of their range."""
    ranges = {
        "lr": 0 <= settings["lr"] < math.inf,
        "momentum": 0 <= settings["momentum"] < 1,
        "weight_decay": 0 <= settings["weight_decay"] < math.inf,
        "damping": 0 < settings["damping"] < math.inf,
        "kl_clip": settings["kl_clip"] is None or settings["kl_clip"] > 0,
        "decay": 0 <= settings["decay"] < 1,
        "factors_every": settings["factors_every"] >= 1,
        "inverses_every": settings["inverses_every"] >= 1
        and settings["inverses_every"] % max(1, settings["factors_every"]) == 0,
    }
    if odd := next((name for name, is_right in ranges.items() if not is_right), ""):
        raise ModelError(
            f"KFAC({odd}={settings[odd]!r}): rates and decays are from 0 on, momentum and decay below 1, damping and "
            f"kl_clip above 0, and inverses_every is a multiple of factors_every, which is at least 1"
        )
