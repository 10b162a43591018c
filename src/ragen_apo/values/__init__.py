"""Returns of the reference in a store, and V* computed from them."""
