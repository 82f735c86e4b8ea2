"""What of PyTorch's tensors netsum can sum and move, and how."""

import warnings
import zlib

import torch

from .._netsum import Work
from ..errors import ArgumentError, NonFiniteError

SUMMED = (torch.float32, torch.int32)
WIDENED = (torch.bfloat16, torch.float16)


class Memory:
    """A tensor's elements in row-major order: where they are, or in a copy, for a tensor that is not contiguous.

    So ranks may have other strides than each other. `put` brings a result from the copy to where it belongs.
    """

    def __init__(self, tensor: torch.Tensor, dtype: "torch.dtype | None" = None, written: bool = True):
        if tensor.layout != torch.strided:
            raise ArgumentError(f"a tensor of {tensor.layout}, which only all_reduce takes: give x.to_dense()")
        self.tensor = tensor.detach()
        if written and any(stride == 0 < size - 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ArgumentError(
                f"a tensor of shape {tuple(tensor.shape)} has several elements at one place in memory: give x.contiguous() and copy the "
                "result back"
            )
        self.flat = self.tensor.resolve_conj().resolve_neg().to(dtype or tensor.dtype).contiguous()
        self.is_copy = self.flat.data_ptr() != self.tensor.data_ptr() or dtype not in (None, tensor.dtype)

    def put(self) -> torch.Tensor:
        return put(self.tensor, self.flat) if self.is_copy else self.tensor

    @property
    def line(self) -> torch.Tensor:
        """Without the shape, which one of Gloo's ranks alone may look at."""
        return self.flat.view(-1)

    def as_bytes(self) -> torch.Tensor:
        """Older PyTorch has no booleans and no bfloat16 in DLPack."""
        # One element is contiguous, whatever its strides.
        return self.flat.as_strided((self.flat.numel(),), (1,)).view(torch.uint8)


class Sum(Memory):
    """A tensor that netsum sums or averages: bfloat16 and float16 as float32. One that is not kept stays as it is."""

    def __init__(self, tensor: torch.Tensor, kept: bool = True):
        super().__init__(tensor, torch.float32 if tensor.dtype in WIDENED else None, written=kept)
        self.kept = kept

    def finish(self, work: Work) -> torch.Tensor:
        """Waits, and puts the result into its place.

        An infinity or a NaN at any rank makes its message NaN at all ranks: a GradScaler can skip the step.
        """
        try:
            work.wait()
        except NonFiniteError as error:
            if self.kept:
                warnings.warn(f"{error}: the sums beside it are NaN at all ranks that get them", stacklevel=1)
        return self.put() if self.kept else self.tensor

    def finished(self, work: Work) -> list[torch.Tensor]:
        return [self.finish(work)]


def put(into: torch.Tensor, what: torch.Tensor) -> torch.Tensor:
    """Copies, also into a tensor of inference mode: threads have a mode each."""
    with torch.inference_mode(into.is_inference()):
        return into.detach().copy_(what.view_as(into))


def tag(*what: object) -> int:
    """A number for what the network does not see and all ranks must have the same of, such as a dtype."""
    return zlib.crc32(repr(what).encode())
