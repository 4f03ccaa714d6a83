"""Who a target is: digests of its weights, its config and its tokenizer, as they stand in manifests and contracts."""

import re
from pathlib import Path

from eagle3.digests import merkle, sha256_bytes, sha256_file, sha256_json
from eagle3.dump.manifest import TargetIdentity, TokenizerIdentity
from eagle3.target.config import CONFIG_NAME, TargetConfig
from eagle3.target.digest_cache import DigestCache
from eagle3.target.files import (
    MAX_CONFIG_BYTES,
    MAX_TOKENIZER_CONFIG_BYTES,
    TargetError,
    read_json_object,
)
from eagle3.target.weights import Weights

TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
TEMPLATE_NAME = "chat_template.jinja"
LEGACY_TEMPLATE_NAME = "chat_template.json"

# Every file that can change which ids a conversation becomes.
_TOKENIZER_FILES = (
    "tokenizer.json",
    TOKENIZER_CONFIG_NAME,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
    TEMPLATE_NAME,
    LEGACY_TEMPLATE_NAME,
)
_TOKENIZER_GLOBS = ("*.tiktoken", "tiktoken.model", "additional_chat_templates/*.jinja")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "tekken.json")

_HUB_SNAPSHOT = re.compile(r"models--(?P<name>[^/]+)/snapshots/(?P<revision>[0-9a-f]{40})$")


def target_identity(config: TargetConfig, weights: Weights, cache_dir: Path | None) -> TargetIdentity:
    """Identity of a target. Hashes all weight files (about 1.8 GB a CPU-second) that the cache does not know."""
    cache = DigestCache(cache_dir)
    leaves = [sha256_json([path.name, cache.sha256(path)]) for path in weights.paths()]
    cache.save()
    name, revision = _name_and_revision(config.path)
    return TargetIdentity(
        name=name,
        revision=revision,
        model_class=config.model_class,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        config_sha256=sha256_file(config.path / CONFIG_NAME),
        weights_sha256=merkle(leaves),
    )


def tokenizer_identity(folder: Path) -> TokenizerIdentity:
    """Digest over every file that decides which ids a conversation becomes: vocabulary, settings, template, code."""
    code = tokenizer_code(folder)
    files = tokenizer_files(folder, with_code=code is not None)
    template = chat_template(folder)
    return TokenizerIdentity(
        sha256=merkle(sha256_json([str(path.relative_to(folder)), sha256_file(path)]) for path in files),
        chat_template_sha256=None if template is None else sha256_bytes(template.encode()),
        remote_code=code is not None,
    )


def tokenizer_files(folder: Path, *, with_code: bool) -> tuple[Path, ...]:
    """The tokenizer's files in order of name. With code: every .py beside them, since one may import another."""
    found = {folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()}
    for pattern in (*_TOKENIZER_GLOBS, *(("*.py",) if with_code else ())):
        found.update(path for path in folder.glob(pattern) if path.is_file())
    vocabularies = [p for p in found if p.name in _VOCABULARIES or "tiktoken" in p.name]
    if not vocabularies:
        raise TargetError(
            f"{folder} has no tokenizer: expected tokenizer.json (or one of {', '.join(_VOCABULARIES[1:])}, "
            "tiktoken.model) beside the weights. Complete the download."
        )
    return tuple(sorted(found))


def tokenizer_code(folder: Path) -> str | None:
    """The class that the tokenizer's own code defines, e.g. `tokenization_kimi.TikTokenTokenizer`; None without code.

    It stands in `auto_map` of tokenizer_config.json, as a list [slow, fast] or under `AutoTokenizer`.
    """
    auto_map = _tokenizer_config(folder).get("auto_map")
    entry = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map
    if entry is None:
        return None
    named = [entry] if isinstance(entry, str) else [e for e in reversed(entry) if e] if isinstance(entry, list) else []
    if not named or not isinstance(named[0], str):
        raise TargetError(
            f"{folder / TOKENIZER_CONFIG_NAME}: auto_map must name a class such as "
            f'["tokenization_kimi.TikTokenTokenizer", null]; it is {auto_map!r:.120}'
        )
    return named[0]


def chat_template(folder: Path) -> str | None:
    """The template's text as transformers 5 finds it: chat_template.jinja, then tokenizer_config.json, then the old
    chat_template.json."""
    file = folder / TEMPLATE_NAME
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise TargetError(f"{file} is not UTF-8 text. Fetch it again.") from None
    template = _tokenizer_config(folder).get("chat_template")
    if template is None and (folder / LEGACY_TEMPLATE_NAME).is_file():
        template = read_json_object(folder / LEGACY_TEMPLATE_NAME, MAX_CONFIG_BYTES).get("chat_template")
    if isinstance(template, list):  # several named templates: the one that is used where none is asked for
        template = next(
            (t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None
        )
    if template is not None and not isinstance(template, str):
        raise TargetError(f"{folder / TOKENIZER_CONFIG_NAME}: chat_template must be text; it is {template!r:.80}")
    return template


def _tokenizer_config(folder: Path) -> dict[str, object]:
    file = folder / TOKENIZER_CONFIG_NAME
    return read_json_object(file, MAX_TOKENIZER_CONFIG_BYTES) if file.is_file() else {}


def _name_and_revision(folder: Path) -> tuple[str, str | None]:
    """A folder's name; inside the Hugging Face cache the repository's name and commit. Never the machine's path."""
    snapshot = _HUB_SNAPSHOT.search(folder.as_posix())
    if snapshot:
        return snapshot["name"].replace("--", "/"), snapshot["revision"]
    return folder.name, None
