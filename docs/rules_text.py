"""What docs/rules.md says beside what is generated: `docs.make_rules` puts the two together."""

from __future__ import annotations

WORDS = {
    "view": "moves no data: layouts pass through it, partial sums too",
    "sums": "linear in all its inputs together: partial sums pass through it",
    "parts": "stays one op; replaced by simpler ops if an input is sharded along a blocked factor",
    "local": "has a local form: sizes, offsets or masks of this rank's part",
    "zeros": "zero where an input is zero: an `own` partial result (each row on one rank only) passes through it",
    "owner": "reads only the rows of an `own` partial result that this rank owns",
    "draws": "random (see below)",
    "pair": "with dropout, sharded like the forward op whose random numbers it draws again",
}
EXAMPLES: tuple[tuple[str, dict[str, tuple[int, ...]]], ...] = (
    ("x + y", {"x": (8, 4, 6), "y": (4, 1)}),
    ("x.view(8, 3, 2, 4)", {"x": (8, 24)}),
    ("x.view(6, 4)", {"x": (3, 8)}),
    ("x.sum(1)", {"x": (8, 4)}),
    ("torch.softmax(x, 1)", {"x": (8, 4)}),
    ("torch.cat([x, y], 1)", {"x": (8, 4), "y": (8, 6)}),
    ("x.split([8, 4, 4], 1)", {"x": (6, 16)}),
    ("x.topk(2, 1)", {"x": (8, 4)}),
    ("table[:, numbers]", {"table": (8, 16), "numbers": (4,)}),
    ("torch.nn.functional.layer_norm(x, [4])", {"x": (8, 6, 4)}),
    ("torch.conv2d(x, weight, groups=2)", {"x": (8, 6, 5, 5), "weight": (4, 3, 3, 3)}),
    (
        "torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)",
        {"q": (8, 4, 6, 16), "k": (8, 2, 6, 16), "v": (8, 2, 6, 16)},
    ),
)
"""Calls and the shapes of their inputs; ``numbers`` are integers."""

INTRODUCTION = """# Rules

Look up how an op may be sharded, and add a rule for an op that has none. `make rules` (`docs/make_rules.py`) makes this
page from the code, and a test compares the two. A rule lists the loops (*factors*) of an op,
and the factors of each of its values. An axis of the machine may be assigned to any factor that is not *blocked*. The
op cannot be computed in parts along a blocked factor. The layouts follow: a factor in an output makes the output
sharded, a factor of inputs alone makes it a partial result. If an input is sharded along a blocked factor, it is
gathered first.

## How to read a pattern

{grammar}

In families that are generated from shapes, the rule of a call is written by its shapes (`i0`, `i1`, ... are its loops):

{examples}

In the tables, *more* says:

{words}

## An op without a rule

An op that torch tags as pointwise has the rule of pointwise ops. Any other op without a rule is replaced by torch's own
decomposition, if there is one, and the ops in it need rules.

An op without either is computed whole on every device, on gathered inputs, and so are all ops that its blocked factors
reach. A warning lists each such op with its module and source line, and so does `plan.explain()`. With
`Options(replicate_unknown_ops=False)` the model is refused instead. To share the work:

- write the line with other ops;
- give the op a rule, in one line, before the model is compiled:

  ```python
  import torch
  import shardweave as sw

  sw.rule(torch.ops.mylib.scale_rows.default, "m n, m -> m n")
  ```

  A rule may also say how the parts of a contracted factor combine (`reduce={{"m": "max"}}`), how the op is called on
  local tensors if this is not the same call (`lower=`), and which simpler ops replace it if an input is sharded along a
  blocked factor (`decompose=`): see `shardweave/sharding/rules/registry.py`. `tests/sharding/test_rules.py` shows how a
  rule is tested.

### Ops of torch that have none

Of torch's core ops: {core}.
(`var.dim` and `adaptive_avg_pool1d` do not reach the rules: capture decomposes them.)

Ops that models use, with what to write instead:

{refused}

Complex numbers are sharded as real ones are, parameters included, and sent as pairs of real numbers. A conjugate is
computed where it is made. A Fourier transform (`torch.fft`, `stft`, `istft`) blocks the dimensions that it transforms.

Ops between which a size or a number depends on the values of tensors (`x[mask]`, `nonzero`, `torch.where(mask)`,
`unique`, `repeat_interleave` by a tensor, `.item()`) become one op `shardweave.region`, for each selection one in the
forward and one in the backward. Every rank computes it whole, so its inputs are gathered, and the batch is not cut into
micro-batches or sub-batches. What the backward needs of a selection it selects again. In plans, a selection counts as
large as what it selects from, a number that is a size as the largest dimension of the inputs: only the former bounds
memory. Random numbers for selected elements (dropout), and results of the model of such a size, are refused in capture.
Branches on values select what both sides assign, where that is possible ([inputs.md](inputs.md)).
"""
REFUSED: tuple[tuple[str, str, str], ...] = (
    ("masked_scatter", "the n-th element that is masked takes the n-th value: a count over all", "`torch.where`"),
    ("_pdist_forward", "distances of all pairs of one list", "`torch.cdist` and `torch.triu`"),
    ("_ctc_loss", "a recursion over time", "the loss outside of the model"),
    ("_embedding_bag", "bags of any length", "`embedding`, then a sum over the bag's dimension"),
    ("linalg_matrix_exp", "every output needs every input", "the computation outside of the model"),
    ("put", "places in the whole value", "`index_put` or `scatter`"),
    ("index_reduce", "places in an order", "`scatter_reduce`"),
    ("fractional_max_pool2d", "random windows", "`max_pool2d`"),
    ("_grouped_mm", "row groups that come from no sort of experts", "the dispatch below, or `bmm`"),
)
"""Ops without a rule: why, and what to write instead."""

FORMS = "`annotate` replaces these by ops that have rules, before rules are bound. Those rules say what is blocked."

EXPERTS = """The region begins at a `sort` or `argsort` of one list of integers that grouped products follow
(`aten._grouped_mm`, `transformers::grouped_mm_fallback`), as `transformers` writes it. Row-wise ops, `index`,
`index_put`, `scatter_add` and counts may be part of it. The counts must reach the products through a running sum. A
region with any other use of the sorted rows is refused with its module and line. Experts that are multiplied all at
once (`bmm`) need no region: the expert is the factor `b`."""

RANDOM = """`randperm` is blocked, and so are the rows that `multinomial` draws from: each number depends on the others.
Shards draw independently, so the numbers on many devices differ from those on one device. Switch dropout off to compare
results."""
