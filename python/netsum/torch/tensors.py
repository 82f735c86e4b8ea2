"""What of PyTorch's tensors netsum can sum and move, and how."""

import warnings

import torch

from .._netsum import Work
from ..errors import ArgumentError, NonFiniteError

SUMMED = (torch.float32, torch.int32)
WIDENED = (torch.bfloat16, torch.float16)


class Sum:
    """A tensor that netsum sums or averages: bfloat16 and float16 as float32."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = contiguous(tensor)
        self.summed = self.tensor.float() if tensor.dtype in WIDENED else self.tensor

    def finish(self, work: Work) -> torch.Tensor:
        """Waits, and puts the result into its place.

        An infinity or a NaN at any rank is NaN everywhere at all ranks: a GradScaler can skip the step.
        """
        try:
            work.wait()
        except NonFiniteError as error:
            warnings.warn(f"{error}: the sum is NaN at all ranks", stacklevel=1)
            return self.tensor.fill_(torch.nan)
        return self.tensor if self.summed is self.tensor else self.tensor.copy_(self.summed)


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph, if it can be written where it is."""
    if not tensor.is_contiguous():
        raise ArgumentError(
            f"a tensor of shape {tuple(tensor.shape)} is not contiguous in memory, and the result goes where it is: give x.contiguous() "
            "and copy the result back"
        )
    return tensor.detach()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory. Older PyTorch has no booleans and no bfloat16 in DLPack."""
    return contiguous(tensor).reshape(-1).view(torch.uint8)
