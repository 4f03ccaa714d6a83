"""The tree of draft tokens: how it is built from the drafter's scores, and how the target's tokens walk it.

A tree has D nodes for each request, node 0 is the last committed token. `retrive_*` (SGLang's spelling) link the nodes:
`next_token` is a node's first child, `next_sibling` the next child of the same parent, -1 ends a list.
"""

# ruff: noqa: ARG001 (SGLang passes every argument of the compiled op)

import torch

ROOT = 0
NONE = -1
FULL_MASK, QLEN_ONLY = 0, 1  # sglang.kernels.ops.speculative.spec_tree.TreeMaskMode


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Follow the target's greedy token from node to node as long as a drafted child holds it.

    Fills `predicts` [B * D] (the target's token at each accepted node), `accept_index` [B, steps] (flat node indices)
    and `accept_token_num` [B] (accepted drafts, the bonus token not counted).
    """
    drafted, flat = candidates.tolist(), retrive_index.tolist()
    first_child, next_sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    greedy = target_predict.reshape(-1).tolist()
    max_accepted = accept_index.shape[1]
    for b in range(len(drafted)):
        node, accepted = ROOT, [flat[b][ROOT]]
        while len(accepted) < max_accepted:
            node = first_child[b][node]
            while node != NONE and drafted[b][node] != greedy[accepted[-1]]:
                node = next_sibling[b][node]
            if node == NONE:
                break
            accepted.append(flat[b][node])
        accept_index[b, : len(accepted)] = torch.tensor(accepted, dtype=accept_index.dtype)
        accept_token_num[b] = len(accepted) - 1
        for index in accepted:
            predicts[index] = greedy[index]


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Fill the links, the positions and the mask (a node sees itself and its ancestors) of every request's tree.

    `tree_mask` is flat: per request D rows of D columns (QLEN_ONLY), or of prefix + D columns whose prefix the caller
    has set already (FULL_MASK).
    """
    if tree_mask_mode not in (FULL_MASK, QLEN_ONLY):
        raise ValueError(f"tree mask mode {tree_mask_mode}: this stand-in knows 0 (full) and 1 (query length only)")
    D = draft_token_num
    mask_start = 0
    for b, prefix in enumerate(verified_seq_len.tolist()):
        parents = _parents(parent_list[b].tolist(), selected_index[b].tolist(), topk, D)
        retrive_index[b] = torch.arange(b * D, (b + 1) * D)
        for node in range(D - 1, ROOT, -1):  # backwards, so that the best child becomes the first one
            if parents[node] != NONE:
                retrive_next_sibling[b, node] = retrive_next_token[b, parents[node]]
                retrive_next_token[b, parents[node]] = node
        columns = D if tree_mask_mode == QLEN_ONLY else prefix + D
        mask = tree_mask[mask_start : mask_start + D * columns].view(D, columns)[:, columns - D :]
        mask_start += D * columns
        mask.zero_()
        for node in range(D):
            path = _ancestry(node, parents)
            mask[node, [ROOT, *path]] = True
            positions[b * D + node] = prefix + len(path)


def _parents(parent_tokens: list[int], selected: list[int], topk: int, num_nodes: int) -> list[int]:
    """The parent of each node. Node i > 0 is the drafter's candidate number `selected[i - 1]`; candidates come in rows
    of `topk`, row 0 hangs on the root and row r on the candidate `parent_tokens[r]`.

    A candidate whose parent was not selected gets none (equal scores: the drafter was entirely sure of a token, and
    the selection took the child before its parent). As in the compiled op it is left out of the tree.
    """
    node_of = {candidate: node for node, candidate in enumerate(selected[: num_nodes - 1], start=1)}
    rows = [candidate // topk for candidate in selected[: num_nodes - 1]]
    return [NONE, *(ROOT if row == 0 else node_of.get(parent_tokens[row], NONE) for row in rows)]


def _ancestry(node: int, parents: list[int]) -> list[int]:
    """The node and its ancestors, without the root."""
    path = []
    while node not in (ROOT, NONE):
        path.append(node)
        node = parents[node]
    return path
