"""The formulas of one decoder layer, the embedding and the head: activations and arithmetic of one rank.

Symbols: s sequence length, b samples of a microbatch, T = s b; h hidden size, q and k the widths of all query and of
all key (or value) heads, a query heads, f MLP width, V padded vocabulary; t tensor-parallel size; T' = T / t with
sequence parallelism, else T; e bytes of an activation (2 in bf16).

Activations kept for backward (the accounting of Korthikanti et al. 2022, arXiv:2205.05198, section 4, for this
package's layer: RMSNorm instead of LayerNorm, no dropout, blockwise attention (Dao et al. 2022, arXiv:2205.14135)
instead of the s x s scores, SwiGLU, grouped key/value heads):

    two norms   input and output, T' h each, and one fp32 scale per token        4 T' h e + 8 T'
    attention   rotated q and k, v, the output, one fp32 logsumexp per head      (2 q + 2 k) T e / t + 4 a T / t
    MLP         gate and up, and their product                                   3 f T e / t

`selective` drops the outputs of the norms (2 T' h e) and the product (f T e / t), and keeps

    2 T' h e + 8 T' + (2 q + 2 k + 2 f) T e / t + 4 a T / t.

`full` keeps the layer's input, T' h e (Chen et al. 2016, arXiv:1604.06174). Per token, in units of h and in bf16 with
q = h and t = 1, that is 12 + 4 k/h + 6 f/h, 8 + 4 k/h + 4 f/h and 2 bytes; Korthikanti et al. have 34 for GPT.

Arithmetic: a GEMM of [m, k] and [k, n] is 2 m n k operations. A layer multiplies T rows with h (q + 2 k) + q h + 3 h f
weights, of which a rank has 1/t. Causal attention multiplies T s / 2 pairs of positions, twice per head and dim:
2 T s q forward, of which a rank has 1/t. Backward repeats every GEMM twice (gradients of input and weight), and
blockwise attention 2.5 times (the scores once more, and four products; Dao et al. 2022, algorithm 4).

Adapters of rank r (Hu et al. 2021, arXiv:2106.09685) on n of a product's projections multiply T' or T rows with its
input's width n r, and as many with r for each row of them. Frozen weights have no gradient, so that it is an adapter
that keeps a product's input, and n r T e of its own (n r T' e behind attention and MLP); with dropout it keeps what is
left of the input, even under `selective`, and the mask, a byte an element. The first layer's gradients end at its
first adapter, and so does what is kept for them.

Rows of packed documents multiply fewer pairs, and keep the same where one kernel takes them all, else q T e / t more.
"""

from __future__ import annotations

from hybrid.planner.layer import Gemm, Product, inputs_wanted, products
from hybrid.planner.workload import Recompute, Workload
from hybrid.tensor_parallel.chunks import default_chunk_tokens, keeps_logits

ATTENTION_BACKWARD = 2.5
"""Operations of blockwise attention's backward over its forward's."""
_O = 1
"""The product behind attention."""
_MASK_BYTES = 1
"""Per element that an adapter's dropout may drop, on GPUs."""


def layer_activations(w: Workload, recompute: Recompute, leading: bool = False) -> int:
    """Bytes a decoder layer keeps of one microbatch."""
    tokens, held, e = w.tokens, w.held_tokens, w.width
    stream = held * w.model.hidden_size * e
    if recompute == "full":
        return stream
    heads = w.model.num_attention_heads // w.t
    attention = (2 * w.local_q + 2 * w.local_kv) * tokens * e + 4 * heads * tokens
    made_from = (stream, attention, stream, 2 * w.local_mlp * tokens * e)
    scale = 4 * held
    kept = 0
    for index, (product, wanted) in enumerate(zip(products(w), inputs_wanted(w, leading), strict=True)):
        again = recompute == "selective" and index != _O
        if wanted:
            kept += made_from[index] + scale * product.column
        elif again and product.adapted:
            kept += made_from[index]  # to make the product's input from
        kept += _input_kept(w, product, wanted=wanted, again=again, attention=index == _O)
    return kept


def _input_kept(w: Workload, product: Product, *, wanted: bool, again: bool, attention: bool) -> int:
    """Bytes kept of a product's input, for the gradient of the weight or of A, and of its adapter's own for that of B.

    Attention keeps its output in any case, if its gradient is wanted; `again`: the input is computed again.
    """
    size = product.input_elements(w)
    if w.lora is None:
        return 0 if again or attention else size * w.width
    if not product.adapted:
        return 0
    inner = (w.tokens if product.column else w.held_tokens) * product.rank * w.width
    if w.lora.dropout:
        return inner + size * (w.width + _MASK_BYTES * wanted)
    return inner + (0 if again or (attention and wanted) else size * w.width)


def embedding_activations(w: Workload) -> int:
    """Bytes a trained embedding keeps: each token's row (int64), and whether another rank holds it."""
    return 9 * w.tokens if w.lora is None else 0


def final_norm_activations(w: Workload) -> int:
    """Bytes the last norm keeps: its input and one scale per token."""
    return w.held_tokens * (w.model.hidden_size * w.width + 4)


def rope_tables(w: Workload) -> int:
    """Bytes of cos and sin, fp32, once per stage."""
    return 2 * 4 * w.seq_length * w.model.head_dim


def logits_kept(w: Workload) -> bool:
    """Whether the fused loss holds the logits until its backward, which is never of a head that is frozen."""
    return w.lora is None and keeps_logits(w.tokens, w.model.hidden_size)


def head_kept(w: Workload) -> int:
    """Bytes the fused loss holds from its forward to its backward: all logits, or the gradients.

    The logits are fp32, with the hidden states they come from and, for each token, two sums of the softmax, its label's
    column (int64) and two masks. The gradients are that of the hidden states, and a trained weight's in fp32.
    """
    if logits_kept(w):
        return w.tokens * (w.model.hidden_size * w.width + 4 * w.local_vocab + 18)
    weight = 4 * w.local_vocab * w.model.hidden_size if w.lora is None else 0
    return w.held_tokens * w.model.hidden_size * w.width + weight


def head_transient(w: Workload) -> int:
    """Bytes the fused loss needs beside, at most.

    Where it keeps the logits: in forward those of the model's dtype beside them; in backward their gradient, which in
    half precision takes their place, that of the hidden states, whole and of this rank, those states scaled, and the
    weight's. Else: in forward the gathered hidden states, their gradient before it is reduced, and a chunk's logits in
    fp32 and once more in the model's dtype; in backward a trained weight's gradient in the model's dtype.
    """
    full = w.tokens * w.model.hidden_size * w.width
    half = w.width < 4
    weight = w.width * w.local_vocab * w.model.hidden_size if w.lora is None else 0
    if logits_kept(w):
        logits = w.width * w.tokens * w.local_vocab
        scattered = full // w.t if w.sequence_sharded else 0
        return max(half * logits, 2 * full + scattered + weight - half * (4 - w.width) * w.tokens * w.local_vocab)
    chunk = default_chunk_tokens(w.tokens, w.local_vocab) * w.local_vocab
    gathered = 2 * full if w.sequence_sharded else 0
    return max(gathered + (4 + half * w.width) * chunk + half * weight, half * weight)


def loss_chunks(w: Workload) -> list[int]:
    """Tokens of each chunk of the fused loss, which is one where it keeps the logits."""
    if logits_kept(w):
        return [w.tokens]
    size = default_chunk_tokens(w.tokens, w.local_vocab)
    full, rest = divmod(w.tokens, size)
    return [size] * full + [rest] * (rest > 0)


def layer_transient(w: Workload) -> int:
    """Bytes a layer's backward needs at most beside what is kept: that of the MLP.

    The gradients of the output (gathered under sequence parallelism) and of the product, the gradient of gate and up
    with one intermediate, or then the gathered input beside it, and a trained weight's gradient.
    """
    tokens, e, h, f = w.tokens, w.width, w.model.hidden_size, w.local_mlp
    stream = tokens * h * e
    activation = stream * (2 if w.sequence_sharded else 1) + 5 * f * tokens * e
    if w.lora is not None:
        return activation
    product = stream * (3 if w.sequence_sharded else 2) + 2 * f * tokens * e + 2 * f * h * e
    return max(activation, product)


def backward_gemms(gemm: Gemm) -> list[Gemm]:
    """The gradients of the input and of the weight."""
    return [Gemm(gemm.m, gemm.k, gemm.n, gemm.count), Gemm(gemm.n, gemm.k, gemm.m, gemm.count)]


def layer_gemms(w: Workload) -> list[Gemm]:
    """The products of a layer's forward on one rank: its four, and those of adapters."""
    return [gemm for product in products(w) for gemm in (product.gemm(w), *product.adapter_gemms(w))]


def layer_backward_gemms(w: Workload, leading: bool = False) -> list[Gemm]:
    """The products of a layer's backward: the gradients of inputs that are wanted, and of weights that are trained."""
    gemms = []
    for product, wanted in zip(products(w), inputs_wanted(w, leading), strict=True):
        by_input, by_weight = backward_gemms(product.gemm(w))
        gemms += [by_input] * wanted + [by_weight] * (w.lora is None)
        for index, gemm in enumerate(product.adapter_gemms(w)):
            by_input, by_weight = backward_gemms(gemm)
            gemms += [by_input] * (wanted or index > 0) + [by_weight]
    return gemms


def attention_flops(w: Workload) -> int:
    """Operations of one layer's attention in forward, half of the square counted."""
    return 2 * w.tokens * w.seq_length * w.local_q


def head_gemms(w: Workload) -> list[Gemm]:
    """The head's products, forward and backward together, chunk by chunk: three, or two if its weight is frozen."""
    h, v = w.model.hidden_size, w.local_vocab
    gemms = []
    for size in sorted(set(loss_chunks(w))):
        forward = Gemm(size, v, h, loss_chunks(w).count(size))
        by_input, by_weight = backward_gemms(forward)
        gemms += [forward, by_input] + [by_weight] * (w.lora is None)
    return gemms


def layer_flops(w: Workload, recompute: Recompute = "none", leading: bool = False) -> float:
    """Operations of one layer on one rank, forward and backward, what `full` repeats included."""
    forward = sum(gemm.flops for gemm in layer_gemms(w)) + attention_flops(w)
    backward = sum(gemm.flops for gemm in layer_backward_gemms(w, leading))
    attention = ATTENTION_BACKWARD * inputs_wanted(w, leading)[_O] * attention_flops(w)
    return (2 if recompute == "full" else 1) * forward + backward + attention


def stage_flops(w: Workload, stage: int) -> float:
    """Operations of one microbatch on one rank of a stage, as the device does them."""
    flops = sum(count * layer_flops(w, *kind) for kind, count in w.layer_kinds(stage).items())
    if stage == w.p - 1:
        flops += sum(gemm.flops for gemm in head_gemms(w))
    return flops
