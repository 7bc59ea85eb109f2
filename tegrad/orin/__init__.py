"""The emulated Orin: processes of its own that serve the nvgpu and nvmap drivers and execute what they are given.

`client` is what a program uses (`BoardKernel`); `board` starts and finds boards; `server` is the driver process with
one module per driver part; `link` joins it to the process that is the GPU (`gpu`). See docs/board.md.
"""
