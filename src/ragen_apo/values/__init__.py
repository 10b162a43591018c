"""Stage 1: returns of the reference, kept in a store, and V* computed from them."""
