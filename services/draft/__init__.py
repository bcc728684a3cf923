"""The stage-1 drafter: a small causal language model."""
