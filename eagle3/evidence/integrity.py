"""Are these the tensors that were captured? The digest of every sample, and the Merkle root over them."""

from eagle3.dump.content import content_digest, sample_digest
from eagle3.dump.manifest import Manifest
from eagle3.dump.reader import Sample
from eagle3.evidence.findings import Findings
from eagle3.evidence.report import Check


class Content:
    """`content`: the digest of every sample, computed again from its tensors, and the Merkle root over them."""

    def __init__(self, manifest: Manifest) -> None:
        self._points, self._expected = manifest.spec.points, manifest.content_digest
        self._digests: list[tuple[str, str]] = []
        self._wrong = Findings()

    def see(self, sample: Sample) -> None:
        record = sample.record
        digest = sample_digest(
            sample.id,
            record.ids_sha256,
            record.prompt_tokens,
            sample.states,
            self._points,
            record.spans,
        )
        self._digests.append((sample.id, digest))
        if digest != record.digest:
            self._wrong.add(f"sample {sample.id!r}")

    def join(self, later: "Content") -> None:
        """The samples that another worker saw, after these."""
        self._digests += later._digests
        self._wrong.join(later._wrong)

    def conclude(self) -> list[Check]:
        root = content_digest(self._digests)
        right = root == self._expected and not self._wrong.count
        sentence = "The tensors are those that were captured under these sample ids."
        if self._wrong.count:
            sentence = (
                f"Tensors, ids or slot names are not those that were captured: {self._wrong}. The files fit the "
                "manifest, so they were rewritten, or samples were exchanged, after the capture: extract again."
            )
        elif not right:
            sentence = (
                "Every sample fits its own digest, but together they are not what was captured: samples were added, "
                "left out or renamed after the capture. Extract again, or merge the partitions again."
            )
        return [
            Check(
                name="content",
                verdict="pass" if right else "fail",
                value=f"{root[:12]}…, {len(self._digests) - self._wrong.count} of {len(self._digests)} samples right",
                threshold=f"{self._expected[:12]}…, every sample's digest",
                sentence=sentence,
            )
        ]
