"""One optimizer step in plain torch."""
