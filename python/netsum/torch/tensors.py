"""What of PyTorch's tensors netsum can sum and move, and how."""

import warnings

import torch

from .._netsum import Work
from ..errors import ArgumentError, NonFiniteError

SUMMED = (torch.float32, torch.int32)
WIDENED = (torch.bfloat16, torch.float16)


class Sum:
    """A tensor that netsum sums or averages: bfloat16 and float16 as float32. One that is not kept stays as it is."""

    def __init__(self, tensor: torch.Tensor, kept: bool = True):
        self.tensor, self.kept = contiguous(tensor), kept
        self.summed = self.tensor.float() if tensor.dtype in WIDENED else self.tensor

    def finish(self, work: Work) -> torch.Tensor:
        """Waits, and puts the result into its place.

        An infinity or a NaN at any rank makes its message NaN at all ranks: a GradScaler can skip the step.
        """
        try:
            work.wait()
        except NonFiniteError as error:
            if self.kept:
                warnings.warn(f"{error}: the sums beside it are NaN at all ranks that get them", stacklevel=1)
        return put(self.tensor, self.summed) if self.kept and self.summed is not self.tensor else self.tensor

    def finished(self, work: Work) -> list[torch.Tensor]:
        return [self.finish(work)]


def put(into: torch.Tensor, what: torch.Tensor) -> torch.Tensor:
    """Copies, also into a tensor of inference mode: threads have a mode each."""
    with torch.inference_mode(into.is_inference()):
        return into.detach().copy_(what.view_as(into))


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph, if it can be written where it is. A sparse one has no memory that it shares with a copy."""
    if tensor.layout != torch.strided:
        return tensor
    if not tensor.is_contiguous():
        raise ArgumentError(
            f"a tensor of shape {tuple(tensor.shape)} is not contiguous in memory, and the result goes where it is: give x.contiguous() "
            "and copy the result back"
        )
    return tensor.detach()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory. Older PyTorch has no booleans and no bfloat16 in DLPack."""
    if tensor.layout != torch.strided:
        raise ArgumentError(f"a tensor of {tensor.layout}, which only all_reduce takes: give x.to_dense()")
    # One element is contiguous, whatever its strides.
    return contiguous(tensor).as_strided((tensor.numel(),), (1,)).view(torch.uint8)
