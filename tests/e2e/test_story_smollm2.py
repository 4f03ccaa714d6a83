"""The story on the real small model: the demo's own drafter, served as it was trained and in each wrong way."""

import pytest

from infra.settings import Settings
from tasks.story import FIX, SWAPPED, UP
from tests.e2e.claims import (
    assert_costs,
    assert_exchanged,
    assert_other_layers,
    assert_same_text,
    assert_served_as_trained,
)
from tests.e2e.stack import Command
from tests.replays import Played, play_smollm2

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def played(demo_command: Command, demo_shown: str, tmp_path_factory: pytest.TempPathFactory) -> Played:
    [drafter] = (demo_command.home / "cache" / "drafters").iterdir()
    settings = Settings(home=demo_command.home, sglang_device="cpu", sglang_start_timeout=400)
    return play_smollm2(drafter, tmp_path_factory.mktemp("story"), settings)


def test_no_mistake_changes_the_text_and_the_gross_ones_cost_acceptance(played: Played) -> None:
    assert_served_as_trained(played, floor=1.5)
    assert_same_text(played)
    for name in (FIX, SWAPPED):
        assert_costs(played, name)


def test_every_cause_is_named(played: Played) -> None:
    """Also of one layer off, which acceptance does not show here."""
    assert_other_layers(played, FIX, ("embed", "layers.2", "layers.15"), cure="[2, 15, 27]")
    assert_other_layers(played, UP, ("layers.3", "layers.16", "layers.28"), cure="[2, 15, 27]")
    assert_exchanged(played)
