"""Section 0: how every driver decodes a command, and moves the argument block."""
