#!/usr/bin/env python3
"""A conversation with a model, in the terminal or through a pipe.

`python examples/chat.py MODEL` takes a GGUF file, or the name of a pulled model; without one, the shipped model.
"""

import sys

import tegrad
from tegrad import models

tegrad.choose_device()
talk = []
with tegrad.LLM(sys.argv[1] if sys.argv[1:] else models.SMALL) as llm:
    print("> ", end="", flush=True)
    for question in sys.stdin:
        talk.append({"role": "user", "content": question.strip()})
        with llm.stream(talk, max_tokens=200) as stream:
            for piece in stream:
                print(piece, end="", flush=True)
        talk.append(stream.reply.message)
        print("\n> ", end="", flush=True)
print()
