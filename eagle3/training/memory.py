"""How much memory a training step takes at its peak, by formula.

Counted are the tensors that live when the backward pass begins: weights with gradients and AdamW's moments (16 bytes a
parameter), what each unroll step keeps for its backward pass, the frozen tables, the batch. A test holds it against
what torch allocates, within a fifth. The CPU's allocator takes up to 1.6 times that (fragments of freed tensors).
"""

from eagle3.drafter.config import DrafterConfig


def step_bytes(config: DrafterConfig, *, rows: int, num_steps: int, bf16: bool, table_bytes: int = 2) -> dict[str, int]:
    """Bytes by what they are for, for a Llama drafter and `rows` computed rows. `table_bytes`: of a value of the
    target's embedding and head, which stay in memory whole."""
    hidden, width = config.hidden_size, 2 if bf16 else 4
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner, draft = config.intermediate_size, config.draft_vocab_size
    joined = config.num_slots * config.target_hidden_size * hidden
    layer = 2 * hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * inner
    parameters = joined + layer + draft * hidden
    # Of each step: what it starts from, with attention, as the head reads it, that one's gradient.
    residual = 4 * hidden
    # Both normed inputs, q, attended, k, v; gate, up, both.
    products = 2 * hidden + 2 * queries + 2 * keys + 3 * inner
    # Of each step: cos and sin, log-sum-exp, weights.
    small = 8 * config.head_dim + 2 * config.num_heads * (1 + num_steps)
    once = config.num_slots * config.target_hidden_size + hidden  # joined states, embeddings
    return {
        "weights, gradients, moments": 16 * parameters,
        "weights in bfloat16": 2 * parameters if bf16 else 0,
        "kept by the unroll": rows * (num_steps * (4 * residual + small + width * products) + width * once),
        "gradients on their way": rows * width * (3 * inner + 2 * (queries + 2 * keys)),
        "batch": rows * (4 * hidden + table_bytes * config.num_slots * config.target_hidden_size),
        "tables of the target": table_bytes * 2 * config.target_vocab_size * hidden + 4 * draft * hidden,
    }
