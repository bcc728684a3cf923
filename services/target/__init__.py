"""The verifier: the target model."""
