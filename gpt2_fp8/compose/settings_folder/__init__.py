"""A user's settings folder, which may be a stranger's: what keeps its files from running code or exhausting memory."""
