"""The four products of a decoder layer on one rank, and what of them is adapted (see tensor_parallel/lora.py)."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.planner.workload import Workload


@dataclass(frozen=True)
class Gemm:
    """`count` products of [m, k] and [k, n]."""

    m: int
    n: int
    k: int
    count: int = 1

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.count


@dataclass(frozen=True, kw_only=True)
class Product:
    """A fused column-parallel or a row-parallel product; sizes are those of this rank."""

    column: bool
    width: int
    """Of its input."""
    rows: int
    """Of its output, over all the projections in it."""
    adapted: dict[str, int]
    """Projections that have an adapter, and the rows of each."""
    rank: int
    """Of their adapters together: the width of what lies between A and B."""

    def gemm(self, w: Workload) -> Gemm:
        """The product itself."""
        return Gemm(w.tokens, self.rows, self.width)

    def input_elements(self, w: Workload) -> int:
        """Elements of its input that this rank holds."""
        return (w.held_tokens if self.column else w.tokens) * self.width

    def adapter_gemms(self, w: Workload) -> list[Gemm]:
        """The product with A, which is made of the tokens at hand, and those with B."""
        if not self.adapted:
            return []
        r = self.rank // len(self.adapted)
        before, after = (w.held_tokens, w.tokens) if self.column else (w.tokens, w.held_tokens)
        return [Gemm(before, self.rank, self.width), *(Gemm(after, rows, r) for rows in self.adapted.values())]


def products(w: Workload) -> tuple[Product, ...]:
    """q, k and v; o; gate and up; down."""

    def product(column: bool, width: int, **projections: int) -> Product:
        targets, r = (w.lora.targets, w.lora.r) if w.lora is not None else ([], 0)
        adapted: dict[str, int] = {name: rows for name, rows in projections.items() if name in targets}
        rows, rank = sum(projections.values()), r * len(adapted)
        return Product(column=column, width=width, rows=rows, adapted=adapted, rank=rank)

    h = w.model.hidden_size
    return (
        product(True, h, q_proj=w.local_q, k_proj=w.local_kv, v_proj=w.local_kv),
        product(False, w.local_q, o_proj=h),
        product(True, h, gate_proj=w.local_mlp, up_proj=w.local_mlp),
        product(False, w.local_mlp, down_proj=h),
    )


def inputs_wanted(w: Workload, leading: bool) -> tuple[bool, ...]:
    """Whether the gradient of each product's input is computed: in a `leading` layer, from its first adapter on."""
    adapted = [bool(product.adapted) for product in products(w)]
    return tuple(not leading or any(adapted[:index]) for index in range(len(adapted)))
