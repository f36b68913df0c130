"""The engine of vLLM: in the training process, or as a server. The package vllm is imported only when it is started.

core.py      vLLM in this process              engine.py    the engine, over core.py or servers shared by the ranks
processor.py our sampling inside vLLM          client.py    one server, started here or at an address
server.py    the server itself                 wire.py      the protocol of client and server; weights by NCCL
"""
