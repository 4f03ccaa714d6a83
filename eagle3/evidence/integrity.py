"""Are these the bytes that were written? Sizes and digests of the files, and the content digest of the tensors."""

from pathlib import Path

from eagle3.digests import sha256_file
from eagle3.dump.content import content_digest, sample_digest
from eagle3.dump.files import check_size, inside
from eagle3.dump.manifest import DumpError, FileEntry, Manifest
from eagle3.dump.reader import Sample, read_manifest
from eagle3.evidence.examination import Findings
from eagle3.evidence.report import Check


class FileIntegrity:
    """`integrity`: every file has the manifest's size and sha256, and the manifest is the one asked for."""

    def __init__(self, folder: Path, manifest_sha256: str) -> None:
        self._folder, self._manifest_sha256 = folder, manifest_sha256
        self._wrong = Findings()
        self._files, self._bytes = 0, 0

    def see_file(self, entry: FileEntry) -> None:
        self._files += 1
        self._bytes += entry.bytes
        try:
            path = inside(self._folder, entry.name)
            check_size(path, entry.bytes)
        except DumpError as error:
            self._wrong.add(str(error))
            return
        if (found := sha256_file(path)) != entry.sha256:
            self._wrong.add(f"{entry.name}: sha256 {found[:12]}… instead of {entry.sha256[:12]}…")

    def see_broken(self, entry: FileEntry, why: str) -> None:
        """A file that did not arrive from where the dump is published."""
        self._files += 1
        self._bytes += entry.bytes
        self._wrong.add(why)

    def see_manifest(self) -> None:
        """The manifest on the disk, read again: it must still be the one whose entries were checked."""
        self._files += 1
        try:
            found = read_manifest(self._folder).digest()
        except DumpError as error:
            self._wrong.add(str(error))
            return
        if found != self._manifest_sha256:
            self._wrong.add(f"manifest.json: digest {found[:12]}… instead of {self._manifest_sha256[:12]}…")

    def conclude(self) -> list[Check]:
        sentence = "Every file is the one that was written."
        if self._wrong.count:
            sentence = (
                f"Files are not what the manifest says: {self._wrong}. A copy broke off, a disk failed, or somebody "
                "changed the dump: fetch it again from where it was published; if it is broken there, extract again."
            )
        return [
            Check(
                name="integrity",
                verdict="fail" if self._wrong.count else "pass",
                value=f"{self._files - self._wrong.count} of {self._files} files right, {self._bytes / 1e6:.1f} MB",
                threshold="all sizes and sha256 as in the manifest",
                sentence=sentence,
            )
        ]


class Content:
    """`content`: the digest of every sample, computed again from its tensors, and the Merkle root over them."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._digests: list[tuple[str, str]] = []
        self._wrong = Findings()

    def see(self, sample: Sample) -> None:
        record = sample.record
        digest = sample_digest(
            sample.id, record.ids_sha256, record.prompt_tokens, sample.states, self._manifest.spec.points
        )
        self._digests.append((sample.id, digest))
        if digest != record.digest:
            self._wrong.add(f"sample {sample.id!r}")

    def conclude(self) -> list[Check]:
        root = content_digest(self._digests)
        right = root == self._manifest.content_digest and not self._wrong.count
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
                threshold=f"{self._manifest.content_digest[:12]}…, every sample's digest",
                sentence=sentence,
            )
        ]
