"""tinygrad's NV device on this machine."""
