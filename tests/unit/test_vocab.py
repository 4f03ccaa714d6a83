"""The draft vocabulary: how it is chosen, and what is refused."""

import pytest
import torch

from eagle3.drafter.vocab import VocabMap, VocabMapError, count_tokens

pytestmark = pytest.mark.unit


def test_the_most_frequent_tokens_are_chosen_and_sorted() -> None:
    counts = torch.tensor([0, 5, 0, 9, 1, 0, 2, 0])
    assert VocabMap.most_frequent(counts, 3).target_ids.tolist() == [1, 3, 6]


def test_places_without_a_counted_token_take_the_smallest_unused_ids() -> None:
    counts = torch.tensor([0, 0, 0, 0, 4, 0, 1, 0])
    assert VocabMap.most_frequent(counts, 5).target_ids.tolist() == [0, 1, 2, 4, 6]


def test_tokens_of_the_prompts_come_before_the_smallest_unused_ids() -> None:
    counts, prompts = torch.tensor([0, 0, 0, 0, 1, 0, 0, 3]), torch.tensor([0, 0, 0, 2, 50, 9, 0, 0])
    assert VocabMap.most_frequent(counts, 3, fill_from=prompts).target_ids.tolist() == [4, 5, 7]
    assert VocabMap.most_frequent(counts, 5, fill_from=prompts).target_ids.tolist() == [0, 3, 4, 5, 7]


def test_ties_go_to_the_smaller_id() -> None:
    assert VocabMap.most_frequent(torch.tensor([1, 3, 3, 3, 3]), 2).target_ids.tolist() == [1, 2]


def test_only_tokens_under_the_loss_mask_are_counted() -> None:
    sequences = [
        (torch.tensor([7, 7, 2, 3]), torch.tensor([False, False, True, True])),
        (torch.tensor([7, 3]), torch.tensor([False, True])),
    ]
    assert count_tokens(sequences, 8).tolist() == [0, 0, 1, 2, 0, 0, 0, 0]


def test_a_token_outside_the_target_is_refused() -> None:
    with pytest.raises(VocabMapError, match="do not belong together"):
        count_tokens([(torch.tensor([1, 8]), torch.tensor([True, True]))], 8)


def test_coverage_is_the_share_of_counted_tokens() -> None:
    vocab = VocabMap(torch.tensor([1, 3]), 5)
    assert vocab.coverage(torch.tensor([2, 6, 0, 0, 2])) == 0.6
    assert vocab.coverage(torch.zeros(5, dtype=torch.int64)) == 0.0


def test_the_tensors_of_a_map_lead_back_to_it() -> None:
    vocab = VocabMap(torch.tensor([0, 2, 3, 7]), 9)
    assert vocab.d2t.tolist() == [0, 1, 1, 4]  # offsets: 0+0, 1+1, 2+1, 3+4
    assert vocab.t2d.nonzero()[:, 0].tolist() == [0, 2, 3, 7]
    again = VocabMap.from_tensors(vocab.d2t, vocab.t2d)
    assert again.target_ids.tolist() == [0, 2, 3, 7]
    assert again.digest() == vocab.digest()


def test_a_full_vocabulary_is_an_identity_of_zeros() -> None:
    vocab = VocabMap.from_tensors(torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.bool))
    assert vocab.target_ids.tolist() == [0, 1, 2, 3]


def test_offsets_of_0_1_2_are_right_where_every_second_token_is_chosen() -> None:
    t2d = torch.tensor([True, False, True, False, True])
    assert VocabMap.from_tensors(torch.arange(3), t2d).target_ids.tolist() == [0, 2, 4]


@pytest.mark.parametrize(
    ("d2t", "chosen", "message"),
    [
        ([2, 3, 7], [2, 3, 7], "target ids instead of offsets"),
        ([0, 1, 2], [2, 3, 7], "0, 1, 2, .*maps draft id i to target id 2i"),
        ([2, 2, 4], [2, 3, 7], "draft id 2 stands for target id 6 by d2t, for 7 by t2d"),
        ([2, 2], [2, 3, 7], "t2d marks 3 tokens, d2t has 2 entries"),
    ],
)
def test_a_wrong_d2t_is_named_for_what_it_is(d2t: list[int], chosen: list[int], message: str) -> None:
    t2d = torch.zeros(9, dtype=torch.bool)
    t2d[chosen] = True
    with pytest.raises(VocabMapError, match=message):
        VocabMap.from_tensors(torch.tensor(d2t), t2d)


@pytest.mark.parametrize(
    ("d2t", "t2d", "message"),
    [
        (torch.zeros(2, dtype=torch.int32), torch.ones(2, dtype=torch.bool), "d2t must be int64"),
        (torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.uint8), "t2d must be bool"),
        (torch.zeros(0, dtype=torch.int64), torch.zeros(2, dtype=torch.bool), "non-empty"),
    ],
)
def test_tensors_of_another_kind_are_refused(d2t: torch.Tensor, t2d: torch.Tensor, message: str) -> None:
    with pytest.raises(VocabMapError, match=message):
        VocabMap.from_tensors(d2t, t2d)


@pytest.mark.parametrize(
    ("ids", "message"),
    [([3, 1], "strictly increasing"), ([1, 1], "strictly increasing"), ([1, 9], "0 to 8"), ([-1, 2], "0 to 8")],
)
def test_target_ids_that_break_an_invariant_are_refused(ids: list[int], message: str) -> None:
    with pytest.raises(VocabMapError, match=message):
        VocabMap(torch.tensor(ids), 9)


def test_a_vocabulary_larger_than_the_targets_is_refused() -> None:
    with pytest.raises(VocabMapError, match="the target has 4"):
        VocabMap.most_frequent(torch.ones(4, dtype=torch.int64), 5)
