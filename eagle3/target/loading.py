"""Opening a target's tokenizer and model with transformers: from the folder alone, and no code without consent."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3.target.config import CONFIG_NAME, TargetConfig
from eagle3.target.files import TargetError
from eagle3.target.identity import tokenizer_code, tokenizer_files

# Kimi-K2's decoder is DeepSeek-V3's under another name (transformers 5.19, Kimi_K25Config.__post_init__).
_SAME_DECODER = {"kimi_k2": "deepseek_v3"}
# How a decoder inside a wrapper is named once it stands alone.
_UNWRAP = {r"^model\.language_model\.": "model.", r"^language_model\.": ""}


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no warnings of transformers inside; its settings are restored afterwards."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def open_tokenizer(folder: Path, *, trust_remote_code: bool) -> Any:
    """The target's tokenizer. Its own code (Kimi's `tokenization_kimi.py`) runs only with `trust_remote_code`."""
    from transformers import AutoTokenizer

    code = tokenizer_code(folder)
    tokenizer_files(folder, with_code=code is not None)
    if code is not None:
        _check_code(folder, code, trust_remote_code)
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code and code is not None
            )
    except Exception as error:  # a tokenizer's own code may raise anything
        raise TargetError(
            f"the tokenizer of {folder} cannot be opened: {type(error).__name__}: {error}. "
            "If a package is missing, install it; otherwise fetch the tokenizer's files again."
        ) from error


def _check_code(folder: Path, code: str, trusted: bool) -> None:
    if "--" in code:
        raise TargetError(
            f"the tokenizer of {folder} wants to run code of another repository ({code}); nothing is downloaded here. "
            "Put that file into the folder and name it without `--` in auto_map of tokenizer_config.json."
        )
    file = folder / f"{code.partition('.')[0]}.py"
    if not trusted:
        raise TargetError(
            f"the tokenizer of {folder} wants to run its own code: {file.name} (class {code.rpartition('.')[2]}). "
            "Read that file; if you trust it, allow it with trust_remote_code: true (it is recorded in the manifest)."
        )
    if "/" in code or "\\" in code or not file.is_file():
        raise TargetError(f"the tokenizer of {folder} names the code {code}, but there is no {file.name}")


def load_model(target: TargetConfig, dtype: Any, *, trust_remote_code: bool) -> Any:
    """The target's decoder with its head as a transformers model, in evaluation mode and without gradients.

    Of a vision-language target only the language model is built. TargetError where transformers has no class for it,
    or where a weight is missing: transformers would go on with random numbers in its place.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    arguments: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    model_type = str(target.text_config.get("model_type"))
    if target.text_config is not target.config or model_type in _SAME_DECODER:
        fields = {k: v for k, v in target.text_config.items() if k not in ("model_type", "auto_map", "architectures")}
        try:
            arguments["config"] = AutoConfig.for_model(_SAME_DECODER.get(model_type, model_type), **fields)
        except (ValueError, TypeError) as error:
            raise _no_model(target, error) from error
        arguments["key_mapping"] = _UNWRAP
    try:
        with quiet_transformers():
            model, info = AutoModelForCausalLM.from_pretrained(
                target.path,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                **arguments,
            )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise _no_model(target, error) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise TargetError(
            f"{target.path} lacks {len(missing)} weights of {type(model).__name__}: {', '.join(missing[:5])}"
            f"{' ...' if len(missing) > 5 else ''}. They would be random numbers. Complete the download."
        )
    return model.eval().requires_grad_(False)


def _no_model(target: TargetConfig, error: Exception) -> TargetError:
    code = target.config.get("auto_map")
    hint = (
        f" ({CONFIG_NAME} names code of its own: {', '.join(map(str, code.values()))}. Read it; "
        "trust_remote_code: true allows it.)"
        if isinstance(code, dict)
        else ""
    )
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return TargetError(
        f"transformers cannot load {target.model_class} (model_type {target.model_type}) from {target.path}: "
        f"{reason:.400}{hint}"
    )
