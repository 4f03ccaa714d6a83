"""The evidence that a drafter rests on: current, or said to be stale."""

from typing import TYPE_CHECKING

from prefect.logging import get_run_logger

from eagle3.errors import Eagle3Error
from infra.settings import Settings
from tasks.validation import read_report

if TYPE_CHECKING:
    from eagle3.contract import DrafterContract
    from eagle3.evidence.report import EvidenceReport
    from eagle3.evidence.standing import Standing


def tell_standing(contract: "DrafterContract", settings: Settings) -> "Standing":
    """Warn in the run's log where the report that the contract rests on is not today's. Refuses nothing: figures of an
    older drafter are still figures."""
    from eagle3.evidence.standing import contract_standing

    found = contract_standing(contract, stored_report(contract.dump_sha256, settings))
    if not found.current:
        get_run_logger().warning("the drafter's evidence is stale: %s", found.reason)
    return found


def stored_report(dump_sha256: str, settings: Settings) -> "EvidenceReport | None":
    """The last report on a dump; None where the store has none, or none that can be read."""
    try:
        return read_report(dump_sha256, settings)
    except Eagle3Error:
        return None
