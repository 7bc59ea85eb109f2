"""Hardware facts as data, each with its source: chips, QMD layouts, class methods, GPFIFO and USERD, error codes.

Nothing here talks to a device or imports anything else of tegrad; the queue that writes, the board that reads and the
tracer that prints share these declarations.
"""
