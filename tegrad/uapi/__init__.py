"""The boundary to the nvgpu, nvmap and host1x-fence drivers: structs, ioctl rows, the Kernel seam, errors, tracing."""
