"""How the tap keeps the rows of one request: positions are overwritten, gaps are found, nothing is kept twice."""

import random
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infra.sglang.tap import Tap, asks, capture_list, why_refused
from infra.sglang.tap_files import publish
from infra.sglang.tap_rows import Capture, collect

pytestmark = pytest.mark.unit

WIDTH = 4


def rows(position: int, count: int, mark: int = 0) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows that tell their position and the pass that wrote them."""
    ids = torch.arange(position, position + count) + 1000 * mark
    aux = ids[:, None].expand(count, 3 * WIDTH).to(torch.float32)
    return position, ids, aux.clone(), aux[:, :WIDTH].clone()


def joined(capture: Capture) -> dict[str, torch.Tensor]:
    return {name: torch.cat(parts) for name, parts in capture.tensors().items()}


def kept(capture: Capture) -> list[int]:
    tensors = joined(capture)
    ids = tensors["input_ids"].tolist()
    assert tensors["aux_hidden_states"][:, -1].tolist() == ids
    assert tensors["final_hidden_state"][:, 0].tolist() == ids
    assert tensors["input_ids"].dtype == torch.int64
    return ids


def test_chunks_and_decoded_tokens_follow_each_other() -> None:
    capture = Capture()
    for position, count in ((0, 5), (5, 3), (8, 1), (9, 1)):
        capture.write(*rows(position, count))
    assert capture.rows == 10
    assert kept(capture) == list(range(10))


def test_a_later_pass_over_the_same_positions_wins() -> None:
    capture = Capture()
    for position, count, mark in ((0, 5, 0), (5, 4, 0), (7, 3, 1), (3, 2, 2)):
        capture.write(*rows(position, count, mark))
    assert kept(capture) == [0, 1, 2, 2003, 2004]
    assert capture.rows == 5


def test_a_request_that_starts_again_keeps_only_its_second_pass() -> None:
    capture = Capture()
    capture.write(*rows(0, 6))
    capture.write(*rows(6, 1))
    capture.write(*rows(0, 7, 1))
    assert kept(capture) == list(range(1000, 1007))


def test_a_gap_fails_for_good_and_lets_the_rows_go() -> None:
    capture = Capture()
    capture.write(*rows(0, 4))
    capture.write(*rows(6, 2))
    assert capture.failure is not None
    assert "rows 4 to 5" in capture.failure
    assert capture.rows == 0
    first = capture.failure
    capture.fail("another reason")
    assert capture.failure == first


def test_rows_behind_the_end_are_cut_off() -> None:
    capture = Capture()
    capture.write(*rows(0, 4))
    capture.write(*rows(4, 3))
    capture.rewind(5)
    assert kept(capture) == [0, 1, 2, 3, 4]
    capture.rewind(9)
    assert capture.rows == 5


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_passes_leaves_what_a_plain_list_would(seed: int) -> None:
    numbers = random.Random(seed)
    capture, plain = Capture(), list[int]()
    for mark in range(30):
        position, count = numbers.randint(0, len(plain)), numbers.randint(1, 6)
        capture.write(*rows(position, count, mark))
        plain[position:] = [position + i + 1000 * mark for i in range(count)]
        assert capture.rows == len(plain)
    assert kept(capture) == plain


def batch(lengths: list[int], positions: list[int]) -> Any:
    mode = SimpleNamespace(is_target_verify=lambda: False, is_decode=lambda: False, is_extend=lambda: True)
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=len(lengths),
        extend_seq_lens_cpu=lengths,
        positions=torch.tensor(positions),
    )


def test_rows_of_a_batch_go_to_their_requests_and_hold_no_memory_of_the_engine() -> None:
    first, third = Capture(), Capture()
    lengths, positions = [3, 2, 4], [0, 1, 2, 7, 8, 0, 1, 2, 3]
    ids = torch.arange(9) + 50
    layers = [torch.full((9, WIDTH), float(k)) + ids[:, None] for k in range(3)]
    final = -ids[:, None].expand(9, WIDTH).to(torch.float32).clone()
    rows = collect(
        [(0, first), (2, third)],
        input_ids=ids,
        hidden_states=final,
        logits_metadata=batch(lengths, positions),
        aux_hidden_states=layers,
    )
    ids.zero_()  # as the engine does while it prepares the next batch
    rows.keep()
    for tensor in (final, *layers):
        tensor.zero_()
    for capture, expected in ((first, [50, 51, 52]), (third, [55, 56, 57, 58])):
        assert all(part.untyped_storage().nbytes() == part.nbytes for part in chain(*capture.tensors().values()))
        tensors = joined(capture)
        assert tensors["input_ids"].tolist() == expected
        assert tensors["aux_hidden_states"][:, ::WIDTH].tolist() == [[i, i + 1, i + 2] for i in expected]
        assert tensors["final_hidden_state"][:, 0].tolist() == [-i for i in expected]


def test_rows_out_of_order_are_refused() -> None:
    """Siblings of a draft tree share a position."""
    tree = Capture()
    states = torch.zeros(3, WIDTH)
    collect(
        [(0, tree)],
        input_ids=torch.arange(3),
        hidden_states=states,
        logits_metadata=batch([3], [4, 5, 5]),
        aux_hidden_states=states,
    ).keep()
    assert tree.failure is not None
    assert "consecutive" in tree.failure


@pytest.mark.parametrize(("aux", "final"), [(None, 3), (3, 2), (2, 3)])
def test_a_batch_with_missing_rows_raises(aux: int | None, final: int) -> None:
    with pytest.raises(ValueError, match=r"captures no layers|scattered over ranks"):
        collect(
            [(0, Capture())],
            input_ids=torch.arange(3),
            hidden_states=torch.zeros(final, WIDTH),
            logits_metadata=batch([3], [0, 1, 2]),
            aux_hidden_states=None if aux is None else torch.zeros(aux, WIDTH),
        )


def request(rid: str = "r-1", *, params: Any = None, **sampling: Any) -> Any:
    known = {"custom_params": params, "n": 1, "beam_width": None, "max_new_tokens": 8} | sampling
    return SimpleNamespace(rid=rid, sampling_params=SimpleNamespace(**known))


@pytest.mark.parametrize("params", [None, {}, {"tap": False}, {"tap": 1}, {"tap": "true"}, "tap", ["tap"]])
def test_only_tap_true_or_probe_asks(params: Any) -> None:
    assert not asks(request(params=params))
    assert asks(request(params={"tap": True, "other": 1}))
    assert asks(request(params={"tap": "probe"}))


CHAIN, TREE, NONE = (SimpleNamespace(speculative_eagle_topk=topk) for topk in (1, 2, None))


@pytest.mark.parametrize(
    ("asked", "args", "word"),
    [
        (request("../x"), NONE, "file name"),
        (request("x" * 129), NONE, "file name"),
        (request(n=2), NONE, "ask for one"),
        (request(beam_width=4), NONE, "ask for one"),
        (request(), TREE, "trees"),
        (request(params={"tap": "probe"}, max_new_tokens=2), NONE, "one token"),
        (request(params={"tap": "probe"}, max_new_tokens=1), NONE, None),
        (request("a.B_c-9"), CHAIN, None),
        (request("x" * 128), NONE, None),
    ],
)
def test_what_cannot_be_captured_is_refused_with_its_reason(asked: Any, args: Any, word: str | None) -> None:
    refusal = why_refused(asked, args)
    assert (refusal is None) if word is None else (refusal is not None and word in refusal)


class Layers(torch.nn.Module):
    def __init__(self, captured: list[int], **children: torch.nn.Module) -> None:
        super().__init__()
        self.layers_to_capture = captured
        for name, child in children.items():
            self.add_module(name, child)


def test_capture_list_is_found_behind_wrappers() -> None:
    inner = torch.nn.Module()
    inner.model = Layers([3, 31, 59])
    wrapper = Layers([], vision_tower=Layers([]), language_model=inner)
    assert capture_list(wrapper) == ("language_model.model", [3, 31, 59])
    assert capture_list(Layers([])) == ("", [])
    with pytest.raises(ValueError, match="different layers"):
        capture_list(Layers([1], model=Layers([2])))


def test_a_hook_that_fails_becomes_an_event(tmp_path: Any) -> None:
    tap = Tap(tmp_path)
    tap.finish(SimpleNamespace(rid="broken-1"))
    (log,) = tmp_path.glob("events.*.jsonl")
    assert '"event": "error", "rid": "broken-1"' in log.read_text()


def test_an_event_that_cannot_be_written_is_passed_over(tmp_path: Any) -> None:
    Tap(tmp_path / "missing").event("published", "r-1")


def test_a_file_is_published_whole_or_not_at_all(tmp_path: Any) -> None:
    def half(path: Any) -> None:
        path.write_text("half")
        raise OSError("disk full")

    publish(tmp_path / "a", lambda path: path.write_text("whole"))
    with pytest.raises(OSError, match="disk full"):
        publish(tmp_path / "a", half)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "whole")]
