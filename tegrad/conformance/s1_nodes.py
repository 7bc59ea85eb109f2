"""Section 1: device nodes, fds, what keeps what alive, and what a close does."""
