"""The emulated Orin: its own processes, which serve the nvgpu and nvmap drivers over sockets and execute what they are given.

`client` is what a program uses (`BoardKernel`); `board` starts and finds boards; `server` is the driver process with one
module per driver part; `link` joins it to the process that is the GPU (`gpu`). See docs/board.md.
"""
