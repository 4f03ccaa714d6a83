"""Are these the bytes that were written? Sizes and digests of files. Imports no torch: verifying hashes, no more."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from eagle3.dump.files import NotAsWritten, named_file, read_manifest
from eagle3.dump.manifest import DumpError, FileEntry
from eagle3.evidence.findings import Findings
from eagle3.evidence.report import Check, EvidenceReport


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
            named_file(self._folder, entry)
        except NotAsWritten as error:
            self._wrong.add(error.fact)

    def see_broken(self, entry: FileEntry, fact: str) -> None:
        """A file that did not arrive from where the dump is published; `fact` says why, without advice."""
        self._files += 1
        self._bytes += entry.bytes
        self._wrong.add(fact)

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

    def join(self, later: "FileIntegrity") -> None:
        """The files that another worker looked at, after these."""
        self._files += later._files
        self._bytes += later._bytes
        self._wrong.join(later._wrong)

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


def verify_integrity(
    folder: Path, *, expect_sha256: str | None = None, on_progress: Callable[[int, int], None] | None = None
) -> EvidenceReport:
    """The file checks alone: is this the dump that was published, byte for byte? `on_progress` counts files.

    Raises DumpError where there is no manifest to check against.
    """
    manifest = read_manifest(folder)
    files = FileIntegrity(folder, expect_sha256 or manifest.digest())
    files.see_manifest()
    for number, entry in enumerate(manifest.files, start=1):
        files.see_file(entry)
        if on_progress is not None:
            on_progress(number, len(manifest.files))
    return EvidenceReport(dump_sha256=manifest.digest(), checks=tuple(files.conclude()), created_at=datetime.now(UTC))
