"""The evidence that a drafter rests on: current, or said to be stale."""

from typing import TYPE_CHECKING

from prefect.logging import get_run_logger

from eagle3.errors import Eagle3Error
from infra.settings import Settings
from infra.store import open_store
from tasks.validation import report_key

if TYPE_CHECKING:
    from eagle3.contract import DrafterContract
    from eagle3.evidence.report import EvidenceReport
    from eagle3.evidence.standing import Standing

MAX_REPORT_BYTES = 16 * 2**20


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
    from eagle3.evidence.report import EvidenceReport

    key = report_key(dump_sha256)
    try:
        data = open_store(settings.store, settings).get_bytes(key, max_bytes=MAX_REPORT_BYTES)
        return EvidenceReport.parse(data, where=f"{settings.store}/{key}")
    except Eagle3Error:
        return None
