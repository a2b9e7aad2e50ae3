"""What a run is asked to be: the schema, its checks, and the errors.

It imports only the standard library, so that bad input is refused before torch is imported.
"""
