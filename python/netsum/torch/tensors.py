"""PyTorch's tensors, as netsum sums and moves them."""

import warnings
import zlib

import torch

from .._netsum import Work
from ..errors import ArgumentError, NonFiniteError

SUMMED = (torch.float32, torch.int32)
WIDENED = (torch.bfloat16, torch.float16)


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

    def put(self) -> torch.Tensor:
        return put(self.tensor, self.flat) if self.is_copy else self.tensor

    @property
    def line(self) -> torch.Tensor:
        """Without the shape, which Gloo checks only at some ranks."""
        return self.flat.view(-1)

    def as_bytes(self) -> torch.Tensor:
        """The bytes: older PyTorch has no booleans and no bfloat16 in DLPack."""
        # One element is contiguous, whatever its strides.
        return self.flat.as_strided((self.flat.numel(),), (1,)).view(torch.uint8)


class Sum(Memory):
    """A tensor that netsum sums or averages: bfloat16 and float16 as float32.

    A tensor that is not kept stays unchanged.
    """

    def __init__(self, tensor: torch.Tensor, kept: bool = True):
        super().__init__(tensor, torch.float32 if tensor.dtype in WIDENED else None, written=kept)
        self.kept = kept

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
        return self.put() if self.kept else self.tensor

    def finished(self, work: Work) -> list[torch.Tensor]:
        return [self.finish(work)]


def put(into: torch.Tensor, what: torch.Tensor) -> torch.Tensor:
    """Copies, also into a tensor of inference mode: each thread has its own mode."""
    with torch.inference_mode(into.is_inference()):
        return into.detach().copy_(what.view_as(into))


def tag(*what: object) -> int:
    """A number for properties that must be the same at all ranks, such as a dtype."""
    return zlib.crc32(repr(what).encode())
