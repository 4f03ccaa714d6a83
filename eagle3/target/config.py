"""A target's config.json in our own words, nested or flat."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.target.files import MAX_CONFIG_BYTES, TargetError, read_json_object

CONFIG_NAME = "config.json"
# Where neither `rope_theta` nor `rope_parameters` stands, the model class's own default holds; Llama's is this one.
DEFAULT_ROPE_THETA = 10000.0
# Larger than any model's, small enough that a nonsense value cannot ask for the machine's memory.
_MAX_COUNT = 2**31


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetConfig:
    """What config.json says. A vision-language target (Kimi-K2.5) keeps its decoder's numbers in `text_config`."""

    path: Path
    config: dict[str, Any]
    text_config: dict[str, Any]
    """The decoder's part: `config["text_config"]`, or the whole of `config` where it is flat."""
    model_class: str
    """`architectures[0]` of the outer config: the class that an engine serves, and a key of its convention."""
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Width of an attention head; hidden_size / num_attention_heads for MLA, whose heads have several widths."""
    context_length: int
    """Longest sequence in tokens (`max_position_embeddings`)."""
    rms_norm_eps: float
    rope_theta: float
    tied_head: bool | None
    """`tie_word_embeddings`; None where the config leaves it to the model class."""
    declared_dtype: str | None


def read_config(folder: Path) -> TargetConfig:
    """Read `folder/config.json`. TargetError for a missing folder or file, broken JSON, a missing or wrong value."""
    if not folder.is_dir():
        raise TargetError(
            f"there is no folder {folder}: a target is a local Hugging Face folder with config.json and safetensors "
            "files. Download the model first and name its folder."
        )
    file = folder / CONFIG_NAME
    if not file.is_file():
        raise TargetError(
            f"{folder} has no {CONFIG_NAME}: a Hugging Face model folder was expected. "
            f"It holds: {', '.join(sorted(p.name for p in folder.iterdir())[:8]) or 'nothing'}"
        )
    config = read_json_object(file, MAX_CONFIG_BYTES)
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise TargetError(f"{file}: text_config must be an object; it is {text!r:.80}")
    read = _Reader(file, text)
    heads = read.count("num_attention_heads")
    hidden = read.count("hidden_size")
    return TargetConfig(
        path=folder,
        config=config,
        text_config=text,
        model_class=_model_class(file, config),
        model_type=_Reader(file, config).text("model_type"),
        num_layers=read.count("num_hidden_layers"),
        hidden_size=hidden,
        vocab_size=read.count("vocab_size"),
        intermediate_size=read.count("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=read.count("num_key_value_heads", default=heads),
        head_dim=_head_dim(read, hidden, heads),
        context_length=read.count("max_position_embeddings"),
        rms_norm_eps=read.positive("rms_norm_eps", text.get("rms_norm_eps")),
        rope_theta=read.positive("rope_theta", _rope_theta(text)),
        tied_head=_tied_head(file, config, text),
        declared_dtype=_declared_dtype(file, config, text),
    )


class _Reader:
    """Typed values of one object of config.json; every error names the file and the key."""

    def __init__(self, file: Path, values: dict[str, Any]) -> None:
        self.file, self.values = file, values

    def count(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _MAX_COUNT:
            raise self._wrong(key, "a positive whole number", value)
        return value

    def positive(self, key: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self._wrong(key, "a positive number", value)
        return float(value)

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str) or not value:
            raise self._wrong(key, "a name", value)
        return value

    def _wrong(self, key: str, expected: str, value: Any) -> TargetError:
        came = "it is missing" if value is None else f"it is {value!r:.80}"
        return TargetError(
            f"{self.file}: {key} must be {expected}; {came}. A decoder-only target in the style of Llama or DeepSeek "
            "was expected (flat, or nested in text_config)."
        )


def _model_class(file: Path, config: dict[str, Any]) -> str:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise TargetError(
            f'{file} names no model class: `architectures` must be a list such as ["LlamaForCausalLM"]; it is '
            f"{architectures!r:.80}. What layer ids mean depends on the class, so it is never guessed."
        )
    return architectures[0]


def _head_dim(read: _Reader, hidden: int, heads: int) -> int:
    # transformers writes DeepSeek's rotary width (qk_rope_head_dim) as head_dim: no attention head has that width.
    is_mla = read.values.get("kv_lora_rank") is not None
    return hidden // heads if is_mla else read.count("head_dim", default=hidden // heads)


def _rope_theta(text: dict[str, Any]) -> Any:
    """transformers 5 writes `rope_parameters`, per layer type where the types differ; older configs `rope_theta`."""
    if text.get("rope_theta") is not None:
        return text["rope_theta"]
    parameters = text.get("rope_parameters")
    if not isinstance(parameters, dict):
        return DEFAULT_ROPE_THETA
    if isinstance(parameters.get("full_attention"), dict):
        parameters = parameters["full_attention"]
    return parameters.get("rope_theta", DEFAULT_ROPE_THETA)


def _tied_head(file: Path, config: dict[str, Any], text: dict[str, Any]) -> bool | None:
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    if tied is not None and not isinstance(tied, bool):
        raise TargetError(f"{file}: tie_word_embeddings must be true or false; it is {tied!r:.80}")
    return tied


def _declared_dtype(file: Path, config: dict[str, Any], text: dict[str, Any]) -> str | None:
    for values in (text, config):
        for key in ("dtype", "torch_dtype"):
            value = values.get(key)
            if value is not None and not isinstance(value, str):
                raise TargetError(f"{file}: {key} must be a name such as bfloat16; it is {value!r:.80}")
            if value:
                return value.removeprefix("torch.")
    return None
