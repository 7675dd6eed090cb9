"""The operations of a decoder layer, with equal signatures for each kind of device."""
