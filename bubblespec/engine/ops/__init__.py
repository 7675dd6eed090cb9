"""The operations of a decoder that attends to a cache: one file per kind of device."""
