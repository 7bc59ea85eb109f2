"""Models by name: what the Hugging Face hub has, and what of it lies in the cache that its programs share.

What belongs here: names and the files behind them (`names`), the cache (`cache`), downloads (`download`). What does
not: what is in a file. Only `download`, and removing, need the hub's own library (the extra `hub`).
"""
