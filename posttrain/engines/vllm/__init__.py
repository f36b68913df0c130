"""The vLLM engine: in the training process, or as a server. The vllm package is imported only when an engine starts.

core.py      vLLM in this process              engine.py    the engine, on core.py or on servers shared by the ranks
processor.py our sampling inside vLLM          client.py    one server, started here or at a configured address
server.py    the server itself                 wire.py      the protocol of client and server; weights over NCCL
"""
