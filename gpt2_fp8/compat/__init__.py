"""Everything that is private in other libraries, and yet used: one file a library, Lightning's by subject.

Each file says which versions it holds for, and each function why a public one will not do. `tests/compat` holds a
contract test for each, to be run on a new version before its pin in `pyproject.toml` is moved; those of Transformer
Engine and FlashAttention are in `tests/gpu/test_compat.py`. Nothing here knows anything of this project.
"""
