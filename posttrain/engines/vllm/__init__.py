"""The engine of vLLM: in the training process, or as a server. The package vllm is imported where it is started only.

weights.py   the policy's weights as vLLM takes them      engine.py   the engine, over either of the two below
core.py      vLLM in this process                         client.py   a server, started here or at an address
drawing.py   our drawing inside vLLM                      server.py   that server
wire.py      what client and server say to one another
"""
