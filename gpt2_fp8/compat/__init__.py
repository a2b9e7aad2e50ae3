"""Everything private in other libraries that this project uses: one file a library.

Each file says for which versions it holds. `tests/compat` and `tests/gpu/test_compat.py` hold a contract test for each
function. Run these on a new version before its pin in `pyproject.toml` is moved. Nothing here knows this project.
"""
