"""The target: a local Hugging Face folder, of which only what is needed is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from eagle3.capture import CapturePoint
from eagle3.dump.manifest import TargetIdentity, TokenizerIdentity
from eagle3.target import identity, loading
from eagle3.target.config import TargetConfig, read_config
from eagle3.target.files import TargetError
from eagle3.target.weights import HEAD_NAMES, PREFIXES, Weights

if TYPE_CHECKING:
    import torch

# Norms multiply by 1 + weight, and what enters the first layer is sqrt(hidden_size) times the embedding table
# (transformers 5: modeling_gemma.py, modeling_gemma2.py, modeling_gemma3.py; SGLang 0.5.23: gemma3_causal.py).
_GEMMA = ("gemma", "gemma2", "gemma3", "gemma3_text")
# The decoder layer that a drafter's own layer can start from: Llama's, without biases.
LLAMA_LAYER = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
)
# The same of a layer with DeepSeek's latent attention. Its MLP is dense in a few layers only: experts have other names.
_LATENT = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
LATENT_LAYER = (*LLAMA_LAYER[:2], *(f"self_attn.{name}.weight" for name in _LATENT))


@dataclass(frozen=True, kw_only=True, eq=False)
class Target(TargetConfig):
    """A target's numbers (fields of TargetConfig), tensors, tokenizer and identity. Open it with `Target.open`."""

    trust_remote_code: bool = False
    cache_dir: Path | None = None

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        trust_remote_code: bool = False,
        cache_dir: Path | None = None,
        config_only: bool = False,
    ) -> Self:
        """Open a target's folder: config.json and where its tensors lie, no tensor yet.

        `trust_remote_code` lets the tokenizer's (and a model's) own Python files run. `cache_dir` keeps digests of
        weight files. `config_only` is for a dry run: the folder may lack weights. Raises TargetError.
        """
        folder = Path(path).expanduser().absolute()
        target = cls(**vars(read_config(folder)), trust_remote_code=trust_remote_code, cache_dir=cache_dir)
        if not config_only:
            target.check_weights()
        return target

    @cached_property
    def weights(self) -> Weights:
        """Which file holds which tensor; TargetError where the folder has no safetensors weights."""
        return Weights.locate(self.path)

    def check_weights(self) -> None:
        """Raise TargetError where the folder has no safetensors weights. The files of an index are not opened."""
        _ = self.weights

    @property
    def dtype(self) -> str:
        """Name of the weights' dtype, e.g. `bfloat16`: what config.json declares, else what the embedding has."""
        return self.declared_dtype or str(self.embedding_table().dtype).removeprefix("torch.")

    def embedding_table(self) -> "torch.Tensor":
        """The token embedding [V, H] as it is stored: what an engine shares with a drafter."""
        return self._read("token embedding", _in_decoder("embed_tokens.weight"), (self.vocab_size, self.hidden_size))

    def embedding(self) -> "torch.Tensor":
        """What enters the first layer for each token [V, H], in the stored dtype: the table, in Gemma a multiple."""
        table = self.embedding_table()
        return table * table.new_tensor(self.hidden_size**0.5) if self._is_gemma() else table

    def final_norm(self) -> "torch.Tensor":
        """The factor [H] of the norm between the last layer and the head: its weight, in Gemma 1 + weight (float32)."""
        weight = self._read("final norm", _in_decoder("norm.weight"), (self.hidden_size,))
        return 1 + weight.float() if self._is_gemma() else weight

    def head(self) -> "torch.Tensor":
        """The output head [V, H]; a tied one is the embedding.

        A config that ties it and a checkpoint that stores another one are refused: SGLang uses the embedding then,
        transformers 5 the stored head. A config that says nothing ties it where none is stored.
        """
        stored = self.weights.first(HEAD_NAMES)
        if self.tied_head is False or (self.tied_head is None and stored):
            return self._read("output head", HEAD_NAMES, (self.vocab_size, self.hidden_size))
        embedding = self.embedding_table()
        if stored and not self.weights.read(stored).equal(embedding):
            raise TargetError(
                f"{self.path}: config.json says tie_word_embeddings: true, but the stored {stored} differs from the "
                "embedding. SGLang would use the embedding, transformers the stored head: set the flag to what the "
                "model was trained with, or remove the tensor."
            )
        return embedding

    def layer_tensor(self, layer: int, suffix: str) -> "torch.Tensor | None":
        """One tensor of decoder layer `layer`, e.g. suffix `mlp.up_proj.weight`; None where the layer has none."""
        if not 0 <= layer < self.num_layers:
            raise TargetError(f"the target has no layer {layer}: it has layers 0 ... {self.num_layers - 1}")
        name = self.weights.first(_in_decoder(f"layers.{layer}.{suffix}"))
        return self.weights.read(name) if name else None

    def last_layer(self, *, latent: bool = False) -> "dict[str, torch.Tensor]":
        """The last layer's tensors by suffix, for the warm start of a drafter: LLAMA_LAYER, or where the drafter has
        latent attention LATENT_LAYER and the dense MLP, if there is one.

        Empty where the layer is built otherwise (the other attention, Gemma's norms, for a Llama drafter also experts)
        or quantised: then a drafter starts cold.
        """
        if self._is_gemma():
            return {}
        wanted = LATENT_LAYER if latent else LLAMA_LAYER
        names = (*wanted, *LLAMA_LAYER[-3:]) if latent else wanted
        found = {suffix: self.layer_tensor(self.num_layers - 1, suffix) for suffix in names}
        tensors = {suffix: tensor for suffix, tensor in found.items() if tensor is not None}
        plain = all(t.is_floating_point() and t.element_size() >= 2 for t in tensors.values())
        return tensors if plain and all(suffix in tensors for suffix in wanted) else {}

    def identity(self) -> TargetIdentity:
        """Name, shape and digests. Hashes every weight file once; `cache_dir` remembers."""
        return identity.target_identity(self, self.weights, self.cache_dir)

    def tokenizer_identity(self) -> TokenizerIdentity:
        """Digests of the tokenizer's files and chat template, and whether it brings code of its own."""
        return identity.tokenizer_identity(self.path)

    def tokenizer(self) -> Any:
        """The transformers tokenizer, from the folder alone."""
        return loading.open_tokenizer(self.path, trust_remote_code=self.trust_remote_code)

    def load_model(self, dtype: "torch.dtype | str | None" = None) -> Any:
        """The whole language model in transformers, in `dtype` or its own. Only for targets that fit this machine."""
        list(self.weights.paths())  # says which files are missing before transformers does
        return loading.load_model(self, dtype or self.dtype, trust_remote_code=self.trust_remote_code)

    def hidden_states(self, model: Any, ids: "Sequence[int] | torch.Tensor") -> "dict[CapturePoint, torch.Tensor]":
        """Every boundary of `model` (from `load_model`) for one sequence of ids [T]; each state is [T, H]."""
        from eagle3.target.states import hidden_states

        return hidden_states(model, ids, self.num_layers)

    def _is_gemma(self) -> bool:
        """Whether it is a Gemma of a kind that was looked at; TargetError for another one."""
        kind = str(self.text_config.get("model_type"))
        if kind.startswith("gemma") and kind not in _GEMMA:
            raise TargetError(
                f"{self.path}: how a {kind} scales its embedding and its norms was not checked; known: "
                f"{', '.join(_GEMMA)}. Its tensors would be read as another model's."
            )
        return kind in _GEMMA

    def _read(self, what: str, names: Sequence[str], shape: tuple[int, ...]) -> "torch.Tensor":
        name = self.weights.require(what, names)
        tensor = self.weights.read(name)
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise TargetError(
                f"{self.path}: the {what} ({name}) must be a floating-point tensor of shape {list(shape)} according to "
                f"config.json; it is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            )
        return tensor


def _in_decoder(name: str) -> tuple[str, ...]:
    return tuple(prefix + name for prefix in PREFIXES)
