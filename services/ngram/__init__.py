"""The stage-2 drafter: n-grams, without torch."""
