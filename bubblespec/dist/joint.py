"""The collectives of forwards that all ranks compute together."""

import torch
import torch.distributed as dist

from bubblespec.dist.ranks import Ranks, all_gather


class RankJoint:
    """The engine's `Joint`, of the ranks of a run."""

    def __init__(self, ranks: Ranks):
        self.ranks, self.rank, self.size = ranks, ranks.rank, ranks.world_size
        # Gloo's sums go through the host.
        self.can_capture = (
            ranks.device.type == "cuda" and dist.is_initialized() and dist.get_backend() == "nccl"
        )

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place. On a GPU the host does not wait for it: a rank that is missing
        is found at the next gather, which comes after it in the stream."""
        if tensor.device.type == "cuda":
            dist.all_reduce(tensor)
            return tensor
        return self.ranks.sum_(tensor)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Equally shaped tensors of all ranks: [size, ...]. The host waits for it."""
        if tensor.device.type == "cpu":
            return torch.from_numpy(self.ranks.gather(tensor.numpy()))
        everyone = tensor.new_empty(self.size, *tensor.shape)
        own = tensor.contiguous().view(-1)
        self.ranks.complete(lambda: all_gather(everyone.view(-1), own, async_op=True))
        return everyone
