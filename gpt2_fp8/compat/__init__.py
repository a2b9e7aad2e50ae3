"""Everything private in other libraries that this project uses: one file a library.

Each file says for which versions it holds, and each function why a public one will not do. `tests/compat` holds a
contract test for each. Run these on a new version before its pin in `pyproject.toml` is moved. Those of Transformer
Engine and FlashAttention are in `tests/gpu/test_compat.py`. Nothing here knows anything of this project.
"""
