"""The probe's own eyes: every boundary of one forward pass, seen by hooks on the live model's modules. Part of the tap.

The rows that SGLang itself captures come through `layers_to_capture`, whose meaning is what a probe is to prove. So a
probe looks elsewhere: pre-hooks on the decoder layers and on the final norm see what goes in (hidden + residual), a
hook on the norm what comes out. They are there for the passes that hold a probe, and removed after each.

SGLang 0.5.23 hands the residual stream on in two ways, and a state that is in neither is refused, never guessed at:

- `forward_batch.residual_stream` (Llama, Qwen, DeepSeek, Kimi and most others): the layer's input is an opaque handle,
  which may still owe a sum over ranks. The stream's own `snapshot` completes a copy; so every rank has to call it, and
  a walk runs on every rank, on one that keeps no rows too.
- an argument `residual` of the layer, None at the first one (Gemma 3, LFM2).
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch


class ProbeRefused(ValueError):
    """A model, or a way to run it, whose boundaries cannot be seen."""


def check_parallel() -> None:
    """Refuse what spreads the rows of one request over ranks; the same on every rank."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.attn_dp_size > 1 or parallel.attn_cp_size > 1:
        raise ProbeRefused("attention is spread over ranks by requests or by context: no rank sees every row")


def decoder_of(model: Any, path: str, num_layers: int) -> tuple[list[torch.nn.Module], torch.nn.Module]:
    """The decoder layers in order and the final norm of the module at `path`, which captures layers."""
    decoder = model.get_submodule(path)
    layers, norm = list(getattr(decoder, "layers", ())), getattr(decoder, "norm", None)
    if not path or len(layers) != num_layers or not isinstance(norm, torch.nn.Module):
        raise ProbeRefused(
            f"{type(decoder).__name__} (`{path}`) has {len(layers)} layers and {'a' if norm is not None else 'no'} "
            f"`norm`, expected {num_layers} layers and the final norm"
        )
    return layers, norm


class Walk:
    """Looks at one forward pass: its hooks are there from the beginning to `end`.

    `spans`: first and last packed row of each request that is kept, by its place in the batch; none on a rank that
    does not write. What goes wrong is kept in `failure`: a hook never raises, and goes on to look at later layers,
    because the other ranks do.
    """

    def __init__(
        self,
        layers: list[torch.nn.Module],
        norm: torch.nn.Module,
        *,
        hidden_size: int,
        num_tokens: int,
        spans: Mapping[int, tuple[int, int]],
    ) -> None:
        self.failure: str | None = None
        self._hidden_size, self._num_tokens, self._spans = hidden_size, num_tokens, spans
        self._count = len(layers) + 2  # boundaries 0 ... N, and the norm's output
        self._seen: list[dict[int, torch.Tensor]] = []  # by boundary: place in the batch -> [rows, H]
        self._hooks = [
            module.register_forward_pre_hook(self._before(boundary), with_kwargs=True)
            for boundary, module in enumerate((*layers, norm))
        ]
        self._hooks.append(norm.register_forward_hook(self._after_norm))

    def end(self) -> None:
        """Remove the hooks; called again it does nothing."""
        while self._hooks:
            self._hooks.pop().remove()
        if len(self._seen) != self._count:
            self._fail(
                f"{len(self._seen)} of {self._count} boundaries were seen: the engine ran layers outside their modules "
                "(two-batch overlap, a CUDA graph, a fused final norm)"
            )

    def rows(self, index: int) -> torch.Tensor:
        """[rows, N + 2, H] in the host's memory: `embed`, the layers' outputs, `norm`, of the request at that place."""
        return torch.stack([seen[index] for seen in self._seen], dim=1).cpu()

    def _before(self, boundary: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            try:
                is_norm = boundary == self._count - 2
                self._keep(boundary, norm_input(args, named) if is_norm else layer_input(module, args, named))
            except Exception as error:  # noqa: BLE001 - an exception in a hook kills the scheduler
                self._fail(f"before module {boundary} ({type(module).__name__}): {type(error).__name__}: {error}")

        return hook

    def _after_norm(self, _module: Any, _args: Any, output: Any) -> None:
        try:
            self._keep(self._count - 1, output[0] if isinstance(output, tuple) else output)
        except Exception as error:  # noqa: BLE001 - see above
            self._fail(f"after the final norm: {type(error).__name__}: {error}")

    def _keep(self, boundary: int, state: Any) -> None:
        if boundary != len(self._seen):
            raise ProbeRefused(f"boundary {boundary} came where {len(self._seen)} was due")
        if not isinstance(state, torch.Tensor) or state.ndim != 2 or state.shape[1] != self._hidden_size:
            what = list(state.shape) if isinstance(state, torch.Tensor) else type(state).__name__
            raise ProbeRefused(f"the state is {what}, expected [tokens, {self._hidden_size}]")
        if state.shape[0] < self._num_tokens:
            raise ProbeRefused(f"{state.shape[0]} rows for {self._num_tokens} tokens: they are scattered over ranks")
        self._seen.append({index: state[start:end].clone() for index, (start, end) in self._spans.items()})

    def _fail(self, why: str) -> None:
        self.failure = self.failure or why


def layer_input(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> torch.Tensor:
    """The residual stream at the input of a decoder layer, complete and in memory of its own: [tokens, H].

    Does not change what the layer will read.
    """
    given = inspect.signature(module.forward).bind(*args, **named).arguments
    if "hidden_states" not in given or "forward_batch" not in given:
        raise ProbeRefused(f"the layer is called with {', '.join(given)}: no hidden_states and forward_batch")
    hidden, stream = given["hidden_states"], getattr(given["forward_batch"], "residual_stream", None)
    if stream is not None:
        state: torch.Tensor = stream.snapshot(hidden)
        return state
    return _sum(hidden, given.get("residual"))


def norm_input(args: tuple[Any, ...], named: dict[str, Any]) -> torch.Tensor:
    """What the final norm is applied to: its one argument, or the sum of hidden state and residual."""
    given = dict(zip(("x", "residual"), args, strict=False)) | named
    return _sum(given.get("x"), given.get("residual"))


def _sum(hidden: Any, residual: Any) -> torch.Tensor:
    if not isinstance(hidden, torch.Tensor) or getattr(hidden, "_sglang_needs_allreduce_fusion", False):
        raise ProbeRefused("the hidden state still owes a sum over ranks")
    return hidden.clone() if residual is None else hidden + residual
