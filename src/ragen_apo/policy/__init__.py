"""The policy: a causal language model, its tokenizer, generation with a ragged cache, scoring."""
