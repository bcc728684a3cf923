"""A Hugging Face causal language model that runs token trees of many sessions in one forward pass."""
