"""Training of drafts: what the target writes is collected once, then a draft is fitted to it."""
