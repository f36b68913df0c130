"""The engine of vLLM: in the training process, or as a server. The package vllm is imported only when it is started.

weights.py   the policy's weights for vLLM                engine.py   the engine, over core.py or servers.py
core.py      vLLM in this process                         servers.py  one or several servers, shared by the ranks
processor.py our sampling inside vLLM                     client.py   one server, started here or at an address
wire.py      the protocol of client and server            server.py   the server itself
nccl.py      weights from GPU to GPU
"""
