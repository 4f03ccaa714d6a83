"""The probe's hooks: every boundary in either of SGLang's conventions, a refusal for what is in neither, no trace."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infra.sglang.tap_probe import ProbeRefused, Walk, decoder_of
from infra.sglang.tap_rows import Capture, collect

pytestmark = pytest.mark.unit

WIDTH, TOKENS = 4, 5


class Layer(torch.nn.Module):
    """Adds 1 to the stream; called with the residual as an argument (Gemma 3), None at the first layer."""

    def forward(
        self, positions: Any, hidden_states: Any, forward_batch: Any, residual: Any = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = hidden_states if residual is None else residual.add_(hidden_states)  # in place, as kernels do
        return torch.ones_like(residual), residual


class Norm(torch.nn.Module):
    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        return x * 10 if residual is None else ((x + residual) * 10, x + residual)


class Decoder(torch.nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(count))
        self.norm = Norm()
        self.layers_to_capture = [1]

    def forward(self, hidden: torch.Tensor, *, by_name: bool = False) -> torch.Tensor:
        residual, batch = None, SimpleNamespace(residual_stream=None)
        for layer in self.layers:
            if by_name:
                hidden, residual = layer(
                    positions=None, hidden_states=hidden, forward_batch=batch, residual=residual, last=True
                )
            else:
                hidden, residual = layer(None, hidden, batch, residual)
        normed: torch.Tensor = self.norm(hidden, residual)[0]
        return normed


class Stream:
    """A residual stream whose handle owes a sum over two ranks; a snapshot completes a copy."""

    def __init__(self) -> None:
        self.snapshots = 0

    def snapshot(self, handle: Any) -> torch.Tensor:
        self.snapshots += 1
        if handle.state is None:
            raise NotImplementedError("a finalize handoff requires main-output capture")
        return handle.state * 2


def start(decoder: Decoder, spans: dict[int, tuple[int, int]] | None = None, **changes: Any) -> Walk:
    given: dict[str, Any] = {"hidden_size": WIDTH, "num_tokens": TOKENS, "spans": spans or {0: (0, TOKENS)}} | changes
    return Walk(list(decoder.layers), decoder.norm, **given)


def hooks(decoder: Decoder) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in decoder.modules())


def entry() -> torch.Tensor:
    return torch.arange(TOKENS, dtype=torch.float32)[:, None].expand(TOKENS, WIDTH).clone()


@pytest.mark.parametrize("by_name", [False, True])
def test_every_boundary_is_hidden_plus_residual_and_is_a_copy(by_name: bool) -> None:
    decoder = Decoder()
    walk = start(decoder, {0: (0, 2), 3: (3, 5)})
    states = entry()
    decoder(states, by_name=by_name)
    walk.end()
    states.zero_()  # as the engine does with the next batch
    assert walk.failure is None
    for index, first in ((0, 0.0), (3, 3.0)):
        rows = walk.rows(index)
        assert tuple(rows.shape) == (2, 5, WIDTH)
        assert rows[0, :, 0].tolist() == [first, first + 1, first + 2, first + 3, 10 * (first + 3)]


def test_hooks_are_there_for_one_pass_alone() -> None:
    decoder = Decoder()
    assert hooks(decoder) == 0
    walk = start(decoder)
    assert hooks(decoder) == 5
    decoder(entry())
    walk.end()
    walk.end()
    assert hooks(decoder) == 0


def test_a_handle_is_completed_by_the_streams_own_snapshot() -> None:
    decoder, stream = Decoder(), Stream()
    batch = SimpleNamespace(residual_stream=stream)
    walk = start(decoder, {})  # a rank that keeps no rows takes part in every sum
    for layer in decoder.layers:
        layer.forward = lambda positions, hidden_states, forward_batch: None
        layer(None, SimpleNamespace(state=torch.ones(TOKENS, WIDTH)), batch)
    decoder.norm(torch.ones(TOKENS, WIDTH))
    walk.end()
    assert walk.failure is None
    assert stream.snapshots == 3


def test_what_a_snapshot_refuses_is_the_reason_and_raises_nothing() -> None:
    decoder = Decoder(1)
    walk = start(decoder)
    decoder.layers[0].forward = lambda positions, hidden_states, forward_batch: None
    decoder.layers[0](None, SimpleNamespace(state=None), SimpleNamespace(residual_stream=Stream()))
    walk.end()
    assert walk.failure == (
        "before module 0 (Layer): NotImplementedError: a finalize handoff requires main-output capture"
    )


@pytest.mark.parametrize(
    ("states", "word"),
    [
        (torch.zeros(TOKENS - 1, WIDTH), "4 rows for 5 tokens: they are scattered over ranks"),
        (torch.zeros(TOKENS, WIDTH // 2), r"the state is \[5, 2\], expected \[tokens, 4\]"),
        (torch.zeros(TOKENS, 2, WIDTH), r"the state is \[5, 2, 4\]"),
    ],
)
def test_a_state_that_is_scattered_or_sharded_is_refused(states: torch.Tensor, word: str) -> None:
    decoder = Decoder()
    walk = start(decoder)
    decoder(states)
    walk.end()
    assert re.search(word, walk.failure or "")


def test_padding_behind_the_rows_is_left_out() -> None:
    decoder = Decoder()
    walk = start(decoder, {0: (0, TOKENS - 2)}, num_tokens=TOKENS - 2)
    decoder(entry())
    walk.end()
    assert walk.failure is None
    assert len(walk.rows(0)) == TOKENS - 2


def test_a_tensor_that_still_owes_a_sum_is_refused() -> None:
    decoder, states = Decoder(), entry()
    states._sglang_needs_allreduce_fusion = True  # type: ignore[attr-defined]
    walk = start(decoder)
    decoder(states)
    walk.end()
    assert walk.failure is not None
    assert "owes a sum over ranks" in walk.failure


def test_layers_that_ran_outside_their_modules_or_twice_are_noticed() -> None:
    decoder = Decoder()
    walk = start(decoder)
    decoder.norm(entry())
    walk.end()
    assert walk.failure is not None
    assert "boundary 3 came where 0 was due" in walk.failure
    walk = start(decoder)
    walk.end()
    assert walk.failure is not None
    assert "0 of 5 boundaries were seen" in walk.failure
    walk = start(decoder)
    decoder(entry())
    decoder(entry())
    walk.end()
    assert walk.failure is not None
    assert "boundary 0 came where 5 was due" in walk.failure


def test_a_layer_that_is_called_otherwise_is_refused() -> None:
    decoder = Decoder(1)
    walk = start(decoder)
    decoder.layers[0].forward = lambda x, batch: x
    decoder.layers[0](entry(), None)
    walk.end()
    assert walk.failure is not None
    assert "called with x, batch" in walk.failure


def test_decoder_and_norm_are_found_behind_a_wrapper_and_refused_where_they_do_not_fit() -> None:
    wrapper = torch.nn.Module()
    wrapper.language_model = torch.nn.Module()
    wrapper.language_model.model = Decoder()
    layers, norm = decoder_of(wrapper, "language_model.model", 3)
    assert (len(layers), type(norm)) == (3, Norm)
    for path, count in (("language_model.model", 4), ("language_model", 3), ("", 3)):
        with pytest.raises(ProbeRefused, match=f"expected {count} layers"):
            decoder_of(wrapper, path, count)


def test_only_the_probe_of_a_batch_is_lost_where_its_boundaries_are() -> None:
    probe, plain = Capture(probe=True), Capture()
    mode = SimpleNamespace(is_target_verify=lambda: False, is_decode=lambda: False, is_extend=lambda: True)
    metadata = SimpleNamespace(
        forward_mode=mode, batch_size=2, extend_seq_lens_cpu=[2, 3], positions=torch.tensor([0, 1, 0, 1, 2])
    )
    walk = start(Decoder())
    walk.end()
    collect(
        [(0, probe), (1, plain)],
        input_ids=torch.arange(5),
        hidden_states=entry(),
        logits_metadata=metadata,
        walk=walk,
        aux_hidden_states=entry(),
    ).keep()
    assert probe.failure is not None
    assert probe.failure.startswith("no probe: 0 of 5 boundaries")
    assert plain.tensors()["input_ids"][0].tolist() == [2, 3, 4]


def test_chunks_and_second_passes_of_a_probe_are_joined_like_any_rows() -> None:
    capture = Capture(probe=True)
    for position, count, mark in ((0, 4, 0), (4, 3, 0), (2, 3, 100)):
        rows = torch.arange(position, position + count, dtype=torch.float32)[:, None] + mark
        capture.write(position, rows[:, 0].long(), rows, rows, rows[:, None].expand(count, 5, 1).clone())
    tensors = {name: torch.cat(parts) for name, parts in capture.tensors().items()}
    assert tensors["boundaries"][:, 2, 0].tolist() == tensors["input_ids"].tolist() == [0, 1, 102, 103, 104]
