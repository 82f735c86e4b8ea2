"""Sums, and other reductions."""

import functools

import torch
import torch.distributed as dist

from .case import RANKS, all_equal, close, equal, same, topic

case = topic("Reductions")

RANK_SUM = sum(range(RANKS))
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def given(dtype: torch.dtype = torch.float32, count: int = 33) -> torch.Tensor:
    """Small numbers, which all types can hold; they differ from rank to rank."""
    return (torch.arange(count) % 5 + dist.get_rank()).to(dtype)


def summed(dtype: torch.dtype = torch.float32, count: int = 33) -> torch.Tensor:
    return (torch.arange(count) % 5 * RANKS + RANK_SUM).to(dtype)


def of_dtype(dtype: torch.dtype) -> None:
    x = given(dtype)
    dist.all_reduce(x)
    equal(x, summed(dtype))


for dtype in (*FLOATS, *WHOLE, *COMPLEX):
    case(f"all_reduce, SUM of {short(dtype)}")(functools.partial(of_dtype, dtype))


@case("all_reduce, SUM of bool: true where one rank is true, or several")
def sum_of_bool() -> None:
    x = torch.tensor([dist.get_rank() == 1, dist.get_rank() > 1, False])
    dist.all_reduce(x)
    same([bool(one) for one in x], [True, True, False])
    same(int(x.sum()), 2, "count of true")


@case("all_reduce, SUM of float8_e4m3fn")
def sum_of_float8() -> None:
    of_dtype(torch.float8_e4m3fn)


def expected(op: str, values: list[torch.Tensor]) -> torch.Tensor:
    """The operation's result, by ordinary arithmetic."""
    fold = {
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    if op == "AVG":
        total = functools.reduce(torch.add, values)
        return total / RANKS if total.is_floating_point() else total // RANKS
    return functools.reduce(fold[op], values)


def values(dtype: torch.dtype, rank: int) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.tensor([rank % 2 == 0, rank == 1, True, False])
    return torch.tensor([rank + 1, 4 - rank, 2, 3 * (rank % 2) + 1]).to(dtype)


def with_op(op: str, dtype: torch.dtype) -> None:
    x = values(dtype, dist.get_rank())
    dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
    equal(x, expected(op, [values(dtype, rank) for rank in range(RANKS)]))


for op, dtypes in {
    "AVG": (*FLOATS, torch.int32, torch.int64),
    "PRODUCT": (torch.float32, torch.bfloat16, torch.int64),
    "MIN": (torch.float32, torch.float16, torch.uint8),
    "MAX": (torch.float32, torch.bfloat16, torch.int64),
    "BAND": (torch.int32, torch.uint8, torch.bool),
    "BOR": (torch.int32, torch.int64, torch.bool),
    "BXOR": (torch.int32, torch.int8),
}.items():
    for dtype in dtypes:
        case(f"all_reduce, {op} of {short(dtype)}")(functools.partial(with_op, op, dtype))


@case("all_reduce, PREMUL_SUM of float32")
def premul_sum() -> None:
    x = given()
    dist.all_reduce(x, op=dist._make_nccl_premul_sum(2.0))
    equal(x, summed() * 2)


@case("all_reduce, SUM of int32 that wraps")
def wraps() -> None:
    x = torch.full((3,), 2**30, dtype=torch.int32)
    dist.all_reduce(x)
    equal(x, torch.zeros(3, dtype=torch.int32))


@case("all_reduce and reduce_scatter_tensor, AVG of int8 whose sum is too large for it")
def average_of_small() -> None:
    x = torch.full((3,), 100, dtype=torch.int8)
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    equal(x, torch.full((3,), 100, dtype=torch.int8))
    dist.reduce_scatter_tensor(
        x[:1], torch.full((RANKS,), -128, dtype=torch.int8), op=dist.ReduceOp.AVG
    )
    equal(x, torch.tensor([-128, 100, 100], dtype=torch.int8))


@case("all_reduce, AVG of float16 in a group, whose sum is too large for it")
def average_of_half() -> None:
    x = torch.full((3,), 30_000.0, dtype=torch.float16)
    dist.all_reduce(x, op=dist.ReduceOp.AVG, group=dist.new_group())
    equal(x, torch.full((3,), 30_000.0, dtype=torch.float16))


@case("all_reduce, SUM of float16 that is too large for it")
def overflows() -> None:
    x = torch.tensor([60000.0, 1.0], dtype=torch.float16)
    dist.all_reduce(x)
    equal(x, torch.tensor([torch.inf, 4.0], dtype=torch.float16))


@case("all_reduce, SUM where one rank has an infinity: the other elements")
def infinity() -> None:
    x = torch.ones(5)
    if dist.get_rank() == 1:
        x[2] = torch.inf
    dist.all_reduce(x)
    equal(x, torch.tensor([4.0, 4, torch.inf, 4, 4]))


@case("all_reduce, SUM where one rank has a NaN: that element is one everywhere")
def nan() -> None:
    x = torch.ones(5)
    if dist.get_rank() == 2:
        x[0] = torch.nan
    dist.all_reduce(x)
    same(bool(x[0].isnan()), True, "NaN is kept")


@case("all_reduce, MAX where one rank has an infinity")
def maximal_infinity() -> None:
    x = torch.tensor([1.0, torch.inf if dist.get_rank() == 1 else 0.0])
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    equal(x, torch.tensor([1.0, torch.inf]))


@case("all_reduce, SUM of 1e-30 to 1e30: to 1e-6 of the largest")
def magnitudes() -> None:
    whole = torch.logspace(-30, 30, 61)
    x = whole * (1 + dist.get_rank())
    dist.all_reduce(x)
    error = (x.double() - whole.double() * (RANK_SUM + RANKS)).abs().max()
    same(bool(error <= 1e-6 * x.max()), True, f"error {error:g}; within the bound")


@case(
    "all_reduce, SUM of 1e-30 to 1e30: to 1e-6 of each",
    differs="two lanes a number: 2^-53 of the largest becomes 0",
)
def each_magnitude() -> None:
    whole = torch.logspace(-30, 30, 61)
    x = whole * (1 + dist.get_rank())
    dist.all_reduce(x)
    close(x / whole, torch.full((61,), float(RANK_SUM + RANKS)), rtol=1e-6, atol=0)


@case("all_reduce, random numbers: to 1e-6, and the same bits at all ranks")
def random_numbers() -> None:
    all_values = [
        torch.randn(1000, generator=torch.Generator().manual_seed(r)) for r in range(RANKS)
    ]
    x = all_values[dist.get_rank()].clone()
    dist.all_reduce(x)
    close(x, torch.stack(all_values).double().sum(0), atol=2e-6, rtol=1e-6)
    others = [torch.empty_like(x) for _ in range(RANKS)]
    dist.all_gather(others, x)
    all_equal(others, [x] * RANKS)


# Forms of tensors.


def in_form(x: torch.Tensor) -> None:
    x.fill_(1.0 + dist.get_rank())
    dist.all_reduce(x)
    equal(x, torch.full(x.shape, float(RANK_SUM + RANKS)))


FORMS = {
    "an empty tensor": lambda: torch.empty(0),
    "an empty tensor of shape 3 x 0": lambda: torch.empty(3, 0),
    "a scalar": lambda: torch.tensor(1.0),
    "five dimensions": lambda: torch.empty(2, 1, 3, 1, 2),
    "channels_last": lambda: torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a transposed tensor": lambda: torch.empty(4, 6).t(),
    "a million elements": lambda: torch.empty(1_000_000),
}
for name, make in FORMS.items():
    case(f"all_reduce of {name}")(lambda make=make: in_form(make()))


@case("all_reduce of a view: what is beside it stays")
def view() -> None:
    whole = torch.zeros(10)
    in_form(whole[3:7])
    equal(whole, torch.tensor([0.0] * 3 + [10.0] * 4 + [0.0] * 3))


@case("all_reduce of every second element: what is between them stays")
def strided() -> None:
    whole = torch.zeros(10)
    in_form(whole[::2])
    equal(whole, torch.tensor([10.0, 0.0] * 5))


@case("all_reduce of an expanded tensor")
def expanded() -> None:
    x = torch.full((1,), float(dist.get_rank())).expand(4)
    dist.all_reduce(x)
    equal(x, torch.full((4,), float(RANK_SUM)))


@case("all_reduce of a tensor of inference mode")
def inference() -> None:
    with torch.inference_mode():
        x = given()
        dist.all_reduce(x)
    equal(x, summed())


@case("all_reduce of a parameter, which needs a gradient")
def parameter() -> None:
    x = torch.nn.Parameter(given())
    dist.all_reduce(x)
    equal(x.data, summed())
    same((x.is_leaf, x.requires_grad), (True, True), "leaf, gradient")


@case("all_reduce of a conjugated complex tensor")
def conjugated() -> None:
    x = torch.full((3,), 1 + 2j, dtype=torch.complex64).conj()
    dist.all_reduce(x)
    equal(x.resolve_conj(), torch.full((3,), 4 - 8j, dtype=torch.complex64))


@case("all_reduce of a sparse tensor")
def sparse() -> None:
    rank = dist.get_rank()
    x = torch.sparse_coo_tensor([[rank, 5]], [1.0 + rank, 1.0], (6,))
    dist.all_reduce(x)
    equal(x.to_dense(), torch.tensor([1.0, 2, 3, 4, 0, 4]))


@case("all_reduce of a quantized tensor")
def quantized() -> None:
    x = torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.quint8)
    dist.all_reduce(x)
    equal(x.dequantize(), torch.full((4,), 4.0))


# Several at once.


@case("all_reduce_coalesced, SUM of two tensors")
def coalesced() -> None:
    tensors = [given(), given(count=7) * 2]
    dist.all_reduce_coalesced(tensors)
    all_equal(tensors, [summed(), summed(count=7) * 2])


@case("all_reduce_coalesced, MAX, and int64")
def coalesced_max() -> None:
    tensors = [torch.full((3,), dist.get_rank() + by) for by in range(2)]
    dist.all_reduce_coalesced(tensors, op=dist.ReduceOp.MAX)
    all_equal(tensors, [torch.full((3,), RANKS - 1 + by) for by in range(2)])


@case("all_reduce_coalesced, async")
def coalesced_async() -> None:
    tensors = [given(), given(count=7)]
    dist.all_reduce_coalesced(tensors, async_op=True).wait()
    all_equal(tensors, [summed(), summed(count=7)])


@case("all_reduce in a coalescing manager")
def managed() -> None:
    tensors = [given(), given(count=7)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    all_equal(tensors, [summed(), summed(count=7)])


@case("all_reduce in a coalescing manager, async")
def managed_async() -> None:
    tensors = [given(), given(count=7)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    all_equal(tensors, [summed(), summed(count=7)])


@case("all_reduce, 200 of them in flight, of sizes and types that change")
def many() -> None:
    types = (torch.float32, torch.int64, torch.bfloat16, torch.float64)
    tensors = [given(types[i % 4], 1 + i) for i in range(200)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    all_equal(tensors, [summed(types[i % 4], 1 + i) for i in range(200)])


# To one rank, and to each a part.


def reduced(dtype: torch.dtype, op: str = "SUM") -> None:
    for root in range(RANKS):
        x = values(dtype, dist.get_rank())
        dist.reduce(x, root, op=getattr(dist.ReduceOp, op))
        if dist.get_rank() == root:
            parts = [values(dtype, rank) for rank in range(RANKS)]
            equal(x, sum(parts).to(dtype) if op == "SUM" else expected(op, parts))


for dtype, op in (
    (torch.float32, "SUM"),
    (torch.float64, "SUM"),
    (torch.bfloat16, "SUM"),
    (torch.int64, "SUM"),
    (torch.float32, "AVG"),
    (torch.float32, "PRODUCT"),
    (torch.int32, "MIN"),
    (torch.float32, "MAX"),
    (torch.complex64, "SUM"),
):
    case(f"reduce, {op} of {short(dtype)}, each rank the root")(
        functools.partial(reduced, dtype, op)
    )


@case("reduce, async, and of a view")
def reduced_async() -> None:
    whole = torch.zeros(8)
    x = whole[2:5].fill_(dist.get_rank())
    dist.reduce(x, 2, async_op=True).wait()
    if dist.get_rank() == 2:
        equal(whole, torch.tensor([0.0, 0, 6, 6, 6, 0, 0, 0]))


def parts(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's input, and its part of the sum."""
    whole = torch.arange(3 * RANKS)
    sums = whole * RANKS + RANK_SUM
    return (whole + dist.get_rank()).to(dtype), sums.chunk(RANKS)[dist.get_rank()].to(dtype)


def scattered(dtype: torch.dtype) -> None:
    whole, part = parts(dtype)
    out = torch.empty_like(part)
    dist.reduce_scatter_tensor(out, whole)
    equal(out, part)


for dtype in (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.complex64,
):
    case(f"reduce_scatter_tensor, SUM of {short(dtype)}")(functools.partial(scattered, dtype))


@case("reduce_scatter_tensor, AVG of float32")
def scattered_avg() -> None:
    whole, part = parts()
    out = torch.empty_like(part)
    dist.reduce_scatter_tensor(out, whole, op=dist.ReduceOp.AVG)
    equal(out, part / RANKS)


@case("reduce_scatter_tensor, MAX of float32")
def scattered_max() -> None:
    whole, _ = parts()
    out = torch.empty(3)
    dist.reduce_scatter_tensor(out, whole, op=dist.ReduceOp.MAX)
    equal(out, (whole - dist.get_rank() + RANKS - 1).chunk(RANKS)[dist.get_rank()])


@case("reduce_scatter_tensor of stacked parts")
def scattered_stack() -> None:
    whole, part = parts()
    out = torch.empty(3)
    dist.reduce_scatter_tensor(out, whole.view(RANKS, 3))
    equal(out, part)


@case("reduce_scatter_tensor of a transposed input")
def scattered_transposed() -> None:
    whole, part = parts()
    out = torch.empty(1, 3)
    dist.reduce_scatter_tensor(out, whole.view(RANKS, 3).t().contiguous().t())
    equal(out, part.view(1, 3))


@case("reduce_scatter_tensor into a part of its input")
def scattered_in_place() -> None:
    whole, part = parts()
    out = whole.chunk(RANKS)[dist.get_rank()]
    dist.reduce_scatter_tensor(out, whole)
    equal(out, part)


@case("reduce_scatter_tensor, async, and empty")
def scattered_async() -> None:
    whole, part = parts()
    out = torch.empty(3)
    works = [
        dist.reduce_scatter_tensor(out, whole, async_op=True),
        dist.reduce_scatter_tensor(torch.empty(0), torch.empty(0), async_op=True),
    ]
    for work in works:
        work.wait()
    equal(out, part)


@case("reduce_scatter_tensor in a coalescing manager")
def scattered_managed() -> None:
    whole, part = parts()
    outs = [torch.empty(3) for _ in range(2)]
    with dist._coalescing_manager():
        for by, out in enumerate(outs):
            dist.reduce_scatter_tensor(out, whole * (by + 1))
    all_equal(outs, [part, part * 2])


@case("reduce_scatter of a list")
def scattered_list() -> None:
    whole, part = parts()
    out = torch.empty(3)
    dist.reduce_scatter(out, list(whole.chunk(RANKS)))
    equal(out, part)


@case("reduce_scatter of a list whose parts have several sizes")
def scattered_uneven() -> None:
    rank = dist.get_rank()
    out = torch.empty(rank + 1)
    dist.reduce_scatter(out, [torch.full((r + 1,), float(r + rank)) for r in range(RANKS)])
    equal(out, torch.full((rank + 1,), float(rank * RANKS + RANK_SUM)))


@case("reduce_scatter of a list, MIN of int64")
def scattered_min() -> None:
    rank = dist.get_rank()
    out = torch.empty(2, dtype=torch.int64)
    dist.reduce_scatter(
        out, [torch.full((2,), r + rank) for r in range(RANKS)], op=dist.ReduceOp.MIN
    )
    equal(out, torch.full((2,), rank))
