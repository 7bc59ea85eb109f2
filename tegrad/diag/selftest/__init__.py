"""`tegrad selftest`: the first boot on a Jetson in stages, the least risky first, each in a process of its own.

`stages` has the rows, `runner` runs them, `child` is the process of one, `report` tells what came of them.
"""
