"""Every boundary of a Hugging Face target's residual stream, in canonical names."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from eagle3.capture import CapturePoint
from eagle3.target.files import TargetError


@torch.no_grad()
def hidden_states(
    model: torch.nn.Module, ids: Sequence[int] | torch.Tensor, num_layers: int
) -> dict[CapturePoint, torch.Tensor]:
    """Run one sequence of token ids [T] and return `embed`, `layers.0` ... `layers.(N-1)` and `norm`, each [T, H].

    Taken with hooks at the input of every decoder layer and of the final norm, because transformers' own
    `hidden_states[N]` is overwritten with the normed state: `layers.(N-1)` cannot be had from it. The states keep the
    model's dtype and device.
    """
    tokens = torch.as_tensor(ids, dtype=torch.long).reshape(1, -1)
    if tokens.numel() == 0:
        raise TargetError("no token ids: at least one is needed to compute hidden states")
    layers, norm = decoder_parts(model, num_layers)
    states: dict[CapturePoint, torch.Tensor] = {}

    def keep(point: CapturePoint, state: Any) -> None:
        # A copy: a later layer may add to its input in place.
        states[point] = state[0].detach().clone()  # [1, T, H] -> [T, H]

    def at_input(boundary: int) -> Callable[..., None]:
        point = CapturePoint.at_boundary(boundary)
        return lambda _module, args, kwargs: keep(point, args[0] if args else kwargs["hidden_states"])

    hooks = [
        module.register_forward_pre_hook(at_input(boundary), with_kwargs=True)
        for boundary, module in enumerate((*layers, norm))
    ]
    hooks.append(norm.register_forward_hook(lambda _module, _args, output: keep(CapturePoint("norm"), output)))
    try:
        model(input_ids=tokens.to(next(model.parameters()).device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return states


def decoder_parts(model: Any, num_layers: int) -> tuple[Sequence[torch.nn.Module], torch.nn.Module]:
    """The decoder layers and the final norm of a transformers model; TargetError where it is built otherwise."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    layers, norm = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
    if layers is None or norm is None or len(layers) != num_layers:
        raise TargetError(
            f"expected a decoder with {num_layers} `layers` and a final `norm`; {type(decoder).__name__} has "
            f"{'no layers' if layers is None else f'{len(layers)} layers'} and {'no' if norm is None else 'a'} norm. "
            "Is this the model of this target?"
        )
    return list(layers), norm
