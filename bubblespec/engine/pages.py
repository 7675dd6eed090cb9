"""Pages of the K/V cache, and their rows (PagedAttention, Kwon et al. 2023, arXiv 2309.06180).

A row takes pages as it grows, so its memory depends on its length, not on its limit. Rows with the
same prompt share the pages that the prompt fills: these are never written again, and are free once
no row has them. The page that a prompt fills in part is copied.
"""

from typing import TypeVar

import numpy as np

Lengths = TypeVar("Lengths", np.ndarray, int)


class Pages:
    """Block tables of slots, and the free pages. All on the host."""

    def __init__(self, num_slots: int, slot_length: int, num_pages: int, page_size: int):
        """page_size: a divisor of slot_length. Raises ValueError for too few pages for one row."""
        if num_pages * page_size < slot_length:
            raise ValueError(
                f"{num_pages} pages of {page_size} positions are too few for a row of {slot_length}"
            )
        self.num_pages, self.page_size, self.slot_length = num_pages, page_size, slot_length
        # The pages of each slot, in order. Behind them, and in a last row for the padding of
        # forwards, there is a spare page of no row, whose number is num_pages. No row needs the
        # last column: it is read ahead (see triton_ops.py).
        shape = (num_slots + 1, slot_length // page_size + 1)
        self.table = np.full(shape, num_pages, np.int32)
        self.held = np.zeros(num_slots, np.int64)  # pages of each slot
        self.version = 0  # changes with the table
        self._num_rows = np.zeros(num_pages, np.int64)  # reference count of each page
        self._free = list(range(num_pages - 1, -1, -1))

    @classmethod
    def for_rows(
        cls, num_slots: int, max_length: int, page_size: int, num_pages: int | None = None
    ) -> "Pages":
        """Create pages for rows of max_length tokens; by default enough for all slots."""
        per_row = -(-max_length // page_size)
        count = num_slots * per_row if num_pages is None else num_pages
        return cls(num_slots, per_row * page_size, count, page_size)

    @property
    def num_free(self) -> int:
        """Pages of no row."""
        return len(self._free)

    def needed(self, lengths: Lengths) -> Lengths:
        """Return the pages for this many positions."""
        return -(-lengths // self.page_size)

    def lacking(self, lengths: np.ndarray) -> int:
        """Return the pages that first slots lack for this many positions each, int64 [R]."""
        return int(np.maximum(self.needed(lengths) - self.held[: len(lengths)], 0).sum())

    def room(self, lengths: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Return the positions behind `lengths` for some slots, int64 [slots].

        These are in the pages that a slot has or needs, and in its share of free pages."""
        free = max(self.num_free - self.lacking(lengths), 0) // len(slots)
        pages = np.maximum(self.needed(lengths), self.held[: len(lengths)])[slots] + free
        return pages * self.page_size - lengths[slots]

    def grow(self, lengths: np.ndarray) -> None:
        """Reserve pages for this many positions of the first slots, int64 [R]."""
        needed = self.needed(lengths)
        for slot in np.flatnonzero(needed > self.held[: len(lengths)]).tolist():
            self._take(slot, int(needed[slot]) - int(self.held[slot]))

    def truncate(self, slot: int, length: int = 0) -> None:
        """Keep the pages of the slot's first `length` positions."""
        keep, held = int(self.needed(length)), int(self.held[slot])
        if keep >= held:
            return
        pages = self.table[slot, keep:held]
        self._num_rows[pages] -= 1
        self._free += pages[self._num_rows[pages] == 0].tolist()
        self.table[slot, keep:held] = self.num_pages
        self.held[slot] = keep
        self.version += 1

    def move(self, source: int, target: int) -> None:
        """Move the pages of slot `source` to slot `target`."""
        self.truncate(target)
        self.table[target], self.held[target] = self.table[source], self.held[source]
        self.table[source], self.held[source] = self.num_pages, 0
        self.version += 1

    def share(self, source: int, target: int, length: int) -> tuple[int, int, int]:
        """Share the pages that the first positions of slot `source` fill; return the copy to make.

        The rest gets a new page: returns the page, its copy, and the positions in it."""
        self.truncate(target)
        whole, rest = divmod(length, self.page_size)
        self.table[target, :whole] = self.table[source, :whole]
        self._num_rows[self.table[source, :whole]] += 1
        self.held[target] = whole
        self.version += 1
        if rest:
            self._take(target, 1)
            return int(self.table[source, whole]), int(self.table[target, whole]), rest
        return self.num_pages, self.num_pages, 0

    def clear(self) -> None:
        """Free the pages of all slots."""
        for slot in np.flatnonzero(self.held).tolist():
            self.truncate(slot)

    def _take(self, slot: int, count: int) -> None:
        assert count <= len(self._free), "the caller reserves pages"
        taken, held = self._free[len(self._free) - count :], int(self.held[slot])
        del self._free[len(self._free) - count :]
        self.table[slot, held : held + count] = taken
        self._num_rows[taken] = 1
        self.held[slot] += count
        self.version += 1
