"""PyTorch's tensors, as netsum reduces and moves them."""

import threading
import warnings
import zlib

import torch

from .._netsum import Work
from ..errors import ArgumentError, NonFiniteError


def _known(*names: str) -> "tuple[torch.dtype, ...]":
    return tuple(getattr(torch, name) for name in names if hasattr(torch, name))


INTEGERS = _known("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
#: Types that netsum reduces as they are.
REDUCED = (*INTEGERS, *FLOATS, torch.bool)
#: Types whose sums are those of pairs of floats.
PAIRS = (torch.complex64, torch.complex128)


def _has_dlpack_bool() -> bool:
    try:
        torch.zeros(1, dtype=torch.bool).__dlpack__()
    except (RuntimeError, BufferError, TypeError):
        return False
    return True


_DLPACK_BOOL = _has_dlpack_bool()
#: Operations on bytes that are 0 or 1, as those on booleans.
_OF_BYTES = {"sum": "bor", "max": "bor", "min": "band", "prod": "band"}


class Memory:
    """A tensor's elements in row-major order: in place, or in a copy if it is not contiguous.

    So the ranks' strides may differ. `put` copies a result back.
    """

    def __init__(
        self, tensor: torch.Tensor, dtype: "torch.dtype | None" = None, written: bool = True
    ):
        if tensor.layout != torch.strided:
            raise ArgumentError(
                f"a tensor of {tensor.layout}, which only all_reduce supports: pass x.to_dense()"
            )
        self.tensor = tensor.detach()
        dims = zip(tensor.stride(), tensor.shape, strict=True)
        if written and any(stride == 0 < size - 1 for stride, size in dims):
            raise ArgumentError(
                f"a tensor of shape {tuple(tensor.shape)} has several elements at one place in "
                "memory: pass x.contiguous() and copy the result back"
            )
        self.flat = self.tensor.resolve_conj().resolve_neg().to(dtype or tensor.dtype).contiguous()
        is_converted = dtype not in (None, tensor.dtype)
        self.is_copy = self.flat.data_ptr() != self.tensor.data_ptr() or is_converted

    def put(self, non_blocking: bool = False) -> torch.Tensor:
        return put(self.tensor, self.flat, non_blocking) if self.is_copy else self.tensor

    def to_host(self) -> "Memory":
        """Waits for a copy in the host's memory, which `put` copies back."""
        if self.flat.device.type != "cpu":
            self.flat, self.is_copy = self.flat.cpu(), True
        return self

    @property
    def line(self) -> torch.Tensor:
        """Without the shape, which Gloo checks only at some ranks."""
        return self.flat.view(-1)

    def as_bytes(self) -> torch.Tensor:
        """The bytes: older PyTorch has no booleans and no bfloat16 in DLPack."""
        # One element is contiguous, whatever its strides.
        return self.flat.as_strided((self.flat.numel(),), (1,)).view(torch.uint8)


class Reduced(Memory):
    """A tensor that netsum reduces: complex numbers as pairs of floats.

    Averages of integers are sums as int64, divided. A tensor that is not kept stays unchanged.
    """

    def __init__(
        self, tensor: torch.Tensor, op: str = "sum", ranks: int = 1, kept: bool = True
    ):
        dtype = tensor.dtype
        self.divisor = ranks if op == "avg" and dtype in INTEGERS else None
        super().__init__(tensor, torch.int64 if self.divisor else None, written=kept)
        self.kept, self.op, self.given = kept, "sum" if self.divisor else op, self.flat
        if dtype in PAIRS:
            self.given = torch.view_as_real(self.flat)
        elif dtype == torch.bool and not _DLPACK_BOOL:
            self.given, self.op = self.as_bytes(), _OF_BYTES.get(op, op)

    def tag(self, *more: object) -> int:
        """For properties that the calls do not show."""
        return tag(self.tensor.dtype, *more, *(["avg"] if self.divisor else []))

    def finish(self, work: Work) -> torch.Tensor:
        """Waits, and copies the result back.

        An infinity or a NaN at any rank makes its block NaN at all ranks, beyond 4,096 floats: a
        GradScaler can skip the step.
        """
        try:
            work.wait()
        except NonFiniteError as error:
            if self.kept:
                text = f"{error}: the sums of its block are NaN at all ranks that get them"
                warnings.warn(text, stacklevel=1)
        if not self.kept:
            return self.tensor
        if self.divisor:
            divided(self.flat, self.divisor)
        return self.put()

    def finished(self, work: Work) -> list[torch.Tensor]:
        return [self.finish(work)]


def divided(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """Divides in place, also a tensor of inference mode; integers are rounded towards zero."""
    is_exact = not (tensor.is_floating_point() or tensor.is_complex())
    with torch.inference_mode(tensor.is_inference()):
        return tensor.detach().div_(ranks, rounding_mode="trunc" if is_exact else None)


def put(into: torch.Tensor, what: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copies, also into a tensor of inference mode: each thread has its own mode."""
    if what.layout == torch.strided:
        what = what.view_as(into)
    with torch.inference_mode(into.is_inference()):
        return into.detach().copy_(what, non_blocking)


class _Cut(threading.local):
    """A thread's call that is one of several for the same tensors: their size, and its place."""

    number: "tuple[int, ...]" = ()


cut = _Cut()


def tag(*what: object) -> int:
    """A number for properties that must be the same at all ranks, such as a dtype."""
    return zlib.crc32(repr((*what, *cut.number)).encode())
