"""The engine of vLLM: in the training process, or as a server. The package vllm is imported only when it is started.

weights.py   the policy's weights for vLLM                engine.py   the engine, over either of the two below
core.py      vLLM in this process                         client.py   a server, started here or at an address
processor.py our sampling inside vLLM                     server.py   that server
wire.py      the protocol of client and server
"""
