"""`tegrad chat`: a conversation with a model in a terminal, or through a pipe.

`talk` is the conversation, which knows of no terminal; `commands` what begins with a slash; `reading` where questions
come from, `screen` where answers go, and `session` the loop between them.
"""
