"""Keys and values of all rows, one contiguous slot per row. The caller tracks lengths; lowering one
rolls the row back."""

import torch


class KVCache:
    """`keys[layer]` and `values[layer]`: [num_slots + num_spare, slot_length, key/value heads, head
    dimension].

    Spare slots belong to no row: padding of fixed-size forwards writes there.

    A layer's tensors are made at its first write, in the shape and type of its keys and values:
    model configurations name those in too many ways. They start as zeros, because masked positions
    are multiplied by zero and must be finite.
    """

    def __init__(self, num_slots: int, slot_length: int, num_spare: int = 0):
        self.num_slots, self.slot_length, self.num_spare = num_slots, slot_length, num_spare
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def write(self, layer: int, slot, position, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store N new entries. slot, position: int64 [N]; key, value: [N, heads, dimension]."""
        if layer not in self.keys:
            slots = self.num_slots + self.num_spare
            self.keys[layer] = key.new_zeros(slots, self.slot_length, *key.shape[1:])
            self.values[layer] = value.new_zeros(slots, self.slot_length, *value.shape[1:])
        self.keys[layer][slot, position] = key
        self.values[layer][slot, position] = value

    @torch.inference_mode()  # the tensors are made in inference mode, and may only be written in it
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to slot `target`."""
        for tensor in (*self.keys.values(), *self.values.values()):
            tensor[target, :length] = tensor[source, :length]

    def clear(self) -> None:
        """Give the memory back. The next write makes the tensors again, as zeros."""
        self.keys.clear()
        self.values.clear()

    def num_bytes(self) -> int:
        """Bytes of the tensors that exist; 0 before the first forward."""
        return sum(tensor.nbytes for tensor in (*self.keys.values(), *self.values.values()))
