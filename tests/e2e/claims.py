"""What must hold of every replay of the story, whatever the target."""

from tasks.story import SWAPPED
from tests.replays import Played


def assert_served_as_trained(played: Played, *, floor: float) -> None:
    """The floor first: a drafter that accepts nothing has nothing to lose. Then: nothing to find."""
    right = played.right
    assert right.figure.length > floor
    assert right.seen.findings == ()
    assert right.seen.attribution is not None
    assert right.seen.attribution.verdict == "proven"
    assert right.seen.delivered() == played.checkpoint.contract.capture.aux


def assert_same_text(played: Played) -> None:
    """Every variant gives plain greedy decoding's very text: nothing shows that anything is wrong."""
    assert {name: row.same_text for name, row in played.rows.items()} == dict.fromkeys(played.rows, played.prompts)


def assert_costs(played: Played, name: str) -> None:
    """Fewer tokens a verification, prompt by prompt, outside the interval of the difference."""
    difference = played.rows[name].difference
    assert difference is not None
    assert difference.high < 0, f"{name}: {difference}"


def assert_other_layers(played: Played, name: str, delivered: tuple[str, ...], *, cure: str) -> None:
    """Contract check and tensors name the same cause, and the check the value that mends it."""
    row = played.rows[name]
    [finding] = row.seen.findings
    wanted = played.checkpoint.contract.capture.aux
    assert finding.subject == "layers"
    assert f"delivers {', '.join(delivered)}" in finding.wrong
    assert f"trained on {', '.join(wanted)}" in finding.wrong
    assert cure in finding.cure
    assert finding.causes, f"{name}: no cause is named"
    assert row.seen.delivered() == delivered
    assert row.seen.attribution is not None
    assert row.seen.attribution.verdict == "refuted"
    *slots, final = row.seen.attribution.slots
    right = [found == claimed for found, claimed in zip(delivered, wanted, strict=True)]  # one may be right by chance
    assert [slot.verdict for slot in slots] == ["proven" if fits else "refuted" for fits in right]
    assert final.verdict == "proven"


def assert_exchanged(played: Played) -> None:
    """The states are delivered right: it is the weights that read them in another order."""
    row = played.rows[SWAPPED]
    [finding] = row.seen.findings
    first, second, third = played.checkpoint.contract.capture.aux
    assert finding.subject == "weights"
    assert f"reads its slots as {first}, {third}, {second}, and gets {first}, {second}, {third}" in str(finding)
    assert row.seen.attribution is not None
    assert row.seen.attribution.verdict == "proven"
