"""A process in front of a stand-in server (vllm_stand_in.py): it can be killed as vLLM's own, and starts in no time.

    BACKING=127.0.0.1:PORT python vllm_proxy.py --port 0 [--child PID]

It prints the line of posttrain's server, and passes bytes on. A server that starts has no model, so at its start the
one behind it is asked to forget its own.
"""

import json
import os
import socket
import sys
import threading
from http.client import HTTPConnection


def pass_on(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def main() -> None:
    host, port = os.environ["BACKING"].split(":")
    connection = HTTPConnection(host, int(port))
    connection.request("POST", "/forget", b"{}")
    connection.getresponse().read()
    connection.close()
    listening = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
    print(json.dumps({"listening": f"http://127.0.0.1:{listening.getsockname()[1]}"}), flush=True)
    if "--child" in sys.argv:
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    while True:
        client, _ = listening.accept()
        backing = socket.create_connection((host, int(port)))
        for one, other in ((client, backing), (backing, client)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a push is many small messages
            threading.Thread(target=pass_on, args=(one, other), daemon=True).start()


if __name__ == "__main__":
    main()
