"""Model-Optimizer's conversations: `<conversation_id>.pt`, one dict of `torch.save` for each.

`input_ids` [T], `hidden_states` [T, H] (the output state), `aux_hidden_states` [T, k * H] (empty where none were
asked for), `conversation_id`, in newer versions `loss_mask` [T]
(examples/speculative_decoding/collect_hidden_states/compute_hidden_states_{hf,trtllm,vllm}.py of
NVIDIA/Model-Optimizer). The HF script takes `outputs.hidden_states[-1]`, which is after the final norm, the vLLM script
vLLM's boundary N, before it; the aux layers are a default or `--aux-layers`. None of it stands in the file.
"""

from pathlib import Path

from eagle3.dump.foreign.layout import Layout, name_of
from eagle3.dump.foreign.loading import load_dict, load_saved
from eagle3.dump.foreign.sample import ForeignSample, make_sample, split_width, state_rows
from eagle3.dump.foreign.state_list import saved_files

_AUX, _FINAL = "aux_hidden_states", "hidden_states"
_EXPECTED = f"a conversation of Model-Optimizer: expected a dict with input_ids, {_FINAL} and {_AUX}"


def find(path: Path) -> list[Path]:
    files = saved_files(path)
    if not files:
        return []
    first = load_saved(files[0])
    return files if isinstance(first, dict) and _AUX in first else []


def read(file: Path, root: Path) -> ForeignSample:
    row = load_dict(file, _FINAL, _EXPECTED)
    final = state_rows(row[_FINAL], f"{file}, {_FINAL}")
    aux = row.get(_AUX)
    empty = aux is None or (hasattr(aux, "numel") and not aux.numel())
    slots = [] if empty else split_width(aux, final.shape[1], f"{file}, {_AUX}")
    return make_sample(name_of(file, root), str(file), row.get("input_ids"), slots, final)


LAYOUT = Layout(
    name="model-optimizer",
    made_by="NVIDIA Model-Optimizer (collect_hidden_states)",
    looks_for="a .pt file, or a folder of them, each a dict with input_ids, hidden_states and aux_hidden_states",
    find=find,
    read=read,
    claimed_by="its files name no layers; the final state is normed from transformers and TensorRT-LLM, not from vLLM",
)
