"""What compilers hold in memory: a small model for each backend, and how every rule was found.

A backend is where a program will run: what XLA makes for a GPU is not what it makes for a CPU.
Every rule for GPUs was read from compiled programs: XLA:GPU of jax 0.10.2 for an H100
(`benchmarks/compilers.py`), its buffer assignment (`xla_dump_to`) at the worst moment beside the
values that were planned to be there. None is a fitted factor. It is long because each rule has how
it was found.

**For GPUs**

- Fusion (`priority_fusion.cc`): an elementwise value is computed again by all who read it, however
  far away they are, if that is quicker than to write it and to read it. So the backward pass reads
  the products of the forward pass, not what was made of them: of a softmax in float32 there are
  the scores and the weights in bfloat16, of a GELU its argument, its tanh and its result. A value
  is written for all readers or for none (`CanFuseWithAllNonBitcastUsers`).
- Time (`gpu_performance_model.cc`): bytes over the bandwidth and cycles over the speed of vector
  units, nearly the greater of both. XLA's own table has the cycles of each operation (`CYCLES`). A
  tanh takes longer than the write and the read of a bfloat16, an exp does not; an erfc (BERT's
  GELU) is some 150 operations, dropout's random bits some 130: both are kept, and so is what an
  erfc is of. What one instruction alone reads is computed in that one's kernel, so readers are
  kernels: counted one by one, a logistic after a group norm would be written for several that are
  one (a U-Net was planned a quarter too large).
- A softmax over few rows of scores in 16 bits is two kernels on an H200, and its exponentials are
  written in float32 (`split_softmaxes.py`). Found on a GPT, planned 16% too small.
- Products, convolutions, sorts and loops read buffers. A gather, a scatter and a slice's update
  take in what makes their indices and updates.
- But a product computes an operand itself that one operation makes of a value, or of a value and a
  number: a ReLU, a scaling, a cast that widens, whatever it costs (`gemm_fusion.cc`;
  `product_kernels.py`). So of a ReLU between products the argument is there, once. Found on graph
  networks, planned a quarter too large, where both were counted from forward to backward; and on
  mixtures of experts, whose dispatch in float32 stays, not the comparison with zero that it was
  read for.
- cuDNN's convolutions add another buffer to their result (`cudnn_fused_conv_rewriter.cc`): the
  other summand is written, as early as it can be, and the result is not there beside the sum. So
  the gradient of a U-Net's skip connection is cut out when its decoder's block is done, if a
  convolution of the encoder adds it; read by an elementwise sum, all that it is made of stays until
  then. Found on a U-Net with remat, planned 17% too large. A result that passes a barrier
  (`run_order.py`) is not added to.
- Reshapes and transposes that products read are the same buffer: products take operands in any
  order of their dimensions (Triton's and cuBLAS's).
- But where a product that is transposed meets one that is not, elementwise, XLA has both in the
  order of the first, and copies the other, widened, if several kernels read it
  (`turned_products.py`). Found on attention with several query heads for a key head, planned a
  third too small.
- The gradient of a maximum over windows is a scatter into zeros, which are there since a ReLU
  compared with them, and its result too (`kept_zeros.py`); the places of the maxima, an integer a
  dimension, are beside it. Found on a Wide-ResNet, planned 5% too small, 10% with remat in loops.
- In place: an elementwise fusion writes over an operand of the same size that nobody reads later; a
  scatter and a slice's update over what they change. Not over rows that the same kernel reduces
  (softmax, forward and backward: kernels of Triton's share no buffers). Not where the rest is what
  a scatter adds to: XLA computes that first and scatters into it, so the gradient of a loss of
  10,000 classes takes the place of the logits (an LSTM was planned 7% too large).
- cuDNN's gradient of a filter has another order of dimensions than the filter. Left so, parameter
  and moments are written beside the old ones, 1x1 filters' in one kernel with the filter that the
  backward pass reads, and stay to the end of the step. So it is laid in the filter's order first
  (`runtime/spmd.py`): one copy in the gradient's dtype, and the update is in place. Found on a
  Wide-ResNet, whose 12 bytes for each parameter of a 1x1 filter were there at the worst moment.
- What the filters' gradients of every example are made of is copied in another order, an activation
  in the forward pass (`turned_images.py`). Found on layers of DP-SGD, planned up to 38% too small.
- A broadcast of a constant is made in the loop that reads it (`while_loop_constant_sinking.cc`).
- A loop's body copies the slices of stacked operands that products read, all when a trip begins
  (nothing makes them wait: a Llama's scan had those of its feed-forward network beside the
  softmax), and those that pass a barrier of `jax.checkpoint`; elementwise readers slice them
  themselves.
- Buffers that begin as the same constant, the stacks that loops write and what scatters add to, are
  filled by one kernel when the first is needed (`copy_fusion.cc`), and stay until each is. Found on
  an LSTM of four layers, whose loops had 27 stacks alike, and on DeepSeek's routed experts. Inside
  of a loop there is one such buffer, of which the others are copies when they begin: found on
  DeepSeek in microbatches (near the limit XLA makes it again before each, and it takes 10% less).
- What was gathered along another dimension than the first lies in that order. Products take it so;
  a loop that reads slices would have a copy in the usual order, beside what a later loop will read.
  So what only loops read is laid in that order for them (`turned_gathers.py`).
- A gather waits for nothing but the parameter, and may be there as soon as it is let: after the
  loop or product for which it is made to wait (`run_order.py`).
- The first trip of a backward loop may run before it (`collective_pipeliner.cc`), and compute its
  layer again beside the gradient of the logits: so the loop waits for what comes before it
  (`loop_order.py`). Found on scanned decoders, which took 8 to 12% more than planned.
- Gradients that a piece of a pipeline is given and adds over devices take the place of what was
  given, but for those that are combined, in an array of their own: of less than 30 MiB. Found on a
  GPT's pieces of hidden size 1024 and 2048. (XLA:TPU leaves all in place; XLA:CPU none, which is
  not counted.)
- A result that is not in the place of an argument is memory for temporaries that it holds, one
  after the other, until it is made (`buffer_assignment.cc`). Found on pieces of a ViT's pipeline,
  planned 14% too large without; those of U-Nets, by XLA:TPU, 5% too small with.
- One heap: temporaries have fixed places in it, the largest or the longest lived first (`heap.py`).
- Order: XLA may leave what nothing waits for to the end (`memory_scheduler.cc`), and so all that it
  reads stays. Stages are compiled with an order of their own (`run_order.py`), which is counted.

**For TPUs**, read from XLA:TPU of libtpu 0.0.42 for a v5e in the same way (libtpu writes its buffer
assignment too):

- Fusion: as on GPUs, but arithmetic costs nothing: a value is computed again by all who read it if
  fewer bytes move. Products take part on both sides: they compute their operands themselves (the
  GELU and the norm before a product are there nowhere), and write what is made of their results
  (scores in float32 with their mask; not both).
- But a batched product that reads several dimensions of an operand as one reads it from memory
  (experts: groups and places of tokens): their activations are written, and so is the gradient of
  what these are made of. Found on a mixture of experts, and so on DeepSeek. Not what is made of a
  softmax's exponentials (grouped attention's scores), nor of dimensions of one element.
- Of a concatenation a product computes no part: one kernel writes parts of the same values, as
  narrow as the whole is cast (`narrow_parts.py`), and the product puts them together. Found with
  blocks of attention (rotated queries are two halves, for one device or eight, with remat or not)
  and products of other concatenations, along rows and columns.
- Gradients are added over devices when the backward pass is over, and some of their products run
  there as well, with what they read (`late_sums.py`, which says in what order XLA begins). Mixtures
  of experts were planned 20% too small without.
- A masked softmax over rows is a kernel of its own kind, one with the product before it if rows are
  short: its exponentials are written in float32 and read by the backward pass (`softmaxes.py`: not
  without a mask, nor of grouped attention). Over a vocabulary it is not: a loss reads the logits as
  the product wrote them (an LSTM's were counted once more, in float32).
- A gather reads what it takes from memory: logits that are cast for the loss would be there in both
  dtypes, and longer than the backward pass; the cast is moved after the gather (`casts_after.py`).
- Gathers and scatters of rows are kernels of their own, which read and write memory: nothing is
  fused with them. Found on a graph network, whose gathered nodes are read by products and stay.
- A scatter of one element to each row (the gradient of that gather) is a comparison with an iota,
  fused like any other.
- Who reads a part of a buffer (a split, the slice of a device) reads it in the buffer, which stays:
  queries that are cut after they were made keep the whole ones. So those who read the parts decide
  whether the whole is written: a U-Net's gradient of a concatenation is, by the last product in
  that sum, and not read again from all that it is made of when the encoder's backward pass comes.
  Where one part must be written (a scatter reads it), one kernel writes all, and the whole goes.
- A loop's body copies the slices that products read, all at its beginning.
- A mask that every trip can compute of nothing is computed there.
- A product is one kernel with the sum to which its result is added, however late the rest of the
  sum comes, and what it reads stays until then: of a tied embedding the logits through the whole
  backward pass. Of several products in a sum the last one is. If an optimizer reads the gradient
  as it is, and nothing has to be added over devices, the product writes the new weight and
  moments, and is run when these are. What needs a sum over the rows of a product's result (the
  backward pass of a softmax) is a kernel of its own after it. Found on GPTs by `data` and
  `megatron`, whose memory was planned 12 to 14% too small without. A product whose result others
  read as well (a norm's sums) is not the last one of its sum.
- Such a kernel runs as soon as all that it reads is there: a gradient is added to those of earlier
  microbatches, or of earlier trips of a loop, with its product, not at the end of the trip where
  the program has the sum. Found on a BERT of two microbatches, planned 29% too large.
- What loops carry from a constant is there from the beginning of the program, because nothing makes
  it wait (`AllocateBuffer`); stacks begin with their loop. Found on LSTMs and DeepSeek.
- The scheduler hides the gathers of new state at the end of a step (`zero1`, `zero2`) beside
  products that nothing else waits for, those of weights' gradients: these are left to the end, and
  all that they read stays, in spite of `jax.checkpoint`. Found on a GPT with `zero2`, planned 42%
  too small; not those whose sums run at once (`uneven_sums.py`), and not where little is gathered,
  as the biases of `shard`; told to save memory (`xla_tpu_scheduler_percent_shared_memory_limit`) it
  does not.
- Where pieces of pipelines begin and end, exponentials of softmaxes and what fills vectors only in
  another order of dimensions are copied (`boundary_copies.py`).
- Elementwise operations are in the order of dimensions of what they read. So a gradient that is
  transposed after the product is added over devices as it is then (`turned_sums.py`).
- An elementwise kernel writes over no temporary that it reads, but over donated arguments.
- One heap: every temporary, those of a loop's body too, has a fixed place from when it begins, in
  the smallest hole (`heap.py`); arguments are never used for anything but results. If less than 2.5
  GiB of the device would be left so, the largest are placed first, and hardly anything is lost:
  found by compiling a mixture of experts and a Llama for devices of 4 to 12 GiB (by order with 2.6
  GiB or more to spare, by size with 2.4 or less).
  `memory_analysis` counts what is lost between buffers twice, so verification reads the sizes of
  the allocations instead.
- What is small and short-lived is in VMEM (128 MiB) and not in this account, which is larger by it.
- Tiles of (8, 128) are whole: the compiler chooses the order of dimensions so that they pad little,
  but not for convolutions and halves of vectors that are put side by side (`tiles.py`).
- On a device that has no more than was planned XLA makes other choices, and computes some results
  a second time (`benchmarks/compilers.py --tight`). What does not fit with sums and products at
  the end is counted as all that there is, if half of what they keep there would fit: the scheduler
  prefers what takes no more memory when that is short (`kMemoryPeakOverLimit`), begins anew with
  less until it fits, and leaves to the end what it can. Six layers of a GPT-350M with remat by
  `zero2`, 15.7 GiB with all of them at the end and 7.7 with none, compile for devices of 11.2 to
  14.9 GiB and take 93 to 98% of them; with 2% more sequences, not for devices of 10.7.
- There, in a loop over microbatches, what the kernel of a gradient and of its sum keeps until the
  rest of the sum is there does not stay: a second kernel computes it just before, as the logits of
  tied tables (`fusion.remat` in the body). So nothing waits, as if products in loops wrote their
  own results: with batches for 110% of a v5e, a BERT of two microbatches with remat takes 11.1 GiB
  (10.9 so, 15.9 with the logits until the gradient of the gather is there), GPTs of 350M and 760M
  10.2 and 11.2 (9.8 and 10.6; 15.7 and 15.5). With 55% of that batch the BERT's logits stay: 9.2
  GiB planned, 9.3 compiled. The exponentials of softmaxes stay. Counted without them, a Llama with
  a scan over layers was planned that XLA does not compile, and so was a GPT-760M by `zero3` without
  a loop. What waits outside of loops on a full device was not looked at, and is counted.

**For CPUs** a value is fused into its readers if these are near (`peak_memory.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jax.extend.core import JaxprEqn

from autopar.base.hardware import known_capability
from autopar.base.run_flags import COMBINED_BYTES
from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.primitives import (
    CONTROL_FLOW,
    CUMULATIVE,
    ELEMENTWISE,
    PRODUCTS,
    REDUCTIONS,
    SCATTERS,
    SORTS,
)
from autopar.passes.primitives.group_kernels import KERNEL_TILES
from autopar.passes.primitives.group_tiling import LOOPS, GroupedMeans
from autopar.passes.sharding.heap import LIFE, SIZE, TIME

GPU, CPU, TPU = "gpu", "cpu", "tpu"

FUSED_MOVES = frozenset(
    (
        "broadcast_in_dim",
        "concatenate",
        "dynamic_slice",
        "gather",
        "iota",
        "pad",
        "rev",
        "slice",
        "split",
        "tile",
    )
)
"""What is no arithmetic, and computed by those who read it."""

SAME_BUFFER = frozenset(
    ("bitcast_convert_type", "name", "reshape", "squeeze", "stop_gradient", "transpose")
)
"""What is no operation at all for the compiler."""

SAME_BUFFER_OF_ONE = frozenset(("broadcast_in_dim", "reduce_max", "reduce_min", "reduce_sum"))
"""What is none along dimensions of size one."""

EXPANDED = frozenset(("digamma", "erf_inv", "erfc", "lgamma"))
"""What is so many operations that what they read is written first."""

READS_BUFFERS = PRODUCTS | CONTROL_FLOW | CUMULATIVE | SORTS | EXPANDED | {"fft", "sort"}
IN_PLACE = frozenset(SCATTERS) | {"dynamic_update_slice"}
"""They write into their first operand."""


ROW_ELEMENTS = 16384
"""Of the longest row that a kernel of Triton's holds: attention's are, vocabularies' are not."""


KERNEL_ROW_ELEMENTS = 2048
"""Of the longest row whose softmax XLA:TPU computes in the kernel of the product before it; half
where the product's operands are put together of halves (`softmaxes.py`)."""


SPLIT_ROWS = 67_000
"""Of a softmax that XLA computes in two kernels for an H200: at the most."""


VECTOR_LANES = 128
"""Of a TPU's vectors, along the last dimension."""


@dataclass(frozen=True)
class CompilerRules:
    """How a backend's compiler holds values.

    Args:
      backend: "gpu", "cpu" or "tpu".
      fuses_anywhere: readers compute again what is quicker to compute than to read, wherever
        they are.
      adds_slices: new parameters that are whole are made of slices and gathered, not their updates:
        a gathered parameter lies where the old one did, while XLA:GPU gathers updates early and
        adds them at the end (a GPT of 12 unrolled layers with AdamW by `zero1` on eight H100s: 6.53
        GiB, 3.87 so). XLA:TPU needs about as much either way.
      keeps_order: programs are compiled so that they run in the order of the plan.
      moves_scatters: what every trip of a loop adds over devices, and then to what it carries, is
        added over them after the loop instead, and is whole until then, also what each device keeps
        a part of (`while_loop_all_reduce_code_motion.cc`), unless something lies between.
      counts_operations: arithmetic that is done again costs time, beside the bytes that it reads.
      turns_gathers: what was gathered along another dimension than the first lies in an order that
        loops do not take (`turned_gathers.py`).
      fills_stacks: what a loop stacks is filled with zeros before.
      fills_together: buffers that begin as the same constant are filled when the first is needed.
      adds_for_vectors: products of vectors are sums of products of elements
        (`graph/vector_products.py`).
      product_kernels: products compute operands that one operation makes, and convolutions add a
        buffer to their result (`product_kernels.py`).
      expands_windows: the gradient of a maximum over windows is a scatter into zeros, which may be
        there since the forward pass (`kept_zeros.py`).
      turns_images: what filters' gradients of every example are made of is copied in another order
        (`turned_images.py`).
      products_take_in: a product computes its operands itself, as an elementwise kernel does.
      products_write_epilogues: a product writes what is made of its result, rather than that.
      softmaxes_are_written: a softmax over rows writes its exponentials.
      split_rows: how many rows a softmax has at most that is computed in two kernels
        (`split_softmaxes.py`).
      loops_compute_again: in loops, what a product's kernel would wait for is computed once more.
      slices_are_read: who reads a part of a buffer reads it in the buffer.
      gathers_read_buffers: what a gather takes from is in memory, in the dtype that it takes.
      scatters_choose: a scatter of one element to each row is a comparison of places.
      leaves_products: products of weights' gradients run at the end, beside gathers of new state.
      sums_last: gradients are added over devices when the backward pass is over (`late_sums.py`).
      writes_over_temporaries: an elementwise kernel writes over what it reads for the last time;
        else only over arguments.
      heap_orders: temporaries have fixed places in one memory, where they are put in the best of
        these orders (`heap.py`); what lies between them is lost. None: nothing is.
      scatters_across: a reduce-scatter of 16-bit numbers stays one only across the last dimension,
        not along it, if its parts there have an odd number of vectors.
      turns_sums: gradients that are transposed are added over devices as they are afterwards
        (`turned_sums.py`).
      turns_scatters: so are those of which each device keeps a part; GPUs scatter the first
        dimension without a copy, and of a part little is to be transposed.
      results_hold: temporaries lie in the memory of results that are not there yet.
      combined_bytes: sums of less are combined in an array of their own, and not done in place.
      copies_in: some arguments and results are held in another order inside (`boundary_copies.py`).
      has_tiles: arrays lie in whole tiles (`tiles.py`).
      grouped: how grouped products are computed (`group_tiling.py`); `rules_of` says which GPUs
        have kernels of ours.
    """

    backend: str
    fuses_anywhere: bool = False
    adds_slices: bool = True
    keeps_order: bool = False
    moves_scatters: bool = False
    counts_operations: bool = True
    turns_gathers: bool = False
    fills_stacks: bool = True
    fills_together: bool = True
    adds_for_vectors: bool = False
    product_kernels: bool = False
    expands_windows: bool = False
    turns_images: bool = False
    products_take_in: bool = False
    products_write_epilogues: bool = False
    softmaxes_are_written: bool = False
    split_rows: int = 0
    loops_compute_again: bool = False
    slices_are_read: bool = False
    gathers_read_buffers: bool = False
    scatters_choose: bool = False
    leaves_products: bool = False
    sums_last: bool = False
    writes_over_temporaries: bool = True
    heap_orders: tuple[str, ...] = ()
    scatters_across: bool = False
    turns_sums: bool = False
    turns_scatters: bool = False
    results_hold: bool = False
    combined_bytes: int = 0
    copies_in: bool = False
    has_tiles: bool = False
    grouped: GroupedMeans = LOOPS

    def takes_in(self, eqn: JaxprEqn, place: int) -> bool:
        """Whether an equation can compute its operand at a place itself."""
        if eqn.primitive.name in PRODUCTS and self.products_take_in:
            return not merges_in_batches(eqn, place)
        if self.scatters_choose and is_choice(eqn):
            return True
        if eqn.primitive.name == "concatenate" and self.products_take_in:
            return False
        is_row_kernel = eqn.primitive.name == "gather" or eqn.primitive.name in SCATTERS
        if is_row_kernel and place != 1 and self.gathers_read_buffers:
            return False
        return not reads_buffer(eqn, place)

    def may_be_fused(self, eqn: JaxprEqn) -> bool:
        """Whether those who read an equation's results can compute them."""
        if eqn.primitive.name == "gather" and self.gathers_read_buffers:
            return False
        return may_be_fused(eqn) or (self.scatters_choose and is_choice(eqn))

    def is_scattered_across(
        self, shape: Sequence[int], itemsize: int, dim: int, parts: int
    ) -> bool:
        """Whether a reduce-scatter must run across the last dimension to stay one.

        Found by compiling those of products and of sums for eight chips of a v5e (libtpu 0.0.42):
        where two rows share a vector of 128 lanes, and each part has an odd number of vectors,
        `reduce-scatter-decomposer` makes an all-reduce, of twice the bytes. Those of 32-bit
        numbers, of even numbers of vectors, and of parts that are no vectors stay.
        """
        is_last = len(shape) >= 2 and dim == len(shape) - 1
        return (
            self.scatters_across
            and is_last
            and itemsize == 2
            and shape[dim] // parts % (2 * VECTOR_LANES) == VECTOR_LANES
        )


RULES = {
    GPU: CompilerRules(
        GPU,
        fuses_anywhere=True,
        keeps_order=True,
        adds_for_vectors=True,
        product_kernels=True,
        expands_windows=True,
        turns_images=True,
        heap_orders=(SIZE, LIFE),
        results_hold=True,
        combined_bytes=COMBINED_BYTES,
        turns_gathers=True,
        turns_sums=True,
    ),
    CPU: CompilerRules(CPU),
    TPU: CompilerRules(
        TPU,
        fuses_anywhere=True,
        adds_slices=False,
        moves_scatters=True,
        counts_operations=False,
        fills_stacks=False,
        fills_together=False,
        products_take_in=True,
        products_write_epilogues=True,
        softmaxes_are_written=True,
        slices_are_read=True,
        gathers_read_buffers=True,
        scatters_choose=True,
        leaves_products=True,
        sums_last=True,
        writes_over_temporaries=False,
        heap_orders=(TIME,),
        scatters_across=True,
        turns_sums=True,
        turns_scatters=True,
        copies_in=True,
        has_tiles=True,
        grouped=GroupedMeans(has_kernel=True),
    ),
}


def backend_of(device_name: str) -> str:
    """The backend of a kind of device, by its name.

    >>> backend_of("NVIDIA H100 80GB HBM3"), backend_of("TPU v5 lite"), backend_of("cpu")
    ('gpu', 'tpu', 'cpu')
    """
    name = device_name.lower()
    return next((kind for kind in (TPU, CPU) if kind in name), GPU)


def rules_of(device_name: str) -> CompilerRules:
    """The rules for a kind of device."""
    rules = RULES[backend_of(device_name)]
    tiles = KERNEL_TILES.get(known_capability(device_name))
    if rules.backend != GPU or tiles is None:
        return rules
    is_split = "H200" in re.split(r"[^A-Z0-9]+", device_name.upper())
    return replace(
        rules, grouped=GroupedMeans(tiles=tiles), split_rows=SPLIT_ROWS if is_split else 0
    )


def is_same_buffer(eqn: JaxprEqn, bytes_read: int, bytes_made: int) -> bool:
    """Whether an equation with one operand and one result only names its operand anew."""
    name = eqn.primitive.name
    if name in SAME_BUFFER:
        return True
    return name in SAME_BUFFER_OF_ONE and bytes_read == bytes_made


def may_be_fused(eqn: JaxprEqn) -> bool:
    """Whether those who read an equation's results can compute them."""
    name = eqn.primitive.name
    return (name in ELEMENTWISE or name in FUSED_MOVES) and not is_barrier(eqn)


def writes_buffer(eqn: JaxprEqn) -> bool:
    """Whether an equation's results are buffers of their own, whoever reads them."""
    return not may_be_fused(eqn) and eqn.primitive.name not in SAME_BUFFER and not is_barrier(eqn)


def is_choice(eqn: JaxprEqn) -> bool:
    """Whether an equation puts one element into each row: its other dimensions are batches."""
    if eqn.primitive.name not in SCATTERS:
        return False
    numbers = eqn.params["dimension_numbers"]
    batches = len(numbers.operand_batching_dims)
    is_one = len(numbers.scatter_dims_to_operand_dims) == 1 and not numbers.update_window_dims
    updates: int = eqn.invars[2].aval.size
    rows: int = eqn.invars[0].aval.size // max(eqn.invars[0].aval.shape[-1:] or (1,))
    return is_one and batches == eqn.invars[0].aval.ndim - 1 and updates <= rows


def merges_in_batches(eqn: JaxprEqn, place: int) -> bool:
    """Whether a batched product reads several dimensions of an operand as one."""
    if eqn.primitive.name != "dot_general":
        return False
    summed, batches = (pair[place] for pair in eqn.params["dimension_numbers"])
    shape = eqn.invars[place].aval.shape
    free = sum(size > 1 for d, size in enumerate(shape) if d not in (*summed, *batches))
    added = sum(shape[dim] > 1 for dim in summed)
    return any(shape[dim] > 1 for dim in batches) and (free > 1 or added > 1)


def reads_buffer(eqn: JaxprEqn, place: int) -> bool:
    """Whether an equation reads its operand at a place from memory, where nothing is fused."""
    name = eqn.primitive.name
    return name in READS_BUFFERS or is_barrier(eqn) or (name in IN_PLACE and place == 0)


def reduces_rows(eqn: JaxprEqn) -> bool:
    """Whether a reduction is one kernel with what reads the result beside its operand."""
    if eqn.primitive.name not in REDUCTIONS or not eqn.params.get("axes"):
        return False
    shape = eqn.invars[0].aval.shape
    return tuple(eqn.params["axes"]) == (len(shape) - 1,) and shape[-1] <= ROW_ELEMENTS


def is_filter_gradient(eqn: JaxprEqn) -> bool:
    """Whether a convolution makes the gradient of a filter: its results lead with no batch."""
    if eqn.primitive.name != "conv_general_dilated":
        return False
    order: tuple[int, ...] = eqn.params["dimension_numbers"].out_spec
    return order[0] != 0
