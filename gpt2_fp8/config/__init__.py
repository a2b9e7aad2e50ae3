"""What a run is asked to be: the schema, its checks, and the errors. Standard library only, so that bad input is
refused before torch is imported."""
