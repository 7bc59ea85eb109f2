"""NVIDIA's own nvgpu code, built for user space, as an oracle of the board: its recorded answers, and the board's."""
