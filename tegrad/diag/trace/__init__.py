"""`tegrad trace`: driver calls that a Tracer, strace or the preload library recorded, read, shown and compared."""
