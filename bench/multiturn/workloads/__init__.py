"""Conversations from everywhere: one module a source. They read files and draw numbers, and do nothing else."""
