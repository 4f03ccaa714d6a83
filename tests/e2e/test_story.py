"""The story replayed on the real SGLang: a drafter that meets other layers than it was trained on says the same text,
only slower, and nothing says why. Here the contract check and the tensors do, each time with the right cause.

On tiny targets that have learnt something (`tests.trained_targets`).
"""

from pathlib import Path

import pytest

from tasks.story import FIX, OLD, RIGHT, SWAPPED, UP
from tests.e2e.claims import (
    assert_costs,
    assert_exchanged,
    assert_other_layers,
    assert_same_text,
    assert_served_as_trained,
)
from tests.replays import DEEPSEEK_POINTS, LLAMA_POINTS, Played, play_tiny
from tests.trained_targets import train_deepseek, train_drafter, train_llama

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PROMPTS = 96  # of the whole replays: one layer off costs so little that 32 would not show it


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_llama(tmp_path_factory.mktemp("trained") / "llama")


@pytest.fixture(scope="module")
def short(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """The shortest form: served right, and with the wrong "fix"."""
    folder = tmp_path_factory.mktemp("short")
    drafter = train_drafter(llama, LLAMA_POINTS, folder / "drafter")
    return play_tiny(llama, drafter, folder, prompts=32, chosen=(RIGHT, FIX))


@pytest.fixture(scope="module")
def whole(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("whole")
    drafter = train_drafter(llama, LLAMA_POINTS, folder / "drafter", steps=400)
    return play_tiny(llama, drafter, folder, prompts=PROMPTS)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("deepseek")
    target = train_deepseek(folder / "target")
    drafter = train_drafter(target, DEEPSEEK_POINTS, folder / "drafter", steps=400)
    return play_tiny(target, drafter, folder, prompts=PROMPTS)


@pytest.mark.slow  # the tiny pipeline serves the wrong list in `make test`, the demo in `make test-all`
def test_the_wrong_fix_costs_acceptance_and_changes_no_text(short: Played) -> None:
    assert_served_as_trained(short, floor=1.9)
    assert_same_text(short)
    assert_costs(short, FIX)


@pytest.mark.slow
def test_the_cause_and_the_cure_of_the_wrong_fix_are_named(short: Played) -> None:
    assert_other_layers(short, FIX, ("embed", "layers.1", "layers.3"), cure="[1, 3, 5]")


@pytest.mark.slow
def test_no_mistake_changes_the_text_and_each_costs_acceptance(whole: Played) -> None:
    assert_served_as_trained(whole, floor=2.2)
    assert_same_text(whole)
    for name in (FIX, SWAPPED):
        assert_costs(whole, name)


@pytest.mark.slow
def test_one_layer_off_costs_so_little_that_acceptance_alone_would_hardly_find_it(whole: Played) -> None:
    fix, up = whole.rows[FIX].difference, whole.rows[UP].difference
    assert fix is not None
    assert up is not None
    assert up.mean < 0
    assert fix.high < up.low


@pytest.mark.slow
def test_every_cause_is_named(whole: Played) -> None:
    assert_other_layers(whole, FIX, ("embed", "layers.1", "layers.3"), cure="[1, 3, 5]")
    assert_other_layers(whole, UP, ("layers.2", "layers.4", "layers.6"), cure="[1, 3, 5]")
    assert_exchanged(whole)


@pytest.mark.slow
def test_under_the_other_convention_no_mistake_changes_the_text_and_each_costs_acceptance(deepseek: Played) -> None:
    assert_served_as_trained(deepseek, floor=2.2)
    assert_same_text(deepseek)
    for name in (FIX, SWAPPED, OLD):
        assert_costs(deepseek, name)


@pytest.mark.slow
def test_under_the_other_convention_every_cause_is_named(deepseek: Played) -> None:
    assert_other_layers(deepseek, FIX, ("embed", "layers.2", "layers.4"), cure="[3, 5, 6]")
    assert_other_layers(deepseek, UP, ("layers.3", "layers.5", "layers.6"), cure="[3, 5, 6]")
    assert_exchanged(deepseek)


@pytest.mark.slow
def test_a_list_for_an_older_sglang_is_named_by_the_version_that_it_was_for(deepseek: Played) -> None:
    assert_other_layers(deepseek, OLD, ("layers.1", "layers.3", "layers.4"), cure="[3, 5, 6]")
    [finding] = deepseek.rows[OLD].seen.findings
    assert finding.causes[0].startswith("Ids [2, 4, 5] mean layers.2, layers.4, layers.5 in SGLang up to 0.5.12")
